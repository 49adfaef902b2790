"""The keys with which a person acts in an environment, as the environment defines them."""

import sys
from collections.abc import Mapping
from typing import Any

import gymnasium

ATARI_KEYS = {"UP": "w", "DOWN": "s", "LEFT": "a", "RIGHT": "d", "FIRE": " "}
"""The keys of the ALE's own environments."""


def keys_to_action(env: Any) -> Mapping[Any, Any] | None:
    """Actions by tuples of keys, as `get_keys_to_action` of Gymnasium's environments returns them; None if there are none."""
    if isinstance(env, gymnasium.Env):
        return env.get_wrapper_attr("get_keys_to_action")() if env.has_wrapper_attr("get_keys_to_action") else None
    if "ale_py" not in sys.modules:
        return None
    from ale_py.vector_env import AtariVectorEnv

    if not isinstance(env, AtariVectorEnv):
        return None
    names = [action.name for action in env.ale.get_action_set()]
    return {tuple(key for part, key in ATARI_KEYS.items() if part in name): number for number, name in enumerate(names)}
