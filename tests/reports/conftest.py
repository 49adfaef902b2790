import pytest

import polyak


@pytest.fixture(scope="session")
def trained():
    """The result of a small training without a run directory."""
    settings = {"num_steps": 8, "num_epochs": 1, "num_minibatches": 1, "network": polyak.MLP((4,))}
    return polyak.train.run(
        "ppo", "jax/CartPole-v1", env_steps=640, num_envs=4, settings=settings, progress=False, report_every=32, eval_episodes=0
    )
