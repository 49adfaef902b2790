"""The names of environments, found without importing JAX or gymnax."""

import ast
import importlib.util
from pathlib import Path

JAX_ENVIRONMENTS = ("CartPole-v1", "Pendulum-v1", "Acrobot-v1", "MountainCar-v0")
# Fails in its first step, as it indexes a scalar reward (gymnax 0.0.9).
BROKEN = ("SimpleBandit-bsuite",)


def names() -> dict[str, list[str]]:
    """The names that `make` knows, by source; those of gymnax and Atari only if they are installed."""
    import gymnasium

    register_atari()
    # `make` also accepts the ALE's older names; there are hundreds, so they are not listed.
    atari = {name for name, spec in gymnasium.registry.items() if str(spec.entry_point).startswith("ale_py.")}
    return {
        "jax": [f"jax/{name}" for name in JAX_ENVIRONMENTS],
        "gymnax": [f"gymnax/{name}" for name in gymnax_names()],
        "atari": sorted(name for name in atari if name.startswith("ALE/")),
        "gymnasium": sorted(set(gymnasium.registry) - atari),
    }


def gymnax_names() -> list[str]:
    """The names of gymnax's environments, read from its source: importing it takes seconds. Empty if it is not installed."""
    found = importlib.util.find_spec("gymnax")
    if found is None or found.origin is None:
        return []
    for node in ast.parse((Path(found.origin).parent / "registration.py").read_text("utf-8")).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "registered_envs":
            return [name for name in ast.literal_eval(node.value) if name not in BROKEN]
    return []


def register_atari() -> bool:
    """Register the Atari games with Gymnasium, which importing ale-py does; whether it is installed."""
    if importlib.util.find_spec("ale_py") is None:
        return False
    import ale_py as ale_py

    return True
