"""What an intrinsic reward is worth: PPO or DQN with and without it in deep sea, a maze with one rare reward, or in MiniGrid.

    python benchmarks/exploration.py [--quick] [--json PATH] [--learner ppo|dqn] [--size 14] [--updates 400] [--seeds 5]
    python benchmarks/exploration.py --minigrid MiniGrid-MultiRoom-N4-S5-v1 [--env-steps 600000] [--seeds 3] [--agent AGENT]

Deep sea is from Osband et al. 2019, arXiv:1908.03568. All seeds train at once, and the greedy policy of each plays once.
A return of 0.99 is the goal; 0 is the way to the left, which costs nothing. Both agents have the same PPO, or the same DQN.

MiniGrid needs `pip install -r benchmarks/requirements-minigrid.txt`. Agents see the 7x7 symbols before them one-hot, without
the compass, and train one after another. A return is 1 - 0.9 times the share of the episode's steps that the agent needed, and
0 without success; the figures are means over the last 100 training episodes.
"""

import sys
import time
from functools import partial
from typing import Any

import gymnasium
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
SYMBOLS = (11, 6, 3)
"""Number of MiniGrid's objects, colors and states."""
VIEW = 7


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


class OneHot(gymnasium.ObservationWrapper[Any, Any, Any]):
    """MiniGrid's symbols before the agent as one-hot vectors."""

    def __init__(self, env: Any) -> None:
        super().__init__(env)
        self.observation_space = gymnasium.spaces.Box(0.0, 1.0, (VIEW**2 * sum(SYMBOLS),), np.float32)
        starts = np.cumsum((0, *SYMBOLS[:-1]))
        self.start = sum(SYMBOLS) * np.arange(VIEW**2)[:, None] + starts

    def observation(self, observation: Any) -> Any:
        """One-hot vectors of all cells."""
        symbols = np.zeros(self.observation_space.shape or (), np.float32)
        symbols[observation["image"].reshape(VIEW**2, len(SYMBOLS)) + self.start] = 1.0
        return symbols


def make_minigrid_agents(spec: EnvSpec) -> dict[str, Any]:
    """PPO, and the same PPO with intrinsic rewards; what is not set here is the default."""
    network = polyak.MLP((64, 64))
    ppo = polyak.PPO(
        spec, network, num_steps=128, num_epochs=4, num_minibatches=8, learning_rate=1e-3, adam_eps=1e-8, gamma=0.99,
        gae_lambda=0.95, ent_coef=0.01,
    )  # fmt: skip
    return {"PPO": ppo, "RND(PPO)": polyak.RND(ppo, network=network, value=network)}


def minigrid_curve(name: str, agent: str, env_steps: int, seed: int) -> list[tuple[int, float]]:
    """The mean return of the last 100 episodes by env steps."""
    import minigrid  # noqa: F401

    env = polyak.envs.make(lambda: OneHot(gymnasium.make(name)), num_envs=NUM_ENVS)
    curve: list[tuple[int, float]] = []

    def record(progress: Any, metrics: Any, state: Any) -> None:
        curve.append((progress.env_steps, round(float(metrics.get("rollout/ep_rew_mean", 0.0)), 4)))
        print(f"{agent}, seed {seed}: {curve[-1]}", file=sys.stderr, flush=True)

    learner, key = make_minigrid_agents(env.spec)[agent], jax.random.key(seed)
    polyak.loops.host(learner, env, env_steps=env_steps, key=key, report_every=25_000, callbacks=[record])
    env.close()
    return curve


def compare_in_minigrid(args: Any) -> None:
    """Train both agents, print a table."""
    rows, found = [], []
    env_steps, seeds = (20_000, 1) if args.quick else (args.env_steps, args.seeds)
    for name in [args.agent] if args.agent else ["PPO", "RND(PPO)"]:
        start = time.perf_counter()
        curves = [minigrid_curve(args.minigrid, name, env_steps, seed) for seed in range(seeds)]
        found.append({"agent": name, "curves": curves})
        returns = ", ".join(f"{curve[-1][1]:.2f}" for curve in curves)
        until = [next((f"{steps:,}" for steps, value in curve if value >= 0.5), "never") for curve in curves]
        rows.append([name, returns, "; ".join(until), f"{time.perf_counter() - start:.0f} s"])
    text = table(["agent", f"returns after {env_steps:,} steps", "steps to a return of 0.5", "time"], rows)
    about = {"benchmark": "exploration", "quick": args.quick, "env": args.minigrid, "env_steps": env_steps}
    report(text, {**about, "runs": found}, args.json)


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


def parse() -> Any:
    """The arguments; those that have no effect together end in an error."""
    parser = arguments(__doc__)
    parser.add_argument("--learner", choices=MAKERS, help="ppo by default")
    parser.add_argument("--size", type=int, help="rows and columns, 14 by default")
    parser.add_argument("--updates", type=int, help=f"of {NUM_STEPS} steps in {NUM_ENVS} environments, 400 by default")
    parser.add_argument("--seeds", type=int, help="5 by default")
    parser.add_argument("--minigrid", metavar="NAME", help="an environment of MiniGrid instead of deep sea")
    parser.add_argument("--env-steps", type=int, help="of each training in MiniGrid, 600,000 by default")
    parser.add_argument("--agent", choices=["PPO", "RND(PPO)"], help="only this one in MiniGrid")
    args = parser.parse_args()
    unused = (
        {"with --minigrid": ("learner", "size", "updates")} if args.minigrid else {"without --minigrid": ("env_steps", "agent")}
    )
    if args.quick:
        unused["with --quick"] = "size", "updates", "seeds", "env_steps"
    for reason, names in unused.items():
        for name in names:
            if getattr(args, name) is not None:
                parser.error(f"--{name.replace('_', '-')} has no effect {reason}")
    for name, default in {"learner": "ppo", "size": 14, "updates": 400, "seeds": 5, "env_steps": 600_000}.items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    return args


def main() -> None:
    """Train, play, print a table."""
    args = parse()
    if args.minigrid:
        compare_in_minigrid(args)
        return
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
