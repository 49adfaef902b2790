"""What agents are made of: networks, policies, copies, replay."""
