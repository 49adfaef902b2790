"""Env steps per second of polyak's DQN, in both loops, and of rejax, Stable-Baselines3 and SBX on CartPole, same settings.

    python benchmarks/dqn.py [--quick] [--json PATH] [--settings 1 1-4-4 1-4-1 8]

With 1 environment, one gradient step after each step (`1`), or four or one after every fourth (`1-4-4`, and `1-4-1`, the
default of Stable-Baselines3); with 8, two after each step of all (`8`). Batches of 64, (64, 64) relu, a replay of 100,000
rows, a target copied every 1,000 env steps, ε = 0.05. All train while they are measured, on one thread each. polyak counts
valid transitions only: a step that resets an environment is none. Compilation and the first iterations are not counted. rejax
and `polyak.loops.compiled` have CartPole in JAX, the others Gymnasium's. At the end stands the time of an iteration of the
compiled loop with a learner so small that the loop and the replay are what costs.
"""

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness import Pace, arguments, few_threads, median, ratios, report, spread, steps, table, take_turns, times, verdict
from peers import python_of


@dataclass(frozen=True)
class Setting:
    """When a contestant learns: `updates` gradient steps after every `num_steps` steps of all environments.

    Attributes:
        fast: env steps of a measurement in JAX.
        slow: those of one outside.
    """

    num_envs: int
    num_steps: int
    updates: int
    fast: int
    slow: int

    @property
    def rollout(self) -> int:
        """Env steps between updates."""
        return self.num_envs * self.num_steps


SETTINGS = {
    "1": Setting(1, 1, 1, 40_000, 2_000),
    "1-4-4": Setting(1, 4, 4, 40_000, 2_000),
    "1-4-1": Setting(1, 4, 1, 80_000, 8_000),
    "8": Setting(8, 1, 2, 160_000, 16_000),
}
BATCH, CAPACITY, STARTS, TARGET_EVERY, EPSILON = 64, 100_000, 1_000, 1_000, 0.05
SHARED = {"learning_rate": 5e-4, "gamma": 0.99}

# Of polyak's loop, as a multiple of a peer's rate.
TARGETS = {
    ("polyak compiled", "rejax"): 1.8,
    ("polyak compiled", "sb3"): 3.0,
    ("polyak compiled", "sbx"): 3.0,
    ("polyak host", "sb3"): 3.0,
}
TINY_MICROSECONDS = 25.0


def polyak_worker(loop: str, setting: Setting, count: int, hidden: tuple[int, ...], batch: int) -> None:
    import jax

    few_threads(1)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    import polyak

    pace = Pace(polyak=polyak.__version__, jax=jax.__version__)
    env = polyak.envs.make("jax/CartPole-v1" if loop == "compiled" else "CartPole-v1", num_envs=setting.num_envs)
    agent = polyak.DQN(
        env.spec,
        network=polyak.MLP(hidden),
        num_steps=setting.num_steps,
        updates_per_step=setting.updates / setting.rollout,
        batch_size=batch,
        replay=polyak.UniformReplay(CAPACITY),
        learning_starts=STARTS,
        double=False,
        target_period=TARGET_EVERY * setting.updates // setting.rollout,
        epsilon=EPSILON,
        **SHARED,
    )
    train: Any = polyak.loops.compiled if loop == "compiled" else polyak.loops.host
    train(
        agent,
        env,
        env_steps=10**9,
        key=jax.random.key(0),
        report_every=count,
        callbacks=[lambda progress, metrics, state: pace.lap(progress.env_steps)],
    )


def rejax_worker(setting: Setting, count: int) -> None:
    import jax

    few_threads(1)
    pace = Pace(jax=jax.__version__)
    import rejax

    algorithm = rejax.DQN.create(
        env="CartPole-v1",
        num_envs=setting.num_envs,
        num_epochs=setting.updates,
        buffer_size=CAPACITY,
        fill_buffer=STARTS,
        batch_size=BATCH,
        ddqn=False,
        target_update_freq=TARGET_EVERY,
        eps_start=EPSILON,
        eps_end=EPSILON,
        max_grad_norm=10.0,
        total_timesteps=count,
        eval_freq=count,
        skip_initial_evaluation=True,
        agent_kwargs={"activation": "relu"},  # its layers are always (64, 64)
        **SHARED,
    )
    algorithm = algorithm.replace(eval_callback=lambda algorithm, state, key: ())

    def train(state: Any) -> Any:
        return algorithm.train(train_state=state)[0]

    state = jax.jit(algorithm.init_state)(jax.random.PRNGKey(0))
    compiled = jax.jit(train, donate_argnums=0).lower(state).compile()
    done = 0
    while True:
        state = jax.block_until_ready(compiled(state))
        done += count
        pace.lap(done)


