"""Draws the learning curves in docs/pictures/ from the results that learning.py wrote.

    python benchmarks/plot_learning.py [--results benchmarks/results] [--pictures docs/pictures]

Each `SUITE.json` becomes `learning-SUITE.svg`: the training return (`rollout/ep_rew_mean`) of every seed, their mean, and the
published result of the greedy policy. `learning-curves.svg` shows all suites side by side. Every picture stores the SHA-256 of
the results that it shows, so that a test finds a picture that is out of date. Needs matplotlib: `pip install '.[plots]'`.
"""

import argparse
import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# A fixed time stamp and fixed ids: equal results give equal files.
os.environ["SOURCE_DATE_EPOCH"] = "0"

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PICTURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "pictures"
OVERVIEW = ("cartpole", "acrobot", "pendulum", "invertedpendulum")
SEED_COLOR, MEAN_COLOR, TARGET_COLOR = "#9fa8da", "#303f9f", "#c2185b"
STYLE = {
    "svg.hashsalt": "polyak",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e0e0e0",
    "legend.frameon": False,
}


def digest(paths: Sequence[Path]) -> str:
    """SHA-256 of the results that a picture shows."""
    return hashlib.sha256(b"".join(path.read_bytes() for path in paths)).hexdigest()


def draw(axes: Axes, result: dict[str, Any]) -> None:
    """Draw one suite: each seed, the mean over seeds, and the published result."""
    curves = [(np.array(s["curve"]["env_steps"]), np.array(s["curve"]["ep_rew_mean"])) for s in result["summaries"]]
    for env_steps, returns in curves:
        axes.plot(env_steps, returns, color=SEED_COLOR, linewidth=0.8)
    # The seeds report at slightly different env_steps; the mean is taken where all of them have values.
    grid = np.linspace(max(steps[0] for steps, _ in curves), min(steps[-1] for steps, _ in curves), 200)
    mean = np.mean([np.interp(grid, *curve) for curve in curves], axis=0)
    axes.plot(grid, mean, color=MEAN_COLOR, linewidth=2, label=f"mean of {len(curves)} seeds")
    if result["wanted"] is not None:
        label = "target" if result["source"] in ("own", "maximum") else result["source"]
        axes.axhline(result["wanted"], color=TARGET_COLOR, linewidth=1, linestyle="--", label=f"{label}: {result['wanted']:g}")
    axes.set_title(result["env"] + (" (DQN)" if result["suite"].startswith("dqn-") else ""))
    axes.set_xlim(0, result["env_steps"])
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5))
    axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    axes.set_xlabel("env_steps")
    axes.set_ylabel("mean episode return")
    axes.legend(loc="lower right")


def save(figure: Figure, picture: Path, sources: Sequence[Path]) -> None:
    """Write the picture, with the digest of its sources in its metadata."""
    picture.parent.mkdir(parents=True, exist_ok=True)
    metadata = {"Description": f"results sha256 {digest(sources)}", "Creator": "benchmarks/plot_learning.py"}
    figure.savefig(picture, format="svg", metadata=metadata)
    print(picture)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="directory of SUITE.json files")
    parser.add_argument("--pictures", type=Path, default=PICTURES, help="directory that the pictures are written to")
    args = parser.parse_args()
    matplotlib.rcParams.update(STYLE)
    results = {path.stem: (path, json.loads(path.read_text())) for path in sorted(args.results.glob("*.json"))}
    for suite, (path, result) in results.items():
        figure = Figure(figsize=(6.4, 3.6), layout="constrained")
        draw(figure.add_subplot(), result)
        save(figure, args.pictures / f"learning-{suite}.svg", [path])
    shown = [results[suite] for suite in OVERVIEW if suite in results]
    figure = Figure(figsize=(10.0, 5.6), layout="constrained")
    for number, (_, result) in enumerate(shown):
        draw(figure.add_subplot(2, 2, number + 1), result)
    save(figure, args.pictures / "learning-curves.svg", [path for path, _ in shown])


if __name__ == "__main__":
    main()
