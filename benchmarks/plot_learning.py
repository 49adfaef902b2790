"""Draws the learning curves in docs/pictures/ from the results that learning.py wrote.

    python benchmarks/plot_learning.py [--results benchmarks/results] [--pictures docs/pictures]

Each `SUITE.json` becomes `learning-SUITE.svg`: the training return of every seed, their mean, and the target of the greedy
policy. The training return is `rollout/ep_rew_mean`, in Pendulum-v1 that of the newest episodes. `learning-curves.svg` shows
four suites side by side, and `learning-comparison.svg` the agents for continuous actions, at equal steps and at equal time.
Every picture stores the SHA-256 of the results that it shows, so that a test finds a picture that is out of date. Needs
matplotlib: `pip install '.[plots]'`.
"""

import argparse
import hashlib
import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# A fixed time stamp and fixed ids: equal results give equal files.
os.environ["SOURCE_DATE_EPOCH"] = "0"

import matplotlib
import numpy as np
from learning import SUITES
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).resolve().parents[1]
RESULTS, PICTURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "pictures"
OVERVIEW = ("cartpole", "acrobot", "pendulum", "invertedpendulum")
# By name: suite and color.
COMPARISON = {
    "PPO": ("ppo-jax-pendulum", "#757575"),
    "TD3": ("td3-pendulum", "#00897b"),
    "SAC": ("sac-pendulum", "#303f9f"),
    "TQC": ("tqc-pendulum", "#c2185b"),
}
# The environments that the recorded runs of Pendulum-v1 had. All its episodes have 200 steps, so reports count them.
PENDULUM_ENVS = {
    "pendulum": 4,
    "ppo-jax-pendulum": 4,
    "a2c-pendulum": 8,
    "ddpg-pendulum": 1,
    "td3-pendulum": 1,
    "sac-pendulum": 1,
    "tqc-pendulum": 1,
}
EPISODE_STEPS, WINDOW, FEWEST_EPISODES = 200, 100, 10
# No mean over seeds is drawn for this part of the training after a resume, when reports are means of few episodes.
AFTER_RESUME = 0.1
NAMES = {"qrdqn": "QR-DQN", "rainbow": "Rainbow"}
SEED_COLOR, MEAN_COLOR, TARGET_COLOR, PUBLISHED_COLORS = "#9fa8da", "#303f9f", "#c2185b", ("#bdbdbd", "#616161")
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
    """Draw one suite: each seed, the mean over seeds, and the published result, with its curve if there is one."""
    suite = SUITES[result["suite"]]
    curves = [training_returns(result["suite"], summary["curve"]) for summary in result["summaries"]]
    resumed = [resumed_rows(summary["curve"]) for summary in result["summaries"]]
    for (env_steps, returns), rows in zip(curves, resumed, strict=True):
        # The reports start anew when a run is resumed: the line is interrupted there.
        parts = np.insert(env_steps, rows, np.nan), np.insert(returns, rows, np.nan)
        axes.plot(*parts, color=SEED_COLOR, linewidth=0.8)
        axes.plot(env_steps[rows], returns[rows], "o", color=MEAN_COLOR, fillstyle="none", markersize=4)
    if any(resumed):
        axes.plot([], [], "o", color=MEAN_COLOR, fillstyle="none", markersize=4, label="stopped and resumed")
    # The seeds report at slightly different env_steps; the mean is taken where all of them have values.
    grid = np.linspace(max(steps[0] for steps, _ in curves), min(steps[-1] for steps, _ in curves), 200)
    mean = np.mean([np.interp(grid, *curve) for curve in curves], axis=0)
    if result["suite"] not in PENDULUM_ENVS:
        for stop in [steps[row - 1] for (steps, _), rows in zip(curves, resumed, strict=True) for row in rows]:
            mean[(stop < grid) & (grid < stop + AFTER_RESUME * result["env_steps"])] = np.nan
    axes.plot(
        grid, mean, color=MEAN_COLOR, linewidth=2, label=f"mean of {len(curves)} seeds" if len(curves) > 1 else "one seed"
    )
    if published := result.get("published"):
        of_runs, of_mean = PUBLISHED_COLORS
        for returns in published["returns"]:
            axes.plot(published["env_steps"], returns, color=of_runs, linewidth=0.8)
        label = f"{published['name']}, mean of {len(published['returns'])} runs"
        axes.plot(published["env_steps"], np.mean(published["returns"], axis=0), color=of_mean, linewidth=2, label=label)
    if result["wanted"] is not None:
        source = "" if result["source"] == "this project's" else f" ({result['source']})"
        label = f"target of the greedy policy: {result['wanted']:g}{source}"
        axes.axhline(result["wanted"], color=TARGET_COLOR, linewidth=1, linestyle="--", label=label)
    algorithm = NAMES.get(suite.algorithm, suite.algorithm.upper())
    axes.set_title(f"{result['env']} ({', '.join([algorithm, *filter(None, [' '.join(suite.flags)])])})")
    axes.set_xlim(0, result["env_steps"])
    axes.xaxis.set_major_locator(matplotlib.ticker.MultipleLocator(tick_distance(result["env_steps"])))
    axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    axes.set_xlabel("env_steps")
    axes.set_ylabel("return, newest episodes" if result["suite"] in PENDULUM_ENVS else "return, last 100 episodes")
    # Below the axes it covers no curve.
    below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.18)}
    axes.legend(**below, ncols=2, fontsize=9, handlelength=1.5, columnspacing=1.2)


