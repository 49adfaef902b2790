"""A study of 40 trials of PPO in CartPole from the wide space that polyak ships, against the preset.

`python benchmarks/study.py` prints the scores of the best trial and of the preset, in the search and with seeds that the search
has not used. The target: the best trial's mean over these seeds is at least the preset's. A second start continues the study.
"""

import tempfile
import time
from pathlib import Path

import harness
import numpy as np

import polyak
from polyak.studies.page import describe_worth


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    parser.add_argument("--trials", type=int, default=40, help="number of trials")
    parser.add_argument("--env-steps", type=int, default=30_000, help="env_steps of each training; the preset has 100,000")
    parser.add_argument("--seeds", type=int, default=2, help="number of seeds of each trial")
    parser.add_argument("--fresh-seeds", type=int, default=10, help="number of seeds for the comparison at the end")
    parser.add_argument("--sampler", default="tpe", choices=["tpe", "cma-es"], help="sampler of the settings")
    parser.add_argument("--directory", type=Path, help="directory of the study; a new one by default")
    asked = parser.parse_args()
    trials, env_steps, fresh = (3, 2_000, 2) if asked.quick else (asked.trials, asked.env_steps, asked.fresh_seeds)
    start = time.perf_counter()
    result = polyak.study(
        "ppo",
        "jax/CartPole-v1",
        trials=trials,
        seeds=asked.seeds,
        directory=asked.directory or Path(tempfile.mkdtemp(prefix="polyak-study-")),
        sampler=asked.sampler,
        env_steps=env_steps,
        fresh_seeds=fresh,
    )
    seconds, best, preset = time.perf_counter() - start, result.best, result.trials[0]
    means = {trial.number: float(np.mean(trial.fresh_scores)) for trial in (best, preset)}
    rows = [
        (name, trial.number, f"{trial.score:.1f}", f"{means[trial.number]:.1f}")
        for name, trial in (("best trial", best), ("preset", preset))
    ]
    states = {state: sum(trial.state == state for trial in result.trials) for state in ("complete", "pruned", "failed")}
    text = "\n\n".join(
        [
            f"{trials} trials of {asked.seeds} seeds and {env_steps:,} env_steps in {seconds:.0f} s: {states}",
            harness.table(("settings", "trial", "score in the search", f"mean of {fresh} fresh seeds"), rows),
            describe_worth(best, preset),
            f"best settings: {dict(best.settings)}",
            f"importances: { {name: round(share, 2) for name, share in result.importances.items()} }",
            f"target met: {harness.verdict(means[best.number], means[0])}",
        ]
    )
    harness.report(text, {"best": dict(best.settings), "means": means, "states": states, "seconds": seconds}, asked.json)


if __name__ == "__main__":
    main()
