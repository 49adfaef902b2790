"""The environments of a run, and the evaluation of policies in them."""

import jax

from polyak import envs, train
from polyak.core.types import Env, HostEnv, Policy
from polyak.runs import RunConfig, run_key
from polyak.train.evaluate import Evaluation

# Without a time limit in the environment a greedy policy may never end its episode.
MAX_EVALUATION_STEPS = 1_000_000


def make_env(config: RunConfig, num_envs: int, *, import_modules: bool = False) -> Env | HostEnv:
    """Copies of the run's environment, with its settings."""
    return envs.make(
        config.env,
        num_envs=num_envs,
        action_scaling=config.action_scaling,
        env_kwargs=config.env_kwargs,
        import_modules=import_modules,
    )


def make_evaluation_env(config: RunConfig, episodes: int, *, import_modules: bool = False) -> Env | HostEnv:
    """As many copies of the run's environment as in training, and at most one for each episode."""
    return make_env(config, min(config.num_envs, episodes), import_modules=import_modules)


def evaluate_policy(env: Env | HostEnv, policy: Policy, episodes: int, seed: int) -> Evaluation:
    """Evaluate a policy, and close the environment; the seed decides where the episodes start."""
    key = jax.random.fold_in(run_key(seed), 0x65766C)
    try:
        return train.evaluate(policy, env, episodes=episodes, key=key, max_steps=MAX_EVALUATION_STEPS)
    finally:
        if isinstance(env, HostEnv):
            env.close()
