"""polyak: reinforcement learning in JAX in which every copy of a network, and how it follows the others, is explicit."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyak import envs, policies, presets, schedules, train
    from polyak.agents.ppo import PPO
    from polyak.copies.follow import Follow
    from polyak.copies.network_copies import NetworkCopies
    from polyak.core.spaces import EnvSpec
    from polyak.core.types import Agent, Env, HostEnv, Policy, PolicyStep, Progress, Rollout, TimeStep, Variables
    from polyak.load import load_policy
    from polyak.networks.actor_critic import mlp, nature_cnn
    from polyak.networks.adapters import Equinox, FlaxLinen, FlaxNNX
    from polyak.networks.recurrent import gru, lstm
    from polyak.ops.schedules import Linear
    from polyak.ops.updates import apply_updates, incremental_update, periodic_update, soft_update
    from polyak.policies.python.policy import PythonPolicy

__all__ = [
    "PPO",
    "Agent",
    "Env",
    "EnvSpec",
    "Equinox",
    "FlaxLinen",
    "FlaxNNX",
    "Follow",
    "HostEnv",
    "Linear",
    "NetworkCopies",
    "Policy",
    "PolicyStep",
    "Progress",
    "PythonPolicy",
    "Rollout",
    "TimeStep",
    "Variables",
    "apply_updates",
    "envs",
    "gru",
    "incremental_update",
    "load_policy",
    "lstm",
    "mlp",
    "nature_cnn",
    "periodic_update",
    "policies",
    "presets",
    "schedules",
    "soft_update",
    "train",
]


def __getattr__(name: str) -> Any:
    # Modules are imported when they are used: `polyak --help` needs no JAX, a loaded policy no training stack.
    match name:
        case "__version__":
            from importlib import metadata

            return metadata.version("polyak")
        case "PPO":
            from polyak.agents import ppo

            return ppo.PPO
        case "EnvSpec":
            from polyak.core import spaces

            return spaces.EnvSpec
        case "Agent" | "Env" | "HostEnv" | "Policy" | "PolicyStep" | "Progress" | "Rollout" | "TimeStep" | "Variables":
            from polyak.core import types

            return getattr(types, name)
        case "Follow":
            from polyak.copies import follow

            return follow.Follow
        case "apply_updates" | "incremental_update" | "periodic_update" | "soft_update":
            from polyak.ops import updates

            return getattr(updates, name)
        case "NetworkCopies":
            from polyak.copies import network_copies as copies

            return copies.NetworkCopies
        case "Linear":
            from polyak.ops import schedules

            return schedules.Linear
        case "Equinox" | "FlaxLinen" | "FlaxNNX":
            from polyak.networks import adapters

            return getattr(adapters, name)
        case "mlp" | "nature_cnn":
            from polyak.networks import actor_critic as networks

            return getattr(networks, name)
        case "gru" | "lstm":
            from polyak.networks import recurrent

            return getattr(recurrent, name)
        case "PythonPolicy":
            from polyak.policies.python import policy as python_policy

            return python_policy.PythonPolicy
        case "load_policy":
            from polyak import load

            return load.load_policy
        case "envs":
            import polyak.envs

            return polyak.envs
        case "policies":
            import polyak.policies

            return polyak.policies
        case "schedules":
            import polyak.schedules

            return polyak.schedules
        case "presets":
            import polyak.presets

            return polyak.presets
        case "train":
            import polyak.train

            return polyak.train
    raise AttributeError(f"module 'polyak' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
