"""Env steps per second with worker processes: of environments that wait, of MuJoCo, and of one worker against the host loop.

    python benchmarks/distributed.py [--quick] [--json PATH]

`waits`: a step waits 1 ms, 4 environments a worker, rollouts of 32 steps. `cheetah`: HalfCheetah-v5, 8 environments, rollouts
of 64 steps. `host`: the host loop in this shape. All train PPO with two networks of (64, 64), 2 epochs x 2 minibatches, lag 0.
Every contestant has a private Ray of its own; they work one at a time. Start and memory are those of the contestant with two
workers.
"""

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from harness import Pace, arguments, few_threads, median, ratios, report, spread, steps, table, take_turns, times, verdict

WAITING = (1, 2, 4, 8, 16)
LINEAR = {2: 0.9, 4: 0.9, 8: 0.8, 16: 0.8}


class Waits(gymnasium.Env[Any, Any]):
    """A step waits for 1 ms, as for a simulator that computes elsewhere."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        self.count = 0
        return self.np_random.random(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Wait."""
        time.sleep(0.001)
        self.count += 1
        return self.np_random.random(4, np.float32), 1.0, False, self.count == 200, {}


def worker(kind: str, workers: int, count: int) -> None:
    import jax

    jax.config.update("jax_cpu_enable_async_dispatch", False)
    few_threads(1)
    import polyak

    start = time.monotonic()
    env: Any = Waits if kind == "waits" else "HalfCheetah-v5"
    num_envs, num_steps = (4 * max(workers, 1), 32) if kind == "waits" else (8, 64)
    made = polyak.envs.make(env, num_envs=num_envs if not workers else 1)
    agent = polyak.PPO(spec=made.spec, num_steps=num_steps, num_epochs=2, num_minibatches=2)
    paces: list[Pace] = []

    def lap(progress: Any, metrics: Any, state: Any) -> None:
        if not paces:
            seconds = time.monotonic() - start - progress.compile_seconds
            paces.append(Pace(polyak=polyak.__version__, start_seconds=seconds, worker_megabytes=memory_of_workers()))
        paces[0].lap(progress.env_steps)

    options: Any = {"env_steps": 10**9, "key": jax.random.key(0), "report_every": count, "callbacks": [lap]}
    if workers:
        polyak.train.distributed(agent, env, num_envs=num_envs, workers=workers, **options)
    else:
        polyak.train.host(agent, made, **options)


def memory_of_workers() -> list[float]:
    """Proportional set size in MB of this process's Ray workers."""
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    sizes = []
    for line in listed:
        pid, _, name = line.strip().partition(" ")
        if "ray::_RayWorker" not in name:
            continue
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        sizes.append(next(int(row.split()[1]) / 1024 for row in rollup.splitlines() if row.startswith("Pss:")))
    return sizes


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each")
    parser.add_argument("--worker", nargs=2, metavar=("KIND", "WORKERS"), help="(what the benchmark starts itself with)")
    parser.add_argument("--count", type=int, default=4096, help="env steps in a measurement, for one worker")
    parser.add_argument("--most", type=int, default=16, help="workers, at most, whose steps wait")
    args = parser.parse_args()
    if args.worker:
        worker(args.worker[0], int(args.worker[1]), args.count)
        return
    rounds, most = (2, 2) if args.quick else (args.rounds, args.most)
    waiting = [number for number in WAITING if number <= most]
    me = Path(__file__).resolve()

    def command(kind: str, number: int) -> list[Any]:
        count = args.count // 4 if args.quick else args.count
        return [
            sys.executable,
            me,
            "--worker",
            kind,
            number,
            "--count",
            count * max(number, 1) if kind == "waits" else count * 2,
        ]

    rows, rates, about = [], {}, {}
    for kind, numbers in (("waits", [0, *waiting]), ("cheetah", [0, 1, 2])):
        group = {f"{kind}-{number}": command(kind, number) for number in numbers}
        measured, said = take_turns(group, rounds)
        rates |= measured
        about |= said
        for number in numbers:
            name, base = f"{kind}-{number}", f"{kind}-{'0' if number == 1 else '1'}"
            ratio = ratios(measured, name, base)
            targets = {("waits", 1): 0.95, ("cheetah", 1): 0.95, ("cheetah", 2): 1.7}
            target = targets.get((kind, number), LINEAR.get(number, 0) * number)
            against = "" if number == 0 else f"{'host loop' if number == 1 else 'one worker'}: {spread(ratio, times)}"
            label = "host loop" if number == 0 else f"{number} workers"
            rows.append([kind, label, spread(measured[name], steps), against, verdict(median(ratio), target) if number else ""])
    text = table(["environment", "", "env steps/s", "times", "target"], rows)
    two = about["waits-2"]
    text += f"\n\nstart {two['start_seconds']:.1f} s; {max(two['worker_megabytes']):.0f} MB a worker (proportional set size)"
    text += f"\n{os.cpu_count()} cores"
    report(text, {"benchmark": "distributed", "rates": rates, "about": about, "quick": args.quick}, args.json)


if __name__ == "__main__":
    main()
