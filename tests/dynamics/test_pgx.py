"""Pgx' games of one player, where it is installed: its steps and masks, our resets."""

import jax
import numpy as np
import pytest

from polyak import envs, train
from polyak.agents.ppo import PPO
from polyak.core.spaces import Discrete, MultiBinary
from polyak.networks.feedforward import MLP
from tests.dynamics.library_steps import steps_beside

pgx = pytest.importorskip("pgx")

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]


def step_of(env):
    def step(key, state, action):
        after = env.step(state, action, key)
        return after, after.observation, after.rewards[0], after.terminated, after.truncated

    return step


def test_every_step_of_minatars_breakout_is_the_librarys_own():
    env = envs.make("pgx/minatar-breakout", num_envs=3, env_kwargs={"sticky_action_prob": 0.0})
    assert env.spec.obs == MultiBinary((10, 10, 4)) and env.spec.action == Discrete(3) and not env.spec.has_action_mask
    game = type(pgx.make("minatar-breakout"))(sticky_action_prob=0.0)
    steps = steps_beside(env, step_of(game), 40)
    assert steps.terminated.sum() >= 3 and steps.reward.sum() > 0 and not steps.truncated.any()


def test_every_step_of_2048_is_the_librarys_own_and_so_are_its_masks():
    env = envs.make(pgx.make("2048"), num_envs=3)
    assert env.spec.id == "pgx/Play2048" and env.spec.has_action_mask
    steps = steps_beside(env, step_of(pgx.make("2048")), 200)
    assert steps.action_mask.any(-1).all() and not steps.action_mask.all()
    # Random legal moves end only games that are stuck: an illegal one would cost a point.
    assert steps.terminated.sum() >= 2 and steps.reward.min() == 0


def test_a_game_of_several_players_is_rejected_and_names_are_checked():
    with pytest.raises(ValueError, match=r"make: pgx/tic_tac_toe must be a game of one player, got one of 2; .*no self-play"):
        envs.make("pgx/tic_tac_toe")
    with pytest.raises(ValueError, match=r"unknown environment 'pgx/minatar-brekout'; did you mean 'pgx/minatar-breakout'\?"):
        envs.make("pgx/minatar-brekout")
    with pytest.raises(TypeError, match="sticky"):
        envs.make("pgx/minatar-breakout", env_kwargs={"sticky": 0.1})
    names = envs.names()["pgx"]
    assert "pgx/2048" in names and "pgx/chess" not in names
    assert len(names) == 6 and all(pgx.make(name.removeprefix("pgx/")).num_players == 1 for name in names)


def test_the_compiled_loop_trains_with_masks():
    env = envs.make("pgx/2048", num_envs=2)
    agent = PPO(env.spec, network=MLP((8,)), num_steps=8, num_minibatches=1, num_epochs=1)
    result = train.run(agent, env, env_steps=64, key=jax.random.key(0), progress=False)
    assert result.progress.env_steps >= 64 and np.isfinite(result.metrics["train/loss"])
