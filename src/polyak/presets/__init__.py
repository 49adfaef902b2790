"""Presets: tuned settings by algorithm and environment, as plain Python."""

from polyak.presets import ppo
from polyak.presets.ppo import mujoco
from polyak.presets.preset import Preset

__all__ = ["DEFAULT", "PRESETS", "Preset", "mujoco", "preset"]

PRESETS: dict[tuple[str, str], Preset] = {("ppo", env_id): found for env_id, found in ppo.PRESETS.items()}

DEFAULT = Preset(1_000_000, 8, lambda env_steps: {}, "the algorithm's defaults")


def preset(algorithm: str, env_id: str) -> Preset:
    """The preset of that algorithm and environment, else the algorithm's defaults.

    `jax/CartPole-v1` has that of `CartPole-v1`: it is the same task. All Atari games have one. A `module:` before the name
    only names what to import.
    """
    name = env_id.rpartition(":")[2]
    task = "ALE/..." if name.startswith("ALE/") else name.removeprefix("jax/")
    return PRESETS.get((algorithm, task), DEFAULT)
