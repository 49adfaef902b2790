"""What things are: structs, spaces, and the types and protocols that every other room speaks in."""
