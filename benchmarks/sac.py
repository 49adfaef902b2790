"""Env steps per second of polyak's SAC and TD3 while they train, and of rejax, Stable-Baselines3 and SBX, same settings.

    python benchmarks/sac.py [--quick] [--json PATH] [--tasks compiled sac td3 sac-8 ...]

One environment, one gradient step per environment step, batches of 256, layers of (256, 256), a replay of 1,000,000
rows: the settings of the paper, and the defaults of polyak, Stable-Baselines3 and SBX. All train while they are measured, on
one thread each; compilation and the first steps are not counted.

- `compiled`: SAC on Pendulum in JAX, `polyak.loops.compiled` against rejax.
- `sac`, `td3`: HalfCheetah-v5 stepped from Python, `polyak.loops.host` against Stable-Baselines3 and SBX.
- `sac-8`, `td3-8`: the same, but polyak takes eight gradient steps after every eighth environment step.
- `critics`: the compiled loop with 10 critics against 2.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from harness import Pace, arguments, few_threads, median, ratios, report, spread, table, take_turns, times, verdict
from peers import python_of

BATCH, CAPACITY, STARTS, HIDDEN = 256, 1_000_000, 1_000, (256, 256)
SHARED = {"learning_rate": 3e-4, "gamma": 0.99, "tau": 0.005}
STEPS = {"compiled": 1_000, "sac": 500, "td3": 500, "sac-8": 500, "td3-8": 500, "critics": 500}

# Of polyak's rate, as a multiple of a peer's.
TARGETS = {
    "compiled": {"rejax": 1.2},
    "sac": {"sb3": 2.0, "sbx": 1.2},
    "td3": {"sb3": 2.0, "sbx": 1.2},
    "sac-8": {"sb3": 2.0, "sbx": 1.2},
    "td3-8": {"sb3": 2.0, "sbx": 1.2},
}
MOST_TIME_OF_TEN_CRITICS = 3.0


def polyak_worker(task: str, count: int, num_critics: int) -> None:
    import jax

    few_threads(1)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    import polyak

    pace = Pace(polyak=polyak.__version__, jax=jax.__version__)
    in_jax = task in ("compiled", "critics")
    env = polyak.envs.make("jax/Pendulum-v1" if in_jax else "HalfCheetah-v5", num_envs=1, action_scaling="rescale")
    kind: Any = polyak.TD3 if task.startswith("td3") else polyak.SAC
    agent = kind(
        env.spec,
        actor=polyak.Actor(HIDDEN, std="fixed" if task.startswith("td3") else "state"),
        critics=polyak.Critics(HIDDEN, num_critics=num_critics),
        num_steps=8 if task.endswith("-8") else 1,
        updates_per_step=1.0,
        batch_size=BATCH,
        replay=polyak.UniformReplay(CAPACITY),
        learning_starts=STARTS,
        **SHARED,
    )
    train: Any = polyak.loops.compiled if in_jax else polyak.loops.host
    train(
        agent,
        env,
        env_steps=10**9,
        key=jax.random.key(0),
        report_every=count,
        # The first lap, after which measurements count, is when learning has started.
        callbacks=[lambda progress, *_: pace.lap(progress.env_steps) if progress.env_steps > STARTS else None],
    )


def rejax_worker(count: int) -> None:
    import jax

    few_threads(1)
    pace = Pace(jax=jax.__version__)
    import rejax

    algorithm = rejax.SAC.create(
        env="Pendulum-v1",
        num_envs=1,
        num_epochs=1,
        buffer_size=CAPACITY,
        fill_buffer=STARTS,
        batch_size=BATCH,
        learning_rate=SHARED["learning_rate"],
        gamma=SHARED["gamma"],
        polyak=1.0 - SHARED["tau"],
        total_timesteps=count,
        eval_freq=count,
        skip_initial_evaluation=True,
        hidden_layer_sizes=HIDDEN,
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
        if done > STARTS:
            pace.lap(done)


def sb3_worker(task: str, count: int, *, in_jax: bool) -> None:
    import gymnasium
    import stable_baselines3
    from stable_baselines3.common.callbacks import BaseCallback

    few_threads(1)
    import torch

    # One thread is faster than two on networks this small, so it gets one.
    torch.set_num_threads(1)
    options: dict[str, Any] = {"policy_kwargs": {"net_arch": list(HIDDEN)}}
    if in_jax:
        import sbx

        pace = Pace(sbx=sbx.__version__)
        kind = sbx.TD3 if task.startswith("td3") else sbx.SAC
    else:
        pace = Pace(stable_baselines3=stable_baselines3.__version__, torch=torch.__version__)
        kind = stable_baselines3.TD3 if task.startswith("td3") else stable_baselines3.SAC
        options["device"] = "cpu"

    class Paces(BaseCallback):
        due = STARTS + count

        def _on_step(self) -> bool:
            return True

        def _on_rollout_start(self) -> None:
            if self.num_timesteps >= self.due:
                pace.lap(self.num_timesteps)
                self.due = self.num_timesteps + count

    model = kind(
        "MlpPolicy",
        gymnasium.make("HalfCheetah-v5"),
        buffer_size=CAPACITY,
        learning_starts=STARTS,
        batch_size=BATCH,
        train_freq=1,
        gradient_steps=1,
        seed=0,
        **SHARED,
        **options,
    )
    model.learn(10**9, callback=Paces())


def work(args: argparse.Namespace) -> None:
    """One contestant's share."""
    match args.worker:
        case "polyak" | "polyak, 2 critics":
            polyak_worker(args.task, args.count, 2)
        case "polyak, 10 critics":
            polyak_worker(args.task, args.count, 10)
        case "rejax":
            rejax_worker(args.count)
        case "sb3" | "sbx":
            sb3_worker(args.task, args.count, in_jax=args.worker == "sbx")


