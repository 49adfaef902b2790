"""What arrays do: returns, losses, distributions, statistics; pure mathematics, no state."""
