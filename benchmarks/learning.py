"""How well presets learn: mean greedy return over 100 episodes after training, seed by seed, through the `polyak` command.

    python benchmarks/learning.py --suite cartpole [--seeds 0 1 2] [--env-steps N] [--quick] [--json PATH] [--runs DIR]

Every seed is a process of its own, two at a time: `polyak train ppo ENV --seed S` and its `summary.json`. Reported are the
seeds, their interquartile mean with a 95% bootstrap interval (Agarwal et al. 2021, arXiv:2108.13264), and how many reach the
threshold.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from harness import arguments, report, table


@dataclass(frozen=True)
class Suite:
    """One task.

    Attributes:
        env_steps: how long to train.
        seeds: how many by default.
        threshold: the mean greedy return that a seed must reach; where none is promised, what uniformly random actions get.
        wanted: how many seeds must reach it.
    """

    env: str
    env_steps: int
    seeds: int
    threshold: float
    wanted: int


SUITES = {
    "cartpole": Suite("CartPole-v1", 100_000, 10, 475.0, 9),
    "pendulum": Suite("Pendulum-v1", 300_000, 5, -300.0, 4),
    "acrobot": Suite("Acrobot-v1", 500_000, 3, -490.0, 3),
    "lunarlander": Suite("LunarLander-v3", 1_000_000, 3, -200.0, 3),
    "halfcheetah": Suite("HalfCheetah-v5", 1_000_000, 3, -250.0, 3),
}
EPISODES = 100


def train(suite: Suite, seed: int, env_steps: int, episodes: int, runs: Path) -> dict[str, Any]:
    """One run's summary."""
    run = runs / f"{suite.env}-{seed}"
    flags = {"--env-steps": env_steps, "--seed": seed, "--run-dir": run, "--eval-episodes": episodes}
    command = [Path(sys.executable).with_name("polyak"), "train", "ppo", suite.env]
    words = [str(word) for word in (*command, *(word for flag in flags.items() for word in flag))]
    done = subprocess.run(words, capture_output=True, text=True)
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).strip().splitlines()[-15:])
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}:\n{said}")
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    print(f"{suite.env} seed {seed}: {summary['eval_mean_return']:.1f}", file=sys.stderr, flush=True)
    return summary


def iqm(values: Sequence[float]) -> float:
    """The mean of the middle half; a value at the border counts by its part inside."""
    ordered = np.sort(np.asarray(values, float))
    edges = np.linspace(0.0, 1.0, len(ordered) + 1)
    inside = np.clip(edges[1:], 0.25, 0.75) - np.clip(edges[:-1], 0.25, 0.75)
    return float((ordered * inside).sum() / inside.sum())


def interval(values: Sequence[float]) -> tuple[float, float]:
    """95% percentile bootstrap interval of the interquartile mean, over seeds."""
    rng = np.random.default_rng(0)
    samples = rng.choice(np.asarray(values, float), (2000, len(values)))
    low, high = np.quantile([iqm(sample) for sample in samples], [0.025, 0.975])
    return float(low), float(high)


def main() -> None:
    args = parsed()
    suite = SUITES[args.suite]
    env_steps, episodes, seeds = args.env_steps or suite.env_steps, EPISODES, args.seeds or list(range(suite.seeds))
    if args.quick:
        env_steps, episodes, seeds = 4_096, 4, seeds[:2]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(2) as pool:
        runs = args.runs or Path(scratch)
        summaries = list(pool.map(lambda seed: train(suite, seed, env_steps, episodes, runs), seeds))
    returns = [float(summary["eval_mean_return"]) for summary in summaries]
    reached = sum(r >= suite.threshold for r in returns)
    low, high = interval(returns)
    fps = [float(summary["fps"]) for summary in summaries]
    row = [
        suite.env,
        f"{env_steps:,}",
        ", ".join(f"{r:.0f}" for r in returns),
        f"{iqm(returns):.1f} ({low:.1f} to {high:.1f})",
        f"{reached} of {len(returns)} >= {suite.threshold:g}",
        f"{np.median(fps):,.0f}",
    ]
    header = ["environment", "env steps", "mean greedy return by seed", "IQM (95% interval)", "reached", "env steps/s"]
    result = {"benchmark": "learning", "suite": args.suite, "quick": args.quick, "seeds": seeds, "env_steps": env_steps}
    figures = {"returns": returns, "iqm": iqm(returns), "interval": [low, high], "threshold": suite.threshold}
    report(table(header, [row]), {**result, **figures, "reached": reached, "summaries": summaries}, args.json)
    if not args.quick and len(seeds) == suite.seeds and reached < suite.wanted:
        raise SystemExit(f"{suite.env}: {reached} of {len(seeds)} seeds reach {suite.threshold:g}, wanted {suite.wanted}")


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--suite", choices=list(SUITES), default="cartpole", help="the task")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0, 1, ...")
    parser.add_argument("--env-steps", type=int, help="another length than the suite's")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="keep the run directories here")
    return parser.parse_args()


if __name__ == "__main__":
    main()
