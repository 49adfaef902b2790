"""Compares the statistics of `polyak.reports.statistics` with rliable, on the same scores and the same resamples.

    python benchmarks/rliable_check.py [--json FILE]

The scores are random: normal ones, whole numbers with many ties, and skewed ones in the shape of Atari 100k (26 games, 3 to
100 runs); the scores that rliable's paper published lie in a bucket, not in a package. Prints the largest difference of every
number and interval, and exits with 1 if one is above 1e-6. `peers.py` installs rliable beside this file, as it does not import
with pandas 3.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from peers import python_of

from polyak.reports.statistics import (
    bootstrap_interval,
    iqm,
    mean,
    median,
    optimality_gap,
    performance_profile,
    probability_of_improvement,
)

TOLERANCE, RESAMPLES = 1e-6, 200
THRESHOLDS = np.linspace(-1.0, 4.0, 51)
SHAPES = {"normal": (10, 10, 5), "ties": (7, 12, 3), "skewed": (3, 100, 26), "one task": (4, 5, 1)}
"""Runs, runs of the other algorithm, and tasks."""

RLIABLE = """
import sys
import numpy as np
from rliable import library, metrics

scores, thresholds, resamples = np.load(sys.argv[1]), np.load(sys.argv[2]), int(sys.argv[3])
drawn, found = [], {}

class Recorded(library.StratifiedBootstrap):
    def update_indices(self):
        indices = super().update_indices()
        drawn.append([indices[0]])
        return indices

class RecordedPairs(library.StratifiedIndependentBootstrap):
    def update_indices(self):
        positions, names = super().update_indices()
        drawn.append([part[0] for part in positions])
        return positions, names

library.StratifiedBootstrap, library.StratifiedIndependentBootstrap = Recorded, RecordedPairs
functions = {
    "mean": metrics.aggregate_mean,
    "median": metrics.aggregate_median,
    "iqm": metrics.aggregate_iqm,
    "optimality_gap": metrics.aggregate_optimality_gap,
    "performance_profile": lambda x: library.score_distributions(x, thresholds),
    "probability_of_improvement": metrics.probability_of_improvement,
}
np.random.seed(0)
for case in sorted({name.split("/")[0] for name in scores.files}):
    x, y = scores[f"{case}/x"], scores[f"{case}/y"]
    for name, function in functions.items():
        drawn.clear()
        arrays = [x, y] if name == "probability_of_improvement" else x
        points, ends = library.get_interval_estimates(
            {"a": arrays}, lambda *parts: np.atleast_1d(function(*parts)), reps=resamples
        )
        found[f"{case}/{name}/value"], found[f"{case}/{name}/interval"] = points["a"], ends["a"]
        for number, part in enumerate(zip(*drawn[-resamples:])):
            found[f"{case}/{name}/indices{number}"] = np.array(part)
np.savez(sys.argv[4], **found)
"""
"""Prints the numbers of rliable, and the runs that its bootstrap has drawn."""

STATISTICS = {
    "mean": mean,
    "median": median,
    "iqm": iqm,
    "optimality_gap": optimality_gap,
    "performance_profile": lambda scores: performance_profile(scores, THRESHOLDS),
    "probability_of_improvement": probability_of_improvement,
}


def make_scores() -> dict[str, np.ndarray]:
    rng, scores = np.random.default_rng(0), {}
    for case, (runs, others, tasks) in SHAPES.items():
        for name, count in (("x", runs), ("y", others)):
            values = rng.normal(0.5, 1.0, (count, tasks))
            shaped = {"ties": np.round(values), "skewed": np.exp(values) * rng.gamma(1.0, 1.0, tasks)}
            scores[f"{case}/{name}"] = shaped.get(case, values)
    return scores


def rliable_numbers(scores: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / name for name in ("scores.npz", "thresholds.npy", "numbers.npz")]
        np.savez(paths[0], **scores)
        np.save(paths[1], THRESHOLDS)
        command = [str(python_of("rliable")), "-c", RLIABLE, *map(str, paths[:2]), str(RESAMPLES), str(paths[2])]
        subprocess.run(command, check=True)
        return dict(np.load(paths[2]))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, help="file for the differences")
    arguments = parser.parse_args()
    scores = make_scores()
    theirs = rliable_numbers(scores)
    worst: dict[str, float] = {}
    for name, statistic in STATISTICS.items():
        for case in SHAPES:
            arrays = [scores[f"{case}/x"]] + [scores[f"{case}/y"]] * (name == "probability_of_improvement")
            indices = [theirs[f"{case}/{name}/indices{number}"] for number in range(len(arrays))]
            ends = np.array(bootstrap_interval(statistic, *arrays, indices=indices))
            value = np.max(np.abs(statistic(*arrays) - theirs[f"{case}/{name}/value"]))
            interval = np.max(np.abs(ends.reshape(2, -1) - theirs[f"{case}/{name}/interval"].reshape(2, -1)))
            worst[name] = max(worst.get(name, 0.0), float(value))
            worst[f"{name}, 95 % interval"] = max(worst.get(f"{name}, 95 % interval", 0.0), float(interval))
    print("\n".join(f"{name:45} {difference:.1e}" for name, difference in worst.items()))
    if arguments.json:
        arguments.json.write_text(json.dumps(worst, indent=2) + "\n")
    if max(worst.values()) > TOLERANCE:
        sys.exit(f"differences above {TOLERANCE:g}")


if __name__ == "__main__":
    main()
