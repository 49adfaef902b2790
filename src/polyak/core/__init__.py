"""Core data types: structs, spaces, and the types and protocols that all other rooms use."""
