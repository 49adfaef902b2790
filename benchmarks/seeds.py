"""Sixteen seeds of one small problem: at once in one program, against one after another.

`python benchmarks/seeds.py` starts each contestant in a process of its own, one at a time in turns, and measures the wall time
that a user waits: imports, compilation and training. "one after another" trains all seeds in one process, which compiles once;
"a process each", with --processes, starts a process for each seed. The target: at once is 1.8 times as fast as one after
another.

The second table says what limits: the time of imports and compilation, which is paid once; the time of training; and the cores
that were busy. A machine with other load takes more from the contestant that uses more cores, so measure on a quiet one.
"""

import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

import harness

AT_ONCE, IN_TURN, PROCESSES = "at once", "one after another", "a process each"
TARGET = 1.8


def train(kind: str, algorithm: str, env: str, env_steps: int, seeds: Sequence[int]) -> None:
    """Train in this process, and print where its time went."""
    import polyak

    shared: dict[str, Any] = {"env_steps": env_steps, "progress": False}
    if kind == AT_ONCE:
        results = polyak.train.run_seeds(algorithm, env, seeds=list(seeds), eval_episodes=0, **shared)
        compiling, training = results[0].progress.compile_seconds, results[0].progress.seconds
    else:
        results = [polyak.train.run(algorithm, env, seed=seed, **shared) for seed in seeds]
        compiling = sum(result.progress.compile_seconds for result in results)
        training = sum(result.progress.seconds for result in results)
    returns = [result.metrics.get("rollout/ep_rew_mean", 0.0) for result in results]
    print(json.dumps({"compiling": compiling, "training": training, "mean_return": sum(returns) / len(returns)}))


def measure(kind: str, algorithm: str, env: str, env_steps: int, seeds: Sequence[int]) -> dict[str, float]:
    """Wall and CPU seconds of a contestant, and what it says about its time."""
    groups = [[seed] for seed in seeds] if kind == PROCESSES else [list(seeds)]
    start, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_CHILDREN)
    parts = []
    for group in groups:
        words = [sys.executable, __file__, "--contestant", kind, algorithm, env, str(env_steps), json.dumps(group)]
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{kind}: {done.stderr[-2000:]}")
        parts.append(json.loads(done.stdout.splitlines()[-1]))
    wall, after = time.perf_counter() - start, resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    sums = {name: sum(part[name] for part in parts) for name in ("compiling", "training")}
    mean_return = sum(part["mean_return"] for part in parts) / len(parts)
    return {"wall": wall, "cpu": cpu, "mean_return": mean_return, **sums}


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--algorithm", default="a2c", help="the algorithm, with its preset")
    parser.add_argument("--env", default="jax/CartPole-v1", help="an environment in JAX")
    parser.add_argument("--env-steps", type=int, default=500_000, help="env_steps of each seed")
    parser.add_argument("--seeds", type=int, default=16, help="number of seeds")
    parser.add_argument("--rounds", type=int, default=3, help="measurements of each contestant")
    parser.add_argument("--processes", action="store_true", help="also a process for each seed, once")
    asked = parser.parse_args()
    env_steps, seeds, rounds = (2_000, 4, 1) if asked.quick else (asked.env_steps, asked.seeds, asked.rounds)
    task = asked.algorithm, asked.env, env_steps, range(seeds)
    measured: dict[str, list[dict[str, float]]] = {AT_ONCE: [], IN_TURN: []}
    load = os.getloadavg()[0]
    for _ in range(rounds):
        for kind in (AT_ONCE, IN_TURN):
            measured[kind].append(measure(kind, *task))
    if asked.processes:
        measured[PROCESSES] = [measure(PROCESSES, *task)]
    walls = {kind: [one["wall"] for one in found] for kind, found in measured.items()}
    ratios = [turn / once for once, turn in zip(walls[AT_ONCE], walls[IN_TURN], strict=True)]
    times = {AT_ONCE: "1", IN_TURN: harness.spread(ratios, harness.times)}
    if asked.processes:
        times[PROCESSES] = harness.times(walls[PROCESSES][0] / harness.median(walls[AT_ONCE]))
    rows = [(kind, harness.spread(walls[kind], "{:.1f} s".format), times[kind]) for kind in measured]
    limits = []
    for kind, found in measured.items():
        middle = sorted(found, key=lambda one: one["wall"])[len(found) // 2]
        start = middle["wall"] - middle["compiling"] - middle["training"]
        parts = [f"{x:.1f} s" for x in (start, middle["compiling"], middle["training"])]
        rate = harness.steps(seeds * env_steps / middle["training"])
        limits.append((kind, *parts, rate, f"{middle['cpu']:.1f} s", f"{middle['cpu'] / middle['wall']:.2f}"))
    header = (
        "contestant",
        "imports, start and end",
        "compilation",
        "training",
        "env_steps/s, all seeds",
        "CPU time",
        "busy cores",
    )
    text = "\n\n".join(
        [
            f"{seeds} seeds of {asked.algorithm} in {asked.env}, {env_steps:,} env_steps each; load at the start {load:.2f}",
            harness.table(("contestant", "wall time", "times at once"), rows),
            f"times one after another: {times[IN_TURN]}; target met: {harness.verdict(harness.median(ratios), TARGET)}",
            harness.table(header, limits),
        ]
    )
    harness.report(text, {"env_steps": env_steps, "seeds": seeds, "ratios": ratios, "measured": measured}, asked.json)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--contestant"]:
        train(*sys.argv[2:5], int(sys.argv[5]), json.loads(sys.argv[6]))
    else:
        main()
