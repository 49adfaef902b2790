"""polyak: reinforcement learning in JAX in which every copy of a network, and how it follows the others, is explicit."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyak import data as data
    from polyak import envs as envs
    from polyak import importers as importers
    from polyak import loops as loops
    from polyak import policies as policies
    from polyak import presets as presets
    from polyak import replay as replay
    from polyak import schedules as schedules
    from polyak import train as train
    from polyak.agents.a2c import A2C as A2C
    from polyak.agents.agent import BaseAgent as BaseAgent
    from polyak.agents.bc import BC as BC
    from polyak.agents.bootstrapped_dqn import BootstrappedDQN as BootstrappedDQN
    from polyak.agents.bro import BRO as BRO
    from polyak.agents.c51 import C51 as C51
    from polyak.agents.cql import CQL as CQL
    from polyak.agents.crossq import CrossQ as CrossQ
    from polyak.agents.ddpg import DDPG as DDPG
    from polyak.agents.dqn import DQN as DQN
    from polyak.agents.fast_td3 import FastTD3 as FastTD3
    from polyak.agents.fql import FQL as FQL
    from polyak.agents.impala import IMPALA as IMPALA
    from polyak.agents.iql import IQL as IQL
    from polyak.agents.iqn import IQN as IQN
    from polyak.agents.naf import NAF as NAF
    from polyak.agents.ppo import PPO as PPO
    from polyak.agents.ppo_kl import PPOKL as PPOKL
    from polyak.agents.pqn import PQN as PQN
    from polyak.agents.qrdqn import QRDQN as QRDQN
    from polyak.agents.qt_opt import QTOpt as QTOpt
    from polyak.agents.reinforce import REINFORCE as REINFORCE
    from polyak.agents.rnd import RND as RND
    from polyak.agents.rnd_dqn import RNDDQN as RNDDQN
    from polyak.agents.sac import SAC as SAC
    from polyak.agents.td3 import TD3 as TD3
    from polyak.agents.td3_bc import TD3BC as TD3BC
    from polyak.agents.tqc import TQC as TQC
    from polyak.agents.xqc import XQC as XQC
    from polyak.copies.follow import Follow as Follow
    from polyak.copies.network_copies import NetworkCopies as NetworkCopies
    from polyak.core.spaces import EnvSpec as EnvSpec
    from polyak.core.types import Agent as Agent
    from polyak.core.types import Env as Env
    from polyak.core.types import HostEnv as HostEnv
    from polyak.core.types import Policy as Policy
    from polyak.core.types import PolicyStep as PolicyStep
    from polyak.core.types import Progress as Progress
    from polyak.core.types import Rollout as Rollout
    from polyak.core.types import TimeStep as TimeStep
    from polyak.core.types import Variables as Variables
    from polyak.load import load_policy as load_policy
    from polyak.loops.evaluate import evaluate as evaluate
    from polyak.networks.actor import Actor as Actor
    from polyak.networks.adapters import Equinox as Equinox
    from polyak.networks.adapters import FlaxLinen as FlaxLinen
    from polyak.networks.adapters import FlaxNNX as FlaxNNX
    from polyak.networks.critics import Critics as Critics
    from polyak.networks.feedforward import MLP as MLP
    from polyak.networks.feedforward import NatureCNN as NatureCNN
    from polyak.networks.heads import PolicyAndValue as PolicyAndValue
    from polyak.networks.heads import Quantiles as Quantiles
    from polyak.networks.heads import QValues as QValues
    from polyak.networks.pair import ActorAndCritic as ActorAndCritic
    from polyak.networks.recurrent import GRU as GRU
    from polyak.networks.recurrent import LSTM as LSTM
    from polyak.off_policy_evaluation.policy_value import evaluate_offline as evaluate_offline
    from polyak.ops.optax_updates import apply_updates as apply_updates
    from polyak.ops.optax_updates import incremental_update as incremental_update
    from polyak.ops.optax_updates import periodic_update as periodic_update
    from polyak.ops.schedules import Linear as Linear
    from polyak.ops.updates import soft_update as soft_update
    from polyak.packs import pack as pack
    from polyak.policies.python.policy import PythonPolicy as PythonPolicy
    from polyak.replay.hindsight import HindsightReplay as HindsightReplay
    from polyak.replay.prioritized import PrioritizedReplay as PrioritizedReplay
    from polyak.replay.sequences import SequenceReplay as SequenceReplay
    from polyak.replay.uniform import UniformReplay as UniformReplay
    from polyak.reports.plots import plot as plot
    from polyak.reports.records import load_run as load_run
    from polyak.reports.report import report as report
    from polyak.reports.tables import load_runs as load_runs
    from polyak.studies.study import study as study
    from polyak.train.resumption import resume as resume
    from polyak.train.run_video import video as video
    from polyak.train.run_video import watch as watch

_PACKAGES = ("data", "envs", "importers", "loops", "policies", "presets", "replay", "schedules", "train")
_MODULES = {
    "agents.a2c": ("A2C",),
    "agents.agent": ("BaseAgent",),
    "agents.bc": ("BC",),
    "agents.bootstrapped_dqn": ("BootstrappedDQN",),
    "agents.bro": ("BRO",),
    "agents.c51": ("C51",),
    "agents.cql": ("CQL",),
    "agents.crossq": ("CrossQ",),
    "agents.ddpg": ("DDPG",),
    "agents.dqn": ("DQN",),
    "agents.fast_td3": ("FastTD3",),
    "agents.fql": ("FQL",),
    "agents.impala": ("IMPALA",),
    "agents.iql": ("IQL",),
    "agents.iqn": ("IQN",),
    "agents.naf": ("NAF",),
    "agents.ppo": ("PPO",),
    "agents.ppo_kl": ("PPOKL",),
    "agents.pqn": ("PQN",),
    "agents.qrdqn": ("QRDQN",),
    "agents.qt_opt": ("QTOpt",),
    "agents.reinforce": ("REINFORCE",),
    "agents.rnd": ("RND",),
    "agents.rnd_dqn": ("RNDDQN",),
    "agents.sac": ("SAC",),
    "agents.td3": ("TD3",),
    "agents.td3_bc": ("TD3BC",),
    "agents.tqc": ("TQC",),
    "agents.xqc": ("XQC",),
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
    "networks.pair": ("ActorAndCritic",),
    "networks.recurrent": ("GRU", "LSTM"),
    "off_policy_evaluation.policy_value": ("evaluate_offline",),
    "ops.optax_updates": ("apply_updates", "incremental_update", "periodic_update"),
    "ops.schedules": ("Linear",),
    "ops.updates": ("soft_update",),
    "packs": ("pack",),
    "policies.python.policy": ("PythonPolicy",),
    "replay.hindsight": ("HindsightReplay",),
    "replay.prioritized": ("PrioritizedReplay",),
    "replay.sequences": ("SequenceReplay",),
    "replay.uniform": ("UniformReplay",),
    "reports.plots": ("plot",),
    "reports.records": ("load_run",),
    "reports.report": ("report",),
    "reports.tables": ("load_runs",),
    "studies.study": ("study",),
    "train.resumption": ("resume",),
    "train.run_video": ("video", "watch"),
}

__all__ = sorted([*_PACKAGES, *(name for names in _MODULES.values() for name in names)])


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
