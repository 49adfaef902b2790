"""Returns of PPO with and without memory in MuJoCo Playground's CartpoleBalance, whose velocities are hidden.

    python benchmarks/hidden_velocity.py [--env-steps 3000000] [--seeds 3] [--quick] [--json PATH]

It needs `pip install '.[playground]'`. The observation is position, cosine and sine of the pole's angle; `all` sees the two
velocities too. The settings are PPO's preset for the task, with 4 minibatches of 16 sequences; a GRU replaces the MLP. A
velocity is the difference of two observations, a hundredth of their spread, so the GRU needs two million steps to use it.
Returns are means of 64 greedy episodes, at most 1,000.
"""

from dataclasses import dataclass
from typing import Any

from harness import arguments, report, spread, table

import polyak
from polyak.core.spaces import Box, EnvSpec
from polyak.envs.autoreset import AutoReset
from polyak.presets import preset

TASK, NUM_ENVS, EPISODES = "playground/CartpoleBalance", 64, 64
VISIBLE = 3


@dataclass(frozen=True)
class WithoutVelocity:
    """The task with the first three entries of its observation."""

    dynamics: Any

    @property
    def spec(self) -> EnvSpec:
        """The observation is shorter than that of the task."""
        obs = self.dynamics.spec.obs
        return EnvSpec(Box(obs.low[:VISIBLE], obs.high[:VISIBLE]), self.dynamics.spec.action, f"{TASK}, velocities hidden")

    def reset(self, key: Any, num_envs: int) -> Any:
        """Initial states."""
        return self.dynamics.reset(key, num_envs)

    def step(self, state: Any, action: Any, key: Any) -> Any:
        """Next states, rewards and flags."""
        return self.dynamics.step(state, action, key)

    def observe(self, state: Any) -> Any:
        """Position and angle."""
        return self.dynamics.observe(state)[:, :VISIBLE]


def learn(name: str, env_steps: int, seed: int) -> tuple[float, float]:
    """The mean greedy return after a training, and env steps a second."""
    made: Any = polyak.envs.make(TASK, num_envs=NUM_ENVS)
    env = made if name == "MLP, all" else AutoReset(WithoutVelocity(made.dynamics), NUM_ENVS, reset_pool=made.reset_pool)
    changes = {"network": polyak.GRU(64)} if name == "GRU" else {}
    agent = polyak.PPO(spec=env.spec, **preset("ppo", TASK).settings(env_steps, {"num_minibatches": 4, **changes}))
    result = polyak.train.run(agent, env, env_steps=env_steps, seed=seed, progress=False)
    return float(result.evaluate(EPISODES, env=env).mean_return), result.progress.fps


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--env-steps", type=int, default=3_000_000)
    parser.add_argument("--seeds", type=int, default=3)
    args = parser.parse_args()
    env_steps, seeds = (20_000, 1) if args.quick else (args.env_steps, args.seeds)
    names = ("MLP, all", "MLP", "GRU")
    learned: dict[str, list[tuple[float, float]]] = {name: [] for name in names}
    for seed in range(seeds):
        for name in names:
            learned[name].append(learn(name, env_steps, seed))
    rows = [
        [
            name,
            spread([value for value, _ in found], "{:.0f}".format),
            spread([rate / 1000 for _, rate in found], "{:.1f}k".format),
        ]
        for name, found in learned.items()
    ]
    result = {"benchmark": "hidden_velocity", "quick": args.quick, "env_steps": env_steps, "learned": learned}
    report(table(["network", f"greedy return after {env_steps:,}", "env steps/s"], rows), result, args.json)


if __name__ == "__main__":
    main()
