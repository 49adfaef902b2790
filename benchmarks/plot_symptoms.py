"""Draws docs/pictures/symptoms-*.svg: metrics of trainings that learn, and of trainings in which one setting is wrong.

    python benchmarks/plot_symptoms.py [--pictures docs/pictures] [--only NAME]

Each training has the preset for its environment and seed 0, but for the setting that the label names. All take some minutes.
Needs matplotlib: `pip install '.[plots]'`.
"""

import argparse
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

# A fixed time stamp and fixed ids: equal curves give equal files.
os.environ["SOURCE_DATE_EPOCH"] = "0"

import gymnasium
import matplotlib
from matplotlib.figure import Figure
from plot_learning import PICTURES, STYLE

import polyak

HEALTHY = "the preset"
COLORS = ("#303f9f", "#c2185b", "#00897b", "#ef6c00", "#757575", "#8e24aa")
LINES = ("-", "-", "--", "-.", ":", "--")
RETURN, ENTROPY = "rollout/ep_rew_mean", "train/entropy_loss"
KL, VARIANCE = "train/approx_kl", "train/explained_variance"
REWARD_FACTOR = 100.0


class Picture(NamedTuple):
    """The trainings of a picture, by label the settings that differ from the preset, and its panels: tag and scale."""

    algorithm: str
    env: str
    env_steps: int
    trainings: Mapping[str, Mapping[str, Any]]
    panels: Mapping[str, str]


SCALED = f"rewards times {REWARD_FACTOR:.0f}"
SYMPTOMS = {
    "symptoms-ppo": Picture(
        "ppo",
        "jax/CartPole-v1",
        60_000,
        {
            HEALTHY: {},
            "learning_rate=0.1 (times 100)": {"learning_rate": 0.1},
            "learning_rate=1e-5 (a hundredth)": {"learning_rate": 1e-5},
            "ent_coef=5": {"ent_coef": 5.0},
        },
        {RETURN: "linear", KL: "log", ENTROPY: "linear", VARIANCE: "linear"},
    ),
    "symptoms-rewards": Picture(
        "ppo",
        "jax/Pendulum-v1",
        150_000,
        {HEALTHY: {}, SCALED: {}, "ent_coef=0.5": {"ent_coef": 0.5}},
        {RETURN: "linear", "train/value_loss": "log", ENTROPY: "linear", VARIANCE: "linear"},
    ),
    "symptoms-dqn": Picture(
        "dqn",
        "jax/CartPole-v1",
        30_000,
        {
            HEALTHY: {},
            "learning_rate=0.1 (times 100)": {"learning_rate": 0.1},
            "target_period=1: no target copy": {"target_period": 1},
            "target_period=1_000_000: never": {"target_period": 1_000_000},
            "reward_scale=100": {"reward_scale": REWARD_FACTOR},
            "epsilon=1": {"epsilon": 1.0},
        },
        {RETURN: "linear", "train/q": "log", "train/td_error": "log", "rollout/exploration_rate": "linear"},
    ),
}


def make_scaled_pendulum() -> gymnasium.Env:
    """Pendulum whose rewards are multiplied."""
    return gymnasium.wrappers.TransformReward(gymnasium.make("Pendulum-v1"), lambda reward: REWARD_FACTOR * reward)


def train(picture: Picture, label: str) -> list[dict[str, float]]:
    """The metrics of each report of one training."""
    rows: list[dict[str, float]] = []

    def record(progress: polyak.Progress, metrics: dict[str, float], state: Any) -> None:
        rows.append({"env_steps": progress.env_steps, **metrics})

    preset = polyak.presets.preset(picture.algorithm, picture.env)
    env: Any = make_scaled_pendulum if label == SCALED else picture.env
    settings = {**preset.settings(picture.env_steps), **picture.trainings[label]}
    polyak.train.run(
        picture.algorithm,
        env,
        env_steps=picture.env_steps,
        num_envs=preset.num_envs,
        settings=settings,
        seed=0,
        callbacks=[record],
    )
    return [row | {RETURN: row[RETURN] / REWARD_FACTOR} if label == SCALED and RETURN in row else row for row in rows]


def draw(picture: Picture) -> Figure:
    """One panel for each metric, with a line for each training."""
    figure = Figure(figsize=(10.0, 6.6), layout="constrained")
    panels = figure.subplots(2, 2).flat
    curves = {label: train(picture, label) for label in picture.trainings}
    for axes, (tag, scale) in zip(panels, picture.panels.items(), strict=True):
        for (label, rows), color, line in zip(curves.items(), COLORS, LINES, strict=False):
            points = [(row["env_steps"], row[tag]) for row in rows if tag in row]
            width = 2.2 if label == HEALTHY else 1.4
            axes.plot(*zip(*points, strict=True), line, color=color, linewidth=width, label=label)
        axes.set_title(tag)
        axes.set_yscale(scale)
        axes.minorticks_off()
        if tag == VARIANCE:
            axes.set_ylim(-1.05, 1.05)
        axes.set_xlim(0, picture.env_steps)
        axes.xaxis.set_major_formatter(matplotlib.ticker.EngFormatter(sep=""))
    for axes in figure.axes[2:]:
        axes.set_xlabel("env_steps")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=2 if len(labels) == 4 else 3)
    figure.suptitle(f"polyak train {picture.algorithm} {picture.env}, one setting changed in each training")
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pictures", type=Path, default=PICTURES, help="directory that the pictures are written to")
    parser.add_argument("--only", choices=SYMPTOMS, help="draw this picture alone")
    args = parser.parse_args()
    matplotlib.rcParams.update(STYLE)
    for name in [args.only] if args.only else SYMPTOMS:
        path = args.pictures / f"{name}.svg"
        draw(SYMPTOMS[name]).savefig(path, format="svg", metadata={"Creator": "benchmarks/plot_symptoms.py"})
        print(path)


if __name__ == "__main__":
    main()