def training_returns(suite: str, curve: dict[str, list[float]]) -> tuple[Any, Any]:
    """The env_steps of a seed, and its returns: of the newest episodes where these can be counted, else `ep_rew_mean`."""
    known = suite in PENDULUM_ENVS
    returns = recent_returns(curve, PENDULUM_ENVS[suite]) if known else curve["ep_rew_mean"]
    return np.array(curve["env_steps"], float), np.array(returns, float)


def tick_distance(env_steps: int) -> float:
    """A fifth, sixth or quarter of the axis: the first with a single digit that is not 0, else a fifth."""
    parts = (5, 6, 4)
    return next((env_steps / n for n in parts if len(f"{env_steps / n:.15g}".rstrip("0")) == 1), env_steps / parts[0])


def compare(by_steps: Axes, by_time: Axes, results: dict[str, dict[str, Any]]) -> None:
    """Draw the mean over seeds of each agent, with the range of the seeds, by `env_steps` and by seconds of training.

    The seconds are the median over the seeds of the time that they took for so many `env_steps`.
    """
    for name, (suite, color) in COMPARISON.items():
        result = results[suite]
        curves = [summary["curve"] for summary in result["summaries"]]
        steps, returns = zip(*(training_returns(suite, curve) for curve in curves), strict=True)
        grid = np.linspace(max(x[0] for x in steps), min(x[-1] for x in steps), 200)
        seeds = np.array([np.interp(grid, x, y) for x, y in zip(steps, returns, strict=True)])
        # A mean over seeds at equal time would mix steps: seeds that shared the machine with others are slower.
        seconds = [np.interp(grid, x, training_seconds(curve)) for x, curve in zip(steps, curves, strict=True)]
        for axes, x in ((by_steps, grid), (by_time, np.median(seconds, axis=0))):
            axes.plot(x, seeds.mean(axis=0), color=color, linewidth=2, label=f"{name}, {len(curves)} seeds")
            axes.fill_between(x, seeds.min(axis=0), seeds.max(axis=0), color=color, alpha=0.15, linewidth=0)
    by_steps.set_xlim(0, min(results[suite]["env_steps"] for suite, *_ in COMPARISON.values()))
    by_steps.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    by_steps.set_xlabel("env_steps")
    by_steps.set_ylabel("mean return of the newest episodes")
    by_steps.set_title("jax/Pendulum-v1, equal steps")
    by_time.set_xscale("log")
    by_time.set_xlim(left=0.1)
    by_time.xaxis.set_major_formatter(matplotlib.ticker.FormatStrFormatter("%g"))
    by_time.set_xlabel("seconds of training (median of the seeds), logarithmic")
    by_time.set_title("jax/Pendulum-v1, equal time")
    by_steps.legend(loc="lower right")


def recent_returns(curve: dict[str, list[float]], num_envs: int) -> list[float]:
    """The mean return of the episodes since a report that is at least ten episodes older.

    `rollout/ep_rew_mean` is the mean over all episodes so far, up to a hundred; so n times it is their sum. From then on it is
    that of the last hundred, and stands as it is. A resumed run counts its episodes anew.
    """
    recent: list[float] = []
    episodes, sums, before, sum_before = [0], [0.0], 0, 0.0
    for row, (steps, mean) in enumerate(zip(curve["env_steps"], curve["ep_rew_mean"], strict=True)):
        if row in resumed_rows(curve):
            before, sum_before = episodes[-1], sums[-1]
        n = num_envs * int(steps / num_envs // EPISODE_STEPS)
        total = sum_before + (n - before) * mean
        older = [(m, part) for m, part in zip(episodes, sums, strict=True) if m <= n - FEWEST_EPISODES]
        m, part = older[-1] if older else (0, 0.0)
        recent.append(mean if n - before > WINDOW else (total - part) / (n - m))
        episodes.append(n)
        sums.append(total)
    return recent


def training_seconds(curve: dict[str, list[float]]) -> list[float]:
    """Seconds of training at each report; a resumed run counts them anew."""
    before, seconds = 0.0, curve["seconds"]
    total: list[float] = []
    for row, since_start in enumerate(seconds):
        before = total[-1] if row in resumed_rows(curve) else before
        total.append(before + since_start)
    return total


def resumed_rows(curve: dict[str, list[float]]) -> list[int]:
    """The first report of each time that the run was resumed: its seconds are fewer than those of the report before."""
    seconds = curve.get("seconds", [])
    return [row for row, (a, b) in enumerate(itertools.pairwise(seconds), 1) if b < a]


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
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        draw(figure.add_subplot(), result)
        save(figure, args.pictures / f"learning-{suite}.svg", [path])
    shown = [results[suite] for suite in OVERVIEW if suite in results]
    figure = Figure(figsize=(10.0, 7.4), layout="constrained")
    figure.get_layout_engine().set(hspace=0.06, wspace=0.04)
    for number, (_, result) in enumerate(shown):
        draw(figure.add_subplot(2, 2, number + 1), result)
    save(figure, args.pictures / "learning-curves.svg", [path for path, _ in shown])
    compared = {suite: results[suite] for suite, *_ in COMPARISON.values() if suite in results}
    if len(compared) == len(COMPARISON):
        figure = Figure(figsize=(10.0, 4.0), layout="constrained")
        figure.get_layout_engine().set(wspace=0.06)
        compare(*figure.subplots(1, 2, sharey=True), {suite: result for suite, (_, result) in compared.items()})
        save(figure, args.pictures / "learning-comparison.svg", [path for path, _ in compared.values()])


if __name__ == "__main__":
    main()
