"""Environments of other JAX libraries as batched dynamics, which `envs.autoreset` makes an `Env`."""
