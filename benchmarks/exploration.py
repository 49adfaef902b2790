"""What an intrinsic reward is worth: PPO or DQN with and without it in deep sea, a maze with one rare reward.

    python benchmarks/exploration.py [--quick] [--json PATH] [--learner ppo|dqn] [--size 14] [--updates 400] [--seeds 5]

Deep sea is from Osband et al. 2019, arXiv:1908.03568. All seeds train at once, and the greedy policy of each plays once.
A return of 0.99 is the goal; 0 is the way to the left, which costs nothing. Both agents have the same PPO, or the same DQN.
"""

import time
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from harness import arguments, report, table

import polyak
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.struct import static, struct
from polyak.envs.autoreset import AutoReset
from polyak.loops.compiled_loop import iteration, start_compiled
from polyak.loops.loop import update_on

NUM_ENVS, NUM_STEPS = 16, 64


@struct
class DeepSea:
    """A square of cells, from the top left to the bottom right, one row down each step and one column left or right.

    Which action goes right is drawn once for each cell. Going right costs 0.01 / size, and the bottom right cell pays 1, so
    that one path of 2^size has a return above 0: of 0.99.

    Attributes:
        size: rows, columns and steps of an episode.
    """

    size: int = static()

    @property
    def spec(self) -> EnvSpec:
        """The spaces."""
        cells = self.size**2
        return EnvSpec(Box(np.zeros(cells, np.float32), np.ones(cells, np.float32)), Discrete(2), "DeepSea")

    def reset(self, key: Any, num_envs: int) -> Any:
        """The top left cell."""
        return jnp.zeros((num_envs, 2), jnp.int32)

    def step(self, state: Any, action: Any, key: Any) -> Any:
        """The next cell, the reward, and both flags."""
        row, column = state.T
        flips = np.random.default_rng(0).integers(0, 2, (self.size, self.size)).astype(np.int32)
        right = action == jnp.asarray(flips)[row, column]
        # A wall on the right: from the last column there is no way on.
        at_goal = right & (row == self.size - 1) & (column == self.size - 1)
        column = jnp.clip(column + jnp.where(right, 1, -1), 0, self.size - 1)
        over = row == self.size - 1
        reward = jnp.where(right, -0.01 / self.size, 0.0) + at_goal
        return jnp.stack([jnp.minimum(row + 1, self.size - 1), column], axis=1), reward, over, jnp.zeros_like(over)

    def observe(self, state: Any) -> Any:
        """One-hot cells."""
        row, column = state.T
        return jax.nn.one_hot(row * self.size + column, self.size**2)


def make_ppo(spec: EnvSpec) -> dict[str, Any]:
    """PPO, and the same PPO with intrinsic rewards."""
    network = polyak.MLP((32,))
    ppo = polyak.PPO(
        spec, network, num_steps=NUM_STEPS, num_epochs=2, num_minibatches=4, learning_rate=1e-3, gamma=0.99, ent_coef=0.01
    )
    settings: dict[str, Any] = {"network": network, "value": network, "num_features": 32, "learning_rate": 1e-3}
    settings |= {"coefficient": 1.0, "predictor_fraction": 1.0, "num_epochs": 2, "num_minibatches": 2}
    return {"PPO": ppo, "RND(PPO)": polyak.RND(ppo, **settings)}


def make_dqn(spec: EnvSpec) -> dict[str, Any]:
    """DQN, and the same DQN with intrinsic rewards."""
    network = polyak.MLP((32,))
    settings: dict[str, Any] = {"network": network, "num_steps": 4, "updates_per_step": 1 / 16, "batch_size": 32}
    settings |= {"learning_starts": 500, "learning_rate": 1e-3, "target_period": 100, "epsilon": 0.05}
    settings |= {"replay": polyak.UniformReplay(51_200)}
    intrinsic: dict[str, Any] = {"random_network": network, "num_features": 32}
    return {"DQN": polyak.DQN(spec, **settings), "RNDDQN": polyak.RNDDQN(spec, **settings, **intrinsic)}


MAKERS = {"ppo": make_ppo, "dqn": make_dqn}


def returns_of(agent: Any, dynamics: DeepSea, updates: int, seeds: int) -> list[float]:
    """The greedy return of each seed after `updates`."""
    env = AutoReset(dynamics, NUM_ENVS)

    @jax.jit
    @jax.vmap
    def train(key: Any) -> Any:
        body = partial(iteration, agent, env, update_on(None))
        return jax.lax.scan(lambda state, _: (body(state)[0], None), start_compiled(agent, env, key), length=updates)[0].agent

    @jax.jit
    @jax.vmap
    def play(state: Any) -> Any:
        policy, total, cell = agent.policy(state), jnp.zeros(1), dynamics.reset(None, 1)
        no = jnp.zeros(1, bool)
        for _ in range(dynamics.size):
            time_step = polyak.TimeStep(dynamics.observe(cell), total, no, no, no)
            cell, reward, _, _ = dynamics.step(cell, policy.action(time_step, (), jax.random.key(0)).action, None)
            total = total + reward
        return total[0]

    return [round(float(x), 3) for x in play(train(jax.vmap(jax.random.key)(jnp.arange(seeds))))]


def main() -> None:
    """Train, play, print a table."""
    parser = arguments(__doc__)
    parser.add_argument("--learner", choices=MAKERS, default="ppo")
    parser.add_argument("--size", type=int, default=14, help="rows and columns")
    parser.add_argument("--updates", type=int, default=400, help=f"of {NUM_STEPS} steps in {NUM_ENVS} environments")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    size, updates, seeds = (4, 20, 2) if args.quick else (args.size, args.updates, args.seeds)
    dynamics, rows, found = DeepSea(size), [], []
    for name, agent in MAKERS[args.learner](dynamics.spec).items():
        start = time.perf_counter()
        returns = returns_of(agent, dynamics, updates * NUM_STEPS // agent.num_steps, seeds)
        found.append({"agent": name, "returns": returns})
        solved = sum(value > 0.9 for value in returns)
        rows.append([name, f"{solved} of {seeds}", ", ".join(map(str, returns)), f"{time.perf_counter() - start:.0f} s"])
    steps = updates * NUM_ENVS * NUM_STEPS
    text = table(["agent", "seeds at the goal", f"greedy returns after {steps:,} steps", "time"], rows)
    report(text, {"benchmark": "exploration", "quick": args.quick, "size": size, "env_steps": steps, "runs": found}, args.json)


if __name__ == "__main__":
    main()
