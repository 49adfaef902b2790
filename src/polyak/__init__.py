"""polyak: reinforcement learning in JAX in which every copy of a network, and how it follows the others, is explicit."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyak import envs, importers, loops, policies, presets, replay, schedules, train
    from polyak.agents.a2c import A2C
    from polyak.agents.agent import BaseAgent
    from polyak.agents.c51 import C51
    from polyak.agents.ddpg import DDPG
    from polyak.agents.dqn import DQN
    from polyak.agents.impala import IMPALA
    from polyak.agents.iqn import IQN
    from polyak.agents.ppo import PPO
    from polyak.agents.ppo_kl import PPOKL
    from polyak.agents.pqn import PQN
    from polyak.agents.qrdqn import QRDQN
    from polyak.agents.sac import SAC
    from polyak.agents.td3 import TD3
    from polyak.agents.tqc import TQC
    from polyak.copies.follow import Follow
    from polyak.copies.network_copies import NetworkCopies
    from polyak.core.spaces import EnvSpec
    from polyak.core.types import Agent, Env, HostEnv, Policy, PolicyStep, Progress, Rollout, TimeStep, Variables
    from polyak.load import load_policy
    from polyak.loops.evaluate import evaluate
    from polyak.networks.actor import Actor
    from polyak.networks.adapters import Equinox, FlaxLinen, FlaxNNX
    from polyak.networks.critics import Critics
    from polyak.networks.feedforward import MLP, NatureCNN
    from polyak.networks.heads import PolicyAndValue, Quantiles, QValues
    from polyak.networks.recurrent import GRU, LSTM
    from polyak.ops.schedules import Linear
    from polyak.ops.updates import apply_updates, incremental_update, periodic_update, soft_update
    from polyak.policies.python.policy import PythonPolicy
    from polyak.replay.prioritized import PrioritizedReplay
    from polyak.replay.sequences import SequenceReplay
    from polyak.replay.uniform import UniformReplay
    from polyak.train.resumption import resume

__all__ = [
    "A2C",
    "C51",
    "DDPG",
    "DQN",
    "GRU",
    "IMPALA",
    "IQN",
    "LSTM",
    "MLP",
    "PPO",
    "PPOKL",
    "PQN",
    "QRDQN",
    "SAC",
    "TD3",
    "TQC",
    "Actor",
    "Agent",
    "BaseAgent",
    "Critics",
    "Env",
    "EnvSpec",
    "Equinox",
    "FlaxLinen",
    "FlaxNNX",
    "Follow",
    "HostEnv",
    "Linear",
    "NatureCNN",
    "NetworkCopies",
    "Policy",
    "PolicyAndValue",
    "PolicyStep",
    "PrioritizedReplay",
    "Progress",
    "PythonPolicy",
    "QValues",
    "Quantiles",
    "Rollout",
    "SequenceReplay",
    "TimeStep",
    "UniformReplay",
    "Variables",
    "apply_updates",
    "envs",
    "evaluate",
    "importers",
    "incremental_update",
    "load_policy",
    "loops",
    "periodic_update",
    "policies",
    "presets",
    "replay",
    "resume",
    "schedules",
    "soft_update",
    "train",
]


_PACKAGES = ("envs", "importers", "loops", "policies", "presets", "replay", "schedules", "train")
_MODULES = {
    "agents.a2c": ("A2C",),
    "agents.agent": ("BaseAgent",),
    "agents.c51": ("C51",),
    "agents.ddpg": ("DDPG",),
    "agents.dqn": ("DQN",),
    "agents.impala": ("IMPALA",),
    "agents.iqn": ("IQN",),
    "agents.ppo": ("PPO",),
    "agents.ppo_kl": ("PPOKL",),
    "agents.pqn": ("PQN",),
    "agents.qrdqn": ("QRDQN",),
    "agents.sac": ("SAC",),
    "agents.td3": ("TD3",),
    "agents.tqc": ("TQC",),
    "copies.follow": ("Follow",),
    "copies.network_copies": ("NetworkCopies",),
    "core.spaces": ("EnvSpec",),
    "core.types": ("Agent", "Env", "HostEnv", "Policy", "PolicyStep", "Progress", "Rollout", "TimeStep", "Variables"),
    "load": ("load_policy",),
    "loops.evaluate": ("evaluate",),
    "networks.actor": ("Actor",),
    "networks.adapters": ("Equinox", "FlaxLinen", "FlaxNNX"),
    "networks.critics": ("Critics",),
    "networks.feedforward": ("MLP", "NatureCNN"),
    "networks.heads": ("PolicyAndValue", "QValues", "Quantiles"),
    "networks.recurrent": ("GRU", "LSTM"),
    "ops.schedules": ("Linear",),
    "ops.updates": ("apply_updates", "incremental_update", "periodic_update", "soft_update"),
    "policies.python.policy": ("PythonPolicy",),
    "replay.prioritized": ("PrioritizedReplay",),
    "replay.sequences": ("SequenceReplay",),
    "replay.uniform": ("UniformReplay",),
    "train.resumption": ("resume",),
}


def __getattr__(name: str) -> Any:
    # Modules are imported when they are used: `polyak --help` needs no JAX, a loaded policy no training stack.
    if name == "__version__":
        from importlib import metadata

        return metadata.version("polyak")
    if name in _PACKAGES:
        return importlib.import_module(f"polyak.{name}")
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"polyak.{module}"), name)
    from polyak.core.suggestions import missing_from_module

    raise AttributeError(missing_from_module("polyak", name, __all__))


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