def sb3_worker(setting: Setting, count: int, *, in_jax: bool) -> None:
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.env_util import make_vec_env

    few_threads(1)
    import torch

    # One thread is faster than two on networks this small, so it gets one.
    torch.set_num_threads(1)
    if in_jax:
        import sbx
        from flax import linen as nn

        pace = Pace(sbx=sbx.__version__)
        kind, options = sbx.DQN, {"policy_kwargs": {"net_arch": [64, 64], "activation_fn": nn.relu}}
    else:
        pace = Pace(stable_baselines3=stable_baselines3.__version__, torch=torch.__version__)
        kind, options = stable_baselines3.DQN, {"policy_kwargs": {"net_arch": [64, 64]}, "device": "cpu"}

    class Laps(BaseCallback):
        due = count

        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            if self.num_timesteps >= self.due:
                pace.lap(self.num_timesteps)
                self.due = self.num_timesteps + count

    model = kind(
        "MlpPolicy",
        make_vec_env("CartPole-v1", n_envs=setting.num_envs, seed=0),
        buffer_size=CAPACITY,
        learning_starts=STARTS,
        batch_size=BATCH,
        train_freq=setting.num_steps,
        gradient_steps=setting.updates,
        target_update_interval=TARGET_EVERY,
        exploration_initial_eps=EPSILON,
        exploration_final_eps=EPSILON,
        seed=0,
        **SHARED,
        **options,
    )
    model.learn(10**9, callback=Laps())


def work(args: argparse.Namespace) -> None:
    """One contestant's share."""
    setting = SETTINGS[args.setting]
    match args.worker:
        case "polyak compiled" | "polyak host":
            polyak_worker(args.worker.split()[1], setting, args.count, (64, 64), BATCH)
        case "tiny":
            polyak_worker("compiled", setting, args.count, (4,), 4)
        case "rejax":
            rejax_worker(setting, args.count)
        case "sb3" | "sbx":
            sb3_worker(setting, args.count, in_jax=args.worker == "sbx")


def main() -> None:
    args = parsed()
    if args.worker:
        work(args)
        return
    rounds = 2 if args.quick else args.rounds
    measured = {name: compare(name, rounds, quick=args.quick) for name in args.settings}
    header = ["", "contestant", "env steps/s", "polyak compiled is", "target", "polyak host is", "target"]
    rows = [row for name in args.settings for row in rows_of(name, measured[name])]
    tiny, _ = take_turns({"tiny": command(sys.executable, "tiny", "1", 50_000 if args.quick else 200_000)}, rounds)
    microseconds = [1e6 / rate for rate in tiny["tiny"]]
    met = "yes" if median(microseconds) <= TINY_MICROSECONDS else "NO"
    text = table(header, rows) + (
        f"\n\nOne iteration of the compiled loop, (4,) relu, batch 4: {spread(microseconds, lambda x: f'{x:.1f}')} µs, "
        f"{met} (<= {TINY_MICROSECONDS:g})"
    )
    report(text, {"benchmark": "dqn", "quick": args.quick, "by_setting": measured, "tiny_us": microseconds}, args.json)


def command(python: str | Path, worker: str, setting: str, count: int) -> list[str | Path]:
    return [python, Path(__file__).resolve(), "--worker", worker, "--setting", setting, "--count", str(count)]


def compare(name: str, rounds: int, *, quick: bool) -> dict[str, Any]:
    """All figures for one setting."""
    setting = SETTINGS[name]
    fast, slow = (setting.fast // 8, setting.slow // 4) if quick else (setting.fast, setting.slow)
    commands = {
        "rejax": command(python_of("rejax"), "rejax", name, fast),
        "polyak compiled": command(sys.executable, "polyak compiled", name, fast),
        "sb3": command(python_of("sb3"), "sb3", name, slow),
        "polyak host": command(sys.executable, "polyak host", name, slow),
        "sbx": command(python_of("sbx"), "sbx", name, slow),
    }
    if setting.num_steps > 1:
        del commands["rejax"]  # It learns after each step.
    rates, about = take_turns(commands, rounds)
    versus = {f"{loop} / {peer}": ratios(rates, loop, peer) for loop, peer in TARGETS if peer in rates}
    versus["polyak host / sbx"] = ratios(rates, "polyak host", "sbx")
    return {"rates": rates, "ratios": versus, "versions": about}


def rows_of(setting: str, measured: dict[str, Any]) -> list[list[str]]:
    """The table's lines for one setting."""
    rows = []
    for name, rates in measured["rates"].items():
        cells = []
        for loop in ("polyak compiled", "polyak host"):
            ratio = measured["ratios"].get(f"{loop} / {name}")
            target = TARGETS.get((loop, name))
            cells.append("" if ratio is None else f"{spread(ratio, times)} times")
            cells.append("" if ratio is None or target is None else verdict(median(ratio), target))
        rows.append([setting, name, spread(rates, steps), *cells])
    return rows


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--settings", nargs="+", choices=list(SETTINGS), default=list(SETTINGS), help="when they learn")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each")
    parser.add_argument("--worker", help="(what the benchmark starts itself with, like the rest)")
    parser.add_argument("--setting", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
