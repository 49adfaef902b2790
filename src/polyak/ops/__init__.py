"""Pure functions of arrays: returns, losses, distributions, running statistics, parameter updates."""
