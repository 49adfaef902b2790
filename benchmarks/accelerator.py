"""Env steps per second while polyak trains on an accelerator (a GPU), and on the CPU of the same machine, same settings.

    python benchmarks/accelerator.py [--quick] [--json PATH] [--tasks ppo-64 ppo-2048 ... host-tqc] [--platform cuda]

All train while they are measured; compilation and the first steps are not counted. The CPU has the threads that `polyak train`
gives it: one a device where products are small, else one a core; for PPO with 2,048 environments also as eight devices.

- `ppo-64`, `ppo-2048`: PPO with so many CartPoles in JAX, layers of (64, 64).
- `ppo-wide`: PPO with 2,048 Pendulums in JAX, layers of (1024, 1024).
- `sac`, `sac-10`: SAC on one Pendulum in JAX, batches of 256, layers of (256, 256), one update per step, 2 and 10 critics.
- `sac-wide`: the same with batches of 1,024 and layers of (1024, 1024).
- `host-sac`, `host-tqc`: eight HalfCheetah-v5 stepped from Python, one update per step.
"""

import argparse
import os
import sys
from pathlib import Path
from typing import Any

from harness import Pace, arguments, few_threads, median, ratios, report, spread, table, take_turns, times

STARTS = 1_000
# Env steps of a measurement on an accelerator, and on a CPU.
STEPS = {
    "ppo-64": (200_000, 200_000),
    "ppo-2048": (8_000_000, 1_000_000),
    "ppo-wide": (2_000_000, 100_000),
    "sac": (2_000, 500),
    "sac-10": (2_000, 250),
    "sac-wide": (2_000, 50),
    "host-sac": (2_000, 500),
    "host-tqc": (2_000, 250),
}
# Of small products, which one thread computes fastest.
SMALL = ("sac", "sac-10", "host-sac", "host-tqc")


def worker(task: str, count: int, platform: str, devices: int) -> None:
    """One contestant: trains until it is ended."""
    os.environ["JAX_PLATFORMS"] = platform
    # Several processes share the accelerator's memory.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    if platform == "cpu" and task in SMALL:
        few_threads(devices)
    import jax

    # What the host loop waits for at every step.
    jax.config.update("jax_cpu_enable_async_dispatch", not task.startswith("host"))

    if platform == "cpu":
        jax.config.update("jax_num_cpu_devices", devices)
    import polyak

    pace = Pace(polyak=polyak.__version__, jax=jax.__version__, device=jax.devices()[0].device_kind, devices=devices)
    agent, env = ppo(task) if task.startswith("ppo") else off_policy(task)
    train: Any = polyak.loops.host if task.startswith("host") else polyak.loops.compiled
    after = 0 if task.startswith("ppo") else STARTS
    train(
        agent,
        env,
        env_steps=10**12,
        key=jax.random.key(0),
        report_every=count,
        devices=devices,
        callbacks=[lambda progress, *_: pace.lap(progress.env_steps) if progress.env_steps > after else None],
    )


def ppo(task: str) -> tuple[Any, Any]:
    """The agent and its environments."""
    import polyak

    wide = task == "ppo-wide"
    env = polyak.envs.make("jax/Pendulum-v1" if wide else "jax/CartPole-v1", num_envs=64 if task == "ppo-64" else 2048)
    network = polyak.MLP((1024, 1024)) if wide else None
    agent = polyak.PPO(
        env.spec, num_steps=32 if wide else 128, num_epochs=4, num_minibatches=4, learning_rate=1e-3, network=network
    )
    return agent, env


def off_policy(task: str) -> tuple[Any, Any]:
    """The agent and its environments."""
    import polyak

    on_host = task.startswith("host")
    env = polyak.envs.make(
        "HalfCheetah-v5" if on_host else "jax/Pendulum-v1", num_envs=8 if on_host else 1, action_scaling="rescale"
    )
    hidden = (1024, 1024) if task == "sac-wide" else (256, 256)
    kind: Any = polyak.TQC if task == "host-tqc" else polyak.SAC
    agent = kind(
        env.spec,
        actor=polyak.Actor(hidden, std="state"),
        critics=polyak.Critics(hidden, num_critics=10 if task == "sac-10" else 2),
        num_steps=1,
        updates_per_step=1.0,
        batch_size=1024 if task == "sac-wide" else 256,
        replay=polyak.UniformReplay(1_000_000),
        learning_starts=STARTS,
        learning_rate=3e-4,
    )
    return agent, env


def compare(tasks: list[str], accelerator: str, rounds: int, divisor: int) -> dict[str, Any]:
    """All figures, by task; all contestants are compiled at once, and then work in turns."""
    commands = {}
    for task in tasks:
        contestants = {accelerator: (accelerator, 1), "cpu": ("cpu", 1)}
        if task == "ppo-2048":
            contestants["cpu, 8 devices"] = "cpu", 8
        for name, (platform, devices) in contestants.items():
            count = max(16, STEPS[task][platform == "cpu"] // divisor)
            words = "--task", task, "--count", str(count), "--on", platform, "--devices", str(devices)
            commands[f"{task} on {name}"] = [sys.executable, Path(__file__).resolve(), *words]
    rates, about = take_turns(commands, rounds)
    by_task = {}
    for task in tasks:
        own = {name.removeprefix(f"{task} on "): rate for name, rate in rates.items() if name.startswith(f"{task} on ")}
        others = [name for name in own if name != accelerator]
        by_task[task] = {
            "rates": own,
            "ratios": {name: ratios(own, accelerator, name) for name in others},
            "about": {name: about[f"{task} on {name}"] for name in own},
        }
    return by_task


def rows_of(task: str, measured: dict[str, Any]) -> list[list[str]]:
    """The table's lines for one task."""
    rows = []
    for name, rates in measured["rates"].items():
        ratio = measured["ratios"].get(name)
        accelerator_is = f"{spread(ratio, times)} times" if ratio is not None else ""
        rows.append([task, f"{name} ({measured['about'][name]['device']})", f"{median(rates):,.0f}", accelerator_is])
    return rows


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--tasks", nargs="+", choices=list(STEPS), default=list(STEPS), help="what is measured")
    parser.add_argument("--platform", default="cuda", help="JAX's name of the accelerator")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each")
    parser.add_argument("--task", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--on", help=argparse.SUPPRESS)
    parser.add_argument("--devices", type=int, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = parsed()
    if args.task:
        worker(args.task, args.count, args.on, args.devices)
        return
    by_task = compare(args.tasks, args.platform, 2 if args.quick else args.rounds, 10 if args.quick else 1)
    rows = [row for task in args.tasks for row in rows_of(task, by_task[task])]
    text = table(["task", "on", "env steps/s", "accelerator is"], rows)
    report(text, {"benchmark": "accelerator", "quick": args.quick, "by_task": by_task}, args.json)


if __name__ == "__main__":
    main()
