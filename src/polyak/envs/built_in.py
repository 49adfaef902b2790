"""The environments in JAX that polyak has itself, by the name after `jax/`."""

from collections.abc import Callable

from polyak.envs import classic
from polyak.envs.autoreset import Dynamics
from polyak.envs.bit_flipping import BitFlipping

DYNAMICS: dict[str, Callable[..., Dynamics]] = {**classic.DYNAMICS, "BitFlipping-v0": BitFlipping}