def main() -> None:
    args = parsed()
    if args.worker:
        work(args)
        return
    rounds = 2 if args.quick else args.rounds
    measured = {task: compare(task, rounds, STEPS[task] // (5 if args.quick else 1)) for task in args.tasks}
    rows = [row for task in args.tasks for row in rows_of(task, measured[task])]
    text = table(["task", "contestant", "env steps/s", "polyak is", "target"], rows)
    report(text, {"benchmark": "sac", "quick": args.quick, "by_task": measured}, args.json)


def compare(task: str, rounds: int, count: int) -> dict[str, Any]:
    """All figures for one task."""
    names = ["polyak, 2 critics", "polyak, 10 critics"] if task == "critics" else ["polyak", *TARGETS[task]]
    words = "--task", task, "--count", str(count)
    commands = {
        name: [
            python_of(name) if name in ("rejax", "sb3", "sbx") else sys.executable,
            Path(__file__).resolve(),
            "--worker",
            name,
            *words,
        ]
        for name in names
    }
    rates, about = take_turns(commands, rounds)
    return {"rates": rates, "ratios": {name: ratios(rates, names[0], name) for name in names[1:]}, "versions": about}


def rows_of(task: str, measured: dict[str, Any]) -> list[list[str]]:
    """The table's lines for one task."""
    rows = []
    for name, rates in measured["rates"].items():
        ratio = measured["ratios"].get(name)
        cells = ["", ""]
        if ratio is not None and task == "critics":
            met = "yes" if median(ratio) <= MOST_TIME_OF_TEN_CRITICS else "NO"
            cells = [f"{spread(ratio, times)} times", f"{met} (<= {MOST_TIME_OF_TEN_CRITICS:g})"]
        elif ratio is not None:
            cells = [f"{spread(ratio, times)} times", verdict(median(ratio), TARGETS[task][name])]
        rows.append([task, name, spread(rates, lambda rate: f"{rate:.0f}"), *cells])
    return rows


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=list(STEPS), default=list(STEPS), help="what is measured")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each")
    parser.add_argument("--worker", help="(what the benchmark starts itself with, like the rest)")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
