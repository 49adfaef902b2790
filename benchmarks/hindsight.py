"""Hindsight replay against Stable-Baselines3's buffer on the same episodes, and what it costs and learns.

    python benchmarks/hindsight.py goals        # no time: (transition, goal) pairs and rewards, beside HerReplayBuffer's
    python benchmarks/hindsight.py bits         # 15 bits flipped by DQN, with and without hindsight: success by env_steps
    python benchmarks/hindsight.py rewards      # FetchReach's reward in NumPy: replay on the device, and in host memory

`goals` needs Stable-Baselines3 (`requirements-sb3.txt`), `rewards` needs gymnasium-robotics, in the same environment.
"""

import argparse
import time
from typing import Any

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
from gymnasium import spaces

import polyak
from polyak import DQN, MLP, SAC, Actor, Critics, HindsightReplay, Linear, UniformReplay
from polyak.core.types import Rollout, TimeStep

LENGTHS = (3, 7, 1, 5, 2, 9)
STRATEGIES = ("future", "final", "episode")
DRAWS = 200_000


class Numbers(gymnasium.Env):
    """The goal achieved in row t of the recording is t; the reward tells both goals."""

    def __init__(self) -> None:
        goal = spaces.Box(-np.inf, np.inf, (1,), np.float32)
        self.observation_space = spaces.Dict({"observation": goal, "achieved_goal": goal, "desired_goal": goal})
        self.action_space = spaces.Discrete(2)

    def compute_reward(self, achieved_goal: Any, desired_goal: Any, info: Any) -> Any:
        """Return a number that tells both goals."""
        return (0.01 * achieved_goal - 0.003 * desired_goal)[..., 0]


def recording() -> list[tuple[int, int, int, bool]]:
    """The transitions of all episodes: row, next row, goal, end of the episode."""
    steps, row = [], 0
    for episode, length in enumerate(LENGTHS):
        steps += [(row + t, row + t + 1, -1 - episode, t == length - 1) for t in range(length)]
        row += length + 1
    return steps


def obs(row: int, goal: int) -> dict[str, Any]:
    """A batched observation."""
    parts = {"observation": row, "achieved_goal": row, "desired_goal": goal}
    return {name: np.array([[x]], np.float32) for name, x in parts.items()}


