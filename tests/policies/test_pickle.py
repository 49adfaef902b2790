"""A policy and its state go to another process by `pickle`."""

import multiprocessing
import pickle

import jax
import numpy as np
import pytest

from polyak.agents.bootstrapped_dqn import BootstrappedDQN
from polyak.agents.bro import BRO
from polyak.agents.c51 import C51
from polyak.agents.crossq import CrossQ
from polyak.agents.dqn import DQN
from polyak.agents.fast_td3 import FastTD3
from polyak.agents.iqn import IQN
from polyak.agents.naf import NAF
from polyak.agents.ppo import PPO
from polyak.agents.qt_opt import QTOpt
from polyak.agents.rnd_dqn import RNDDQN
from polyak.agents.sac import SAC
from polyak.agents.td3 import TD3
from polyak.agents.tqc import TQC
from polyak.agents.xqc import XQC
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.networks.actor import Actor
from polyak.networks.critics import Critics
from polyak.networks.feedforward import MLP, NatureCNN
from polyak.networks.heads import QValues
from polyak.networks.recurrent import GRU, LSTM
from polyak.replay import SequenceReplay, UniformReplay

OBS, ACTIONS, FORCES = Box(-1.0, 1.0, (4,)), Discrete(3), Box(-1.0, 1.0, (2,))
IMAGES = Box(0, 255, (84, 84, 4), dtype="uint8")
CONTINUOUS = {"actor": Actor((8,)), "critics": Critics((8,)), "replay": UniformReplay(100)}
NORMALIZED = {"actor": Actor((8,), norm="batch_renorm"), "critics": Critics((8,), norm="batch_renorm")}
AGENTS = {
    "ppo": lambda: PPO(EnvSpec(OBS, ACTIONS), network=MLP((8,), activation="tanh")),
    "ppo with images": lambda: PPO(EnvSpec(IMAGES, ACTIONS), network=NatureCNN((8,))),
    "lstm": lambda: PPO(EnvSpec(OBS, ACTIONS), network=LSTM(8)),
    "gru": lambda: PPO(EnvSpec(OBS, ACTIONS), network=GRU(8)),
    "recurrent dqn": lambda: DQN(EnvSpec(OBS, ACTIONS), network=LSTM(8), replay=SequenceReplay(100, 4)),
    "dqn": lambda: DQN(EnvSpec(OBS, ACTIONS), network=MLP((8,), norm="layer"), replay=UniformReplay(100)),
    "noisy": lambda: DQN(EnvSpec(OBS, ACTIONS), network=MLP((8,), head=QValues(noisy=True)), replay=UniformReplay(100)),
    "c51": lambda: C51(EnvSpec(OBS, ACTIONS), replay=UniformReplay(100)),
    "bootstrapped": lambda: BootstrappedDQN(EnvSpec(OBS, ACTIONS), replay=UniformReplay(100)),
    "iqn": lambda: IQN(EnvSpec(OBS, ACTIONS), replay=UniformReplay(100)),
    "rnd_dqn": lambda: RNDDQN(EnvSpec(OBS, ACTIONS), replay=UniformReplay(100)),
    "sac": lambda: SAC(EnvSpec(OBS, FORCES), **CONTINUOUS),
    "td3": lambda: TD3(EnvSpec(OBS, FORCES), **CONTINUOUS | {"actor": Actor((8,), std="fixed")}),
    "fast_td3": lambda: FastTD3(EnvSpec(OBS, FORCES), **CONTINUOUS | {"actor": Actor((8,), std="fixed")}),
    "crossq": lambda: CrossQ(EnvSpec(OBS, FORCES), **CONTINUOUS | NORMALIZED),
    "naf": lambda: NAF(EnvSpec(OBS, FORCES), network=MLP((8,)), replay=UniformReplay(100)),
    "qt_opt": lambda: QTOpt(EnvSpec(OBS, FORCES), critics=Critics((8,)), replay=UniformReplay(100)),
    "bro": lambda: BRO(EnvSpec(OBS, FORCES), **CONTINUOUS),
    "tqc": lambda: TQC(EnvSpec(OBS, FORCES), **CONTINUOUS),
    "xqc": lambda: XQC(EnvSpec(OBS, FORCES), **CONTINUOUS | NORMALIZED),
}


@pytest.mark.parametrize("name", AGENTS)
def test_a_policy_and_the_state_survive_pickle(name):
    agent = AGENTS[name]()
    state = agent.init(jax.random.key(0))
    obs = np.ones((3, *agent.spec.obs.shape), agent.spec.obs.dtype)
    for policy in (agent.policy(state), agent.collect_policy(state)):
        again = pickle.loads(pickle.dumps(policy))
        assert jax.tree.structure(again) == jax.tree.structure(policy)
        np.testing.assert_array_equal(again.predict(obs)[0], policy.predict(obs)[0])
    again = pickle.loads(pickle.dumps(state))
    assert jax.tree.structure(again) == jax.tree.structure(state)
    jax.tree.map(np.testing.assert_array_equal, *(jax.tree.leaves(agent.policy(x)) for x in (again, state)))


def test_a_policy_acts_in_another_process_as_it_does_here():
    agent = AGENTS["dqn"]()
    policy = agent.policy(agent.init(jax.random.key(0)))
    obs = np.linspace(-1.0, 1.0, 40, dtype=np.float32).reshape(10, 4)
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        there = pool.apply_async(act, (policy, obs)).get(timeout=120)
    np.testing.assert_array_equal(there, policy.predict(obs)[0])


def act(policy, obs):
    return policy.predict(obs)[0]
