"""The copies of a network, and how they follow one another."""
