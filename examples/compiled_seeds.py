"""Trains four seeds in one compiled program: `python examples/compiled_seeds.py`."""

import jax
import numpy as np

import polyak


def main(env_steps: int = 50_000, seeds: int = 4) -> np.ndarray:
    env = polyak.envs.make("jax/CartPole-v1", num_envs=8)
    agent = polyak.PPO(
        spec=env.spec,
        num_steps=32,
        num_epochs=20,
        num_minibatches=1,
        gamma=0.98,
        gae_lambda=0.8,
        learning_rate=polyak.Linear(1e-3, env_steps=env_steps),
    )
    keys = jax.random.split(jax.random.key(0), seeds)
    results = polyak.loops.compiled_seeds(agent, env, env_steps=env_steps, keys=keys)
    total, seconds = sum(r.progress.env_steps for r in results), results[0].progress.seconds
    print(f"{total:,} env_steps in {seconds:.1f} s, after {results[0].progress.compile_seconds:.1f} s of compilation")

    returns = np.array([
        polyak.train.evaluate(agent.policy(result.state), env, episodes=20, key=jax.random.key(1)).mean_return
        for result in results
    ])  # fmt: skip
    print("greedy returns, worst first:", *np.sort(returns).round(1))
    return returns


if __name__ == "__main__":
    main()
