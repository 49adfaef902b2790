"""Trains, evaluates and shows a policy for an environment of your own: `python examples/own_environment.py`."""

import gymnasium
import jax
import numpy as np

import polyak

LENGTH = 10


class Corridor(gymnasium.Env):
    """A corridor with the exit at its right end; every step costs one."""

    observation_space = gymnasium.spaces.Box(0, LENGTH, (1,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        """Start in a random cell."""
        super().reset(seed=seed)
        self.cell = int(self.np_random.integers(LENGTH))
        return self._obs(), {}

    def step(self, action):
        """Move one cell to the left (0) or to the right (1)."""
        self.cell = max(self.cell + (1 if action == 1 else -1), 0)
        return self._obs(), -1.0, self.cell == LENGTH, False, {}

    def _obs(self):
        return np.array([self.cell], np.float32)


def corridor():
    """The corridor with a time limit, which sets `truncated`: the value of the last observation still counts."""
    return gymnasium.wrappers.TimeLimit(Corridor(), max_episode_steps=50)


def main(env_steps: int = 20_000) -> float:
    env = polyak.envs.make(corridor, num_envs=8)
    agent = polyak.PPO(spec=env.spec, num_steps=64, num_epochs=4, num_minibatches=4, learning_rate=1e-3)
    result = polyak.train.run(agent, env, env_steps=env_steps, key=jax.random.key(0), callbacks=[report])

    policy = agent.policy(result.state)
    evaluation = polyak.train.evaluate(policy, env, episodes=100, key=jax.random.key(1))
    print(f"greedy return {evaluation.mean_return:.2f} (the best is {-(LENGTH + 1) / 2})")

    one = corridor()
    obs, _ = one.reset(seed=0)
    cells, ended = [int(obs[0])], False
    while not ended:
        action, _ = policy.predict(obs)
        obs, _, terminated, truncated, _ = one.step(action)
        cells, ended = [*cells, int(obs[0])], terminated or truncated
    print("one episode:", *cells)
    return evaluation.mean_return


def report(progress, metrics, state):
    """Print the progress; a callback that returns False stops the training."""
    if progress.iteration % 10 == 0:
        print(f"{progress.env_steps:6,} env_steps: mean return {metrics['rollout/ep_rew_mean']:.1f}")


if __name__ == "__main__":
    main()
