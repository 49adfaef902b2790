"""The algorithms, by their command-line names."""

import importlib
from typing import Any, Literal

AGENTS = {
    "a2c": "polyak.agents.a2c:A2C",
    # After "a2c", the name of the class: A3C is A2C in the loop of presets/a3c.py.
    "a3c": "polyak.agents.a2c:A2C",
    "bc": "polyak.agents.bc:BC",
    "bootstrapped_dqn": "polyak.agents.bootstrapped_dqn:BootstrappedDQN",
    "bro": "polyak.agents.bro:BRO",
    "c51": "polyak.agents.c51:C51",
    "cql": "polyak.agents.cql:CQL",
    "crossq": "polyak.agents.crossq:CrossQ",
    "ddpg": "polyak.agents.ddpg:DDPG",
    "dqn": "polyak.agents.dqn:DQN",
    # After "dqn", the name of the class: discrete CQL is DQN with the setting of presets/discrete_cql.py.
    "discrete_cql": "polyak.agents.dqn:DQN",
    "fast_td3": "polyak.agents.fast_td3:FastTD3",
    "fql": "polyak.agents.fql:FQL",
    "impala": "polyak.agents.impala:IMPALA",
    "iqn": "polyak.agents.iqn:IQN",
    "iql": "polyak.agents.iql:IQL",
    "naf": "polyak.agents.naf:NAF",
    "ppo": "polyak.agents.ppo:PPO",
    "ppo_kl": "polyak.agents.ppo_kl:PPOKL",
    "pqn": "polyak.agents.pqn:PQN",
    "qrdqn": "polyak.agents.qrdqn:QRDQN",
    "qt_opt": "polyak.agents.qt_opt:QTOpt",
    # After "c51", the name of the class: Rainbow is C51 with the settings of presets/rainbow.py.
    "rainbow": "polyak.agents.c51:C51",
    "reinforce": "polyak.agents.reinforce:REINFORCE",
    "rnd_dqn": "polyak.agents.rnd_dqn:RNDDQN",
    "sac": "polyak.agents.sac:SAC",
    # After "sac", the name of the class: these are SAC with the settings of presets/droq.py, redq.py and sr_sac.py.
    "droq": "polyak.agents.sac:SAC",
    "redq": "polyak.agents.sac:SAC",
    "sr_sac": "polyak.agents.sac:SAC",
    "td3": "polyak.agents.td3:TD3",
    "td3_bc": "polyak.agents.td3_bc:TD3BC",
    "tqc": "polyak.agents.tqc:TQC",
    "xqc": "polyak.agents.xqc:XQC",
    # After "xqc", the name of the class: both are XQC with the networks of presets/simbav2.py and presets/flash_sac.py.
    "flash_sac": "polyak.agents.xqc:XQC",
    "simbav2": "polyak.agents.xqc:XQC",
}
"""The class of each algorithm as `"module:Class"`, imported on first use because importing JAX is slow. Add an entry to train
your own algorithm with `polyak.cli.main`."""

WRAPPERS = {"rnd": "polyak.agents.rnd:RND"}
"""The classes of agents around another agent, which flags of `polyak train` put around it (`--intrinsic-reward rnd`)."""


def action_scaling_of(agent: Any) -> Literal["clip", "rescale"]:
    """Return `"rescale"` or `"clip"`: how environments scale Box actions for an agent, or for an algorithm by its name.

    An agent's spec records the scaling. Algorithms whose actions lie in [-1, 1] use `"rescale"`.
    """
    is_name = isinstance(agent, str)
    owner = agent_class(agent) if is_name and agent in AGENTS else getattr(agent, "spec", None)
    scaling: Literal["clip", "rescale"] = getattr(owner, "action_scaling", "clip")
    return scaling


def agent_class(name: str) -> Any:
    """Import the class of an algorithm in `AGENTS` or `WRAPPERS`."""
    module, _, class_name = (WRAPPERS | AGENTS)[name].partition(":")
    return getattr(importlib.import_module(module), class_name)
