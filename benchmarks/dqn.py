"""Env steps per second of polyak's DQN, in both loops, and of rejax, Stable-Baselines3 and SBX on CartPole, same settings.

    python benchmarks/dqn.py [--quick] [--json PATH] [--settings 8 1]

One gradient step per environment step with 1 environment, one per 4 with 8; batches of 64, (64, 64) relu, a replay of 100,000
rows, a target copied every 1,000 env steps, ε = 0.05. All train while they are measured, on one thread each. polyak counts
valid transitions only: a step that resets an environment is none. Compilation and the first iterations are not counted. rejax
and `polyak.train.compiled` have CartPole in JAX, the others Gymnasium's. At the end stands the time of an iteration of the
compiled loop with a learner so small that the loop and the replay are what costs.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from harness import Pace, arguments, few_threads, median, ratios, report, spread, steps, table, take_turns, times, verdict
from peers import python_of

# Environments: gradient steps after each step of all of them; env steps of a measurement in JAX, and of one outside.
SETTINGS = {1: (1, 40_000, 2_000), 8: (2, 160_000, 16_000)}
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


def polyak_worker(loop: str, num_envs: int, updates: int, count: int, hidden: tuple[int, ...], batch: int) -> None:
    import jax

    few_threads(1)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    import polyak

    pace = Pace(polyak=polyak.__version__, jax=jax.__version__)
    env = polyak.envs.make("jax/CartPole-v1" if loop == "compiled" else "CartPole-v1", num_envs=num_envs)
    agent = polyak.DQN(
        env.spec,
        network=polyak.q_mlp(hidden),
        num_steps=1,
        updates_per_step=updates / num_envs,
        batch_size=batch,
        capacity=CAPACITY,
        learning_starts=STARTS,
        double=False,
        period=TARGET_EVERY * updates // num_envs,
        epsilon=EPSILON,
        **SHARED,
    )
    train: Any = polyak.train.compiled if loop == "compiled" else polyak.train.host
    train(
        agent,
        env,
        env_steps=10**9,
        key=jax.random.key(0),
        report_every=count,
        callbacks=[lambda progress, metrics, state: pace.lap(progress.env_steps)],
    )


def rejax_worker(num_envs: int, updates: int, count: int) -> None:
    import jax

    few_threads(1)
    pace = Pace(jax=jax.__version__)
    import rejax

    algorithm = rejax.DQN.create(
        env="CartPole-v1",
        num_envs=num_envs,
        num_epochs=updates,
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


def sb3_worker(num_envs: int, updates: int, count: int, *, in_jax: bool) -> None:
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
        make_vec_env("CartPole-v1", n_envs=num_envs, seed=0),
        buffer_size=CAPACITY,
        learning_starts=STARTS,
        batch_size=BATCH,
        train_freq=1,
        gradient_steps=updates,
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
    updates = SETTINGS[args.envs][0]
    match args.worker:
        case "polyak compiled" | "polyak host":
            polyak_worker(args.worker.split()[1], args.envs, updates, args.count, (64, 64), BATCH)
        case "tiny":
            polyak_worker("compiled", 1, 1, args.count, (4,), 4)
        case "rejax":
            rejax_worker(args.envs, updates, args.count)
        case "sb3" | "sbx":
            sb3_worker(args.envs, updates, args.count, in_jax=args.worker == "sbx")


def main() -> None:
    args = parsed()
    if args.worker:
        work(args)
        return
    rounds = 2 if args.quick else args.rounds
    measured = {str(num_envs): compare(num_envs, rounds, quick=args.quick) for num_envs in args.settings}
    header = ["", "contestant", "env steps/s", "polyak compiled is", "target", "polyak host is", "target"]
    rows = [row for num_envs in args.settings for row in rows_of(num_envs, measured[str(num_envs)])]
    tiny, _ = take_turns({"tiny": command(sys.executable, "tiny", 1, 50_000 if args.quick else 200_000)}, rounds)
    microseconds = [1e6 / rate for rate in tiny["tiny"]]
    met = "yes" if median(microseconds) <= TINY_MICROSECONDS else "NO"
    text = table(header, rows) + (
        f"\n\nOne iteration of the compiled loop, (4,) relu, batch 4: {spread(microseconds, lambda x: f'{x:.1f}')} µs, "
        f"{met} (<= {TINY_MICROSECONDS:g})"
    )
    report(text, {"benchmark": "dqn", "quick": args.quick, "by_num_envs": measured, "tiny_us": microseconds}, args.json)


def command(python: str | Path, worker: str, num_envs: int, count: int) -> list[str | Path]:
    return [python, Path(__file__).resolve(), "--worker", worker, "--envs", str(num_envs), "--count", str(count)]


def compare(num_envs: int, rounds: int, *, quick: bool) -> dict[str, Any]:
    """All figures for one number of environments."""
    _, fast, slow = SETTINGS[num_envs]
    fast, slow = (fast // 8, slow // 4) if quick else (fast, slow)
    commands = {
        "rejax": command(python_of("rejax"), "rejax", num_envs, fast),
        "polyak compiled": command(sys.executable, "polyak compiled", num_envs, fast),
        "sb3": command(python_of("sb3"), "sb3", num_envs, slow),
        "polyak host": command(sys.executable, "polyak host", num_envs, slow),
        "sbx": command(python_of("sbx"), "sbx", num_envs, slow),
    }
    rates, about = take_turns(commands, rounds)
    versus = {f"{loop} / {peer}": ratios(rates, loop, peer) for loop, peer in TARGETS}
    versus["polyak host / sbx"] = ratios(rates, "polyak host", "sbx")
    return {"rates": rates, "ratios": versus, "versions": about}


def rows_of(num_envs: int, measured: dict[str, Any]) -> list[list[str]]:
    """The table's lines for one number of environments."""
    rows = []
    for name, rates in measured["rates"].items():
        cells = []
        for loop in ("polyak compiled", "polyak host"):
            ratio = measured["ratios"].get(f"{loop} / {name}")
            target = TARGETS.get((loop, name))
            cells.append("" if ratio is None else f"{spread(ratio, times)} times")
            cells.append("" if ratio is None or target is None else verdict(median(ratio), target))
        rows.append([f"{num_envs} env{'s' if num_envs > 1 else ''}", name, spread(rates, steps), *cells])
    return rows


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--settings", type=int, nargs="+", choices=list(SETTINGS), default=list(SETTINGS), help="environments")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each")
    parser.add_argument("--worker", help="(what the benchmark starts itself with, like the rest)")
    parser.add_argument("--envs", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
