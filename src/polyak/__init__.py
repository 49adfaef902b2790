"""polyak: reinforcement learning in JAX in which every copy of a network, and how it follows the others, is explicit."""
