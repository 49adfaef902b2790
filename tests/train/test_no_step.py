"""Trainings that took no gradient step say so."""

import gymnasium
import pytest

import polyak
from polyak.core.types import Progress
from polyak.train.no_step import explain_no_step
from tests.train.test_run import SMALL

CONSECUTIVE = "train/consecutive_skipped_updates"


class Huge(gymnasium.RewardWrapper):
    """Rewards whose squares are infinite in float32."""

    def reward(self, reward):
        return 1e38


def huge():
    return Huge(gymnasium.make("CartPole-v1"))


def test_a_training_without_a_good_gradient_step_warns():
    with pytest.warns(UserWarning, match=r"ppo .*: all \d+ gradient steps were skipped, as \w+ was NaN or infinite"):
        polyak.train.run(
            "ppo", huge, env_steps=64, num_envs=2, settings=SMALL | {"normalize_reward": None}, eval_episodes=0, progress=False
        )


@pytest.mark.slow
def test_a_training_that_ends_before_learning_starts_warns():
    message = "dqn CartPole-v1: no gradient step was taken; learning_starts=1000 must be less than env_steps=32"
    with pytest.warns(UserWarning, match=message):
        polyak.train.run(
            "dqn",
            "CartPole-v1",
            env_steps=32,
            num_envs=2,
            settings={"learning_starts": 1000, "replay": polyak.UniformReplay(2000), "network": polyak.MLP((4,))},
            eval_episodes=0,
            progress=False,
        )


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ({}, None),
        ({"train/n_updates": 3.0, "train/skipped_steps": 4.0, CONSECUTIVE: 2.0}, None),
        # The asynchronous loop counts no rejected pushes among its updates.
        (
            {
                "train/n_updates": 3.0,
                "train/skipped_steps": 5.0,
                CONSECUTIVE: 5.0,
                "pushes/applied": 3.0,
            },
            None,
        ),
        (
            {"train/n_updates": 0.0, "train/skipped_steps": 5.0, "train/nonfinite_source": 5.0, "pushes/applied": 0.0},
            "all 5 gradient steps were skipped, as loss was NaN or infinite; nothing was learned",
        ),
        (
            {
                "train/n_updates": 3.0,
                "train/skipped_steps": 6.0,
                CONSECUTIVE: 3.0,
                "train/nonfinite_source": 5.0,
            },
            "all 6 gradient steps were skipped, as loss was NaN or infinite; nothing was learned",
        ),
    ],
)
def test_updates_of_which_all_failed_are_no_steps(metrics, reason):
    agent = polyak.PPO(spec=polyak.envs.make("jax/CartPole-v1", num_envs=1).spec, **SMALL)
    assert explain_no_step(agent, Progress(64, 64, 3, 1.0, 1.0, 64.0), metrics) == reason


def test_a_period_of_resets_without_a_reset_is_no_effect():
    agent = polyak.DQN(polyak.envs.make("jax/CartPole-v1", num_envs=1).spec, reset_period=100)
    reason = "no network was reset; reset_period=100 must be below 100 gradient steps"
    for resets, wanted in ({"train/resets": 0.0}, reason), ({"train/resets": 2.0}, None), ({}, None):
        assert explain_no_step(agent, Progress(64, 64, 3, 1.0, 1.0, 64.0), {"train/n_updates": 100.0, **resets}) == wanted
