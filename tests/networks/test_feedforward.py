"""Networks for pictures: convolutions, an error or a warning, never a silent flattening."""

import warnings

import jax
import numpy as np
import pytest

from polyak import C51, DQN, IQN, LSTM, MLP, PPO, PQN, SAC, Actor, Critics, NatureCNN, PolicyAndValue
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, MultiDiscrete

NO_IMAGES = [
    Box(0, 1, (84, 84, 4), np.float32),
    Box(0, 255, (84, 84), np.uint8),
    Box(0, 255, (4, 84, 84, 3), np.uint8),
    Box(0, 255, (32, 32, 3), np.uint8),
    Box(0, 255, (84, 84, 3), np.int32),
]
IMAGE = Box(0, 255, (84, 84, 4), np.uint8)
AGENTS = [PPO, DQN, C51, IQN, PQN]


@pytest.mark.parametrize("obs", NO_IMAGES, ids=str)
def test_nature_cnn_rejects_observations_without_an_image(obs):
    for space in (obs, Dict({"camera": obs})):
        spec = EnvSpec(space, Discrete(2))
        for agent in AGENTS:
            with pytest.raises(
                ValueError, match=rf"{agent.__name__}: NatureCNN needs an image .* a uint8 Box of three axes.*; got"
            ):
                agent(spec, network=NatureCNN((8,)))
        with pytest.raises(ValueError, match="NatureCNN: NatureCNN needs an image"):
            NatureCNN((8,), head=PolicyAndValue()).init(jax.random.key(0), spec)


@pytest.mark.parametrize("obs", NO_IMAGES, ids=str)
@pytest.mark.parametrize("agent", [*AGENTS, SAC], ids=lambda agent: agent.__name__)
def test_default_networks_warn_that_they_flatten_a_large_box(agent, obs):
    with pytest.warns(UserWarning, match=rf"{agent.__name__}: \w+=None flattens Box.* has [\d,]+ parameters") as caught:
        agent(EnvSpec(Dict({"camera": obs, "speed": Box(-1, 1, (3,))}), Discrete(2)))
    assert len(caught) == (2 if agent is SAC else 1)


def test_the_warning_has_the_number_of_parameters():
    spec = EnvSpec(NO_IMAGES[0], MultiDiscrete([2, 3]))
    size = 84 * 84 * 4
    with pytest.warns(UserWarning, match=f"has {size * 64 + 64 + 64 * 64 + 64 + 64 * 6 + 6:,} parameters"):
        DQN(spec)


def test_images_small_boxes_and_networks_of_ones_own_cause_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for obs in (IMAGE, Dict({"camera": IMAGE, "speed": Box(-1, 1, (3,))}), Box(0, 1, (1080,))):
            for agent in (*AGENTS, SAC):
                agent(EnvSpec(obs, Discrete(2)))
        flat = EnvSpec(NO_IMAGES[0], Discrete(2))
        PPO(flat, network=MLP((8,)))
        PPO(flat, network=LSTM(8))
        SAC(flat, actor=Actor((8,)), critics=Critics((8,)))