def of_peer(strategy: str) -> Any:
    """Pairs, and rewards, of Stable-Baselines3's buffer, with 4 sampled goals."""
    from stable_baselines3.common.vec_env import DummyVecEnv
    from stable_baselines3.her import HerReplayBuffer

    env = DummyVecEnv([Numbers])
    np.random.seed(0)
    buffer = HerReplayBuffer(
        64, env.observation_space, env.action_space, env, "cpu", n_sampled_goal=4, goal_selection_strategy=strategy
    )
    for row, after, goal, last in recording():
        reward = Numbers().compute_reward(np.array([after]), np.array([goal]), {})
        buffer.add(obs(row, goal), obs(after, goal), np.zeros((1, 1)), np.array([reward]), np.array([last]), [{}])
    samples = [buffer.sample(2_000) for _ in range(DRAWS // 2_000)]
    part = lambda name: np.concatenate([s.observations[name].numpy()[:, 0] for s in samples])  # noqa: E731
    return part("observation"), part("desired_goal"), np.concatenate([s.rewards.numpy()[:, 0] for s in samples])


def of_polyak(strategy: str) -> Any:
    """Pairs, and rewards, of a `HindsightReplay`."""
    rows = [(row, goal, row == first) for first, row, goal in _rows()]
    column = lambda i, dtype: np.array([r[i] for r in rows], dtype)[:, None]  # noqa: E731
    row, goal, first = column(0, np.float32), column(1, np.float32), column(2, bool)
    truncated = np.concatenate([first[1:], [[True]]])
    reward = np.where(first, 0, 0.01 * row - 0.003 * goal).astype(np.float32)
    stream = {"observation": row[..., None], "achieved_goal": row[..., None], "desired_goal": goal[..., None]}
    steps = jax.tree.map(jnp.asarray, TimeStep(stream, reward, np.zeros_like(first), truncated, first))
    replay = HindsightReplay(64, strategy=strategy, goals=_goals())
    state = replay.init(jax.tree.map(lambda x: x[0, 0], stream), jnp.zeros((), jnp.int32), num_steps=1)
    for t in range(len(rows) - 1):
        part = jax.tree.map(lambda x, t=t: x[t : t + 2], steps)
        state = replay.add(state, Rollout(part, jnp.zeros((1, 1), jnp.int32)))
    batch = jax.tree.map(np.asarray, replay.sample(state, jax.random.key(0), DRAWS, num_envs=1, gamma=0.9))
    drawn = batch.weight > 0
    return batch.obs["observation"][drawn, 0], batch.obs["desired_goal"][drawn, 0], batch.reward[drawn]


def _rows() -> list[tuple[int, int, int]]:
    rows, row = [], 0
    for episode, length in enumerate(LENGTHS):
        rows += [(row, row + t, -1 - episode) for t in range(length + 1)]
        row += length + 1
    return rows


def _goals() -> Any:
    from polyak.core.goals import Goals, Outcomes

    class NumberGoals(Goals):
        is_python = False

        def check(self) -> None:
            """Do nothing."""

        def outcomes(self, achieved: Any, desired: Any) -> Outcomes:
            """The reward of `Numbers`."""
            return Outcomes((0.01 * achieved - 0.003 * desired)[:, 0], None, None)

    return NumberGoals()


def closed_form(strategy: str) -> dict[tuple[float, float], float]:
    """The probability of each pair: transitions are equally likely, and 4 of 5 have another goal."""
    pairs: dict[tuple[float, float], float] = {}
    total = sum(LENGTHS)
    for first, row, goal in _rows():
        end = max(r for f, r, _ in _rows() if f == first)
        if row == end:
            continue
        goals = {"future": range(row + 1, end + 1), "final": [end], "episode": range(first + 1, end + 1)}[strategy]
        pairs[row, goal] = 0.2 / total
        for achieved in goals:
            pairs[row, achieved] = pairs.get((row, achieved), 0.0) + 0.8 / total / len(goals)
    return pairs


def compare_goals() -> None:
    """Print chi-squares against the closed form."""
    from scipy.stats import chi2

    print("| strategy | pairs | chi-square, p of polyak | of Stable-Baselines3 | largest error of a reward |")
    print("|---|---|---|---|---|")
    for strategy in STRATEGIES:
        expected, cells, errors = closed_form(strategy), [], []
        for row, goal, reward in (of_polyak(strategy), of_peer(strategy)):
            pairs, counts = np.unique(np.stack([row, goal], axis=1), axis=0, return_counts=True)
            count = dict(zip(map(tuple, pairs.tolist()), counts.tolist(), strict=True))
            assert count.keys() <= expected.keys(), "a pair that is impossible"
            statistic = sum((count.get(pair, 0) - len(row) * p) ** 2 / (len(row) * p) for pair, p in expected.items())
            cells.append(f"{statistic:.0f}, p = {chi2.sf(statistic, len(expected) - 1):.2f}")
            errors.append(np.abs(reward - (0.01 * (row + 1) - 0.003 * goal)).max())
        print(f"| {strategy} | {len(expected)} | {cells[0]} | {cells[1]} | {max(errors):.0e} |", flush=True)


def flip_bits(bits: int, env_steps: int, seeds: int) -> None:
    """Print the success rate of the greedy policy by env_steps."""
    print("| replay | seed | " + " | ".join(f"{env_steps * i // 5:,}" for i in range(1, 6)) + " | env_steps/s |")
    print("|---|---|" + "---|" * 6)
    for kind in (HindsightReplay, UniformReplay):
        for seed in range(seeds):
            env = polyak.envs.make("jax/BitFlipping-v0", num_envs=16, env_kwargs={"bits": bits})
            agent = DQN(
                env.spec, MLP(hidden=(256,)), replay=kind(500_000), gamma=0.98, learning_rate=1e-3, batch_size=128,
                epsilon=Linear(0.3, 0.02, 100_000), tau=0.05, target_period=1,
            )  # fmt: skip
            result = polyak.train.run(
                agent, env, env_steps=env_steps, eval_every=env_steps // 5, eval_episodes=200, progress=False, seed=seed
            )
            rates = " | ".join(f"{e.success_rate:.2f}" for e in list(result.evaluations.values())[:5])
            print(f"| {kind.__name__} | {seed} | {rates} | {result.progress.fps:,.0f} |", flush=True)


def time_rewards(env_steps: int) -> None:
    """Print env_steps/s of SAC in FetchReach, in turns, and the time of one batch's rewards."""
    make = "gymnasium_robotics:FetchReach-v4"
    print("| replay | env_steps/s |")
    print("|---|---|")
    for replay_on, kind in 2 * (("device", HindsightReplay), ("host", HindsightReplay), ("device", UniformReplay)):
        env: Any = polyak.envs.make(make, action_scaling="rescale")
        networks = Actor(hidden=(64, 64)), Critics(hidden=(64, 64))
        agent = SAC(env.spec, *networks, replay=kind(100_000), learning_starts=100, gamma=0.95)
        result = polyak.train.run(agent, env, env_steps=env_steps, replay_on=replay_on, progress=False)
        print(f"| {kind.__name__} on the {replay_on} | {result.progress.fps:,.0f} |", flush=True)
    goals = env.spec.goals
    goals.check()
    call, goal = jax.jit(goals.outcomes), jnp.zeros((256, 3))
    jax.block_until_ready(call(goal, goal))
    start = time.perf_counter()
    for _ in range(500):
        jax.block_until_ready(call(goal, goal))
    print(f"\n256 rewards by the ordered callback: {(time.perf_counter() - start) / 500 * 1e6:.0f} µs")
    start = time.perf_counter()
    for _ in range(500):
        goals._compute(np.zeros((256, 3), np.float32), np.zeros((256, 3), np.float32))
    print(f"256 rewards by a call from Python: {(time.perf_counter() - start) / 500 * 1e6:.0f} µs")


def main() -> None:
    """Run one part."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("goals", "bits", "rewards"))
    parser.add_argument("--bits", type=int, default=15)
    parser.add_argument("--env-steps", type=int, default=None)
    parser.add_argument("--seeds", type=int, default=3)
    flags = parser.parse_args()
    if flags.part == "goals":
        compare_goals()
    elif flags.part == "bits":
        flip_bits(flags.bits, flags.env_steps or 100_000, flags.seeds)
    else:
        time_rewards(flags.env_steps or 2_000)


if __name__ == "__main__":
    main()
