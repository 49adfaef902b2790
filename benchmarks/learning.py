"""Learning benchmark: the mean greedy return over 100 episodes after training, and the learning curve, for each seed.

    python benchmarks/learning.py --suite cartpole [--seeds 0 1 2] [--env-steps N] [--quick] [--json PATH] [--runs DIR]
        [--at-once N] [--results docs/results.md]

Every seed is a process of its own, two at a time: `polyak train ALGO ENV --seed S`. The return comes from its `summary.json`,
the curve (`rollout/ep_rew_mean` by `env_steps` and seconds) from its `metrics.jsonl`. The report has the return of each seed,
their mean, and their interquartile mean with a 95% bootstrap interval (Agarwal et al. 2021, arXiv:2108.13264), next to the
published result. `--json benchmarks/results/SUITE.json` records the run for `plot_learning.py`, which draws the curves;
`--results` replaces the suite's line in the table of that page.
"""

import argparse
import json
import math
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import jax
import numpy as np
from harness import arguments, report, table

import polyak


@dataclass(frozen=True)
class Suite:
    """One task.

    Attributes:
        env: the environment's name.
        env_steps: training length.
        seeds: default number of seeds.
        wanted: the target for the mean greedy return over seeds; None where nothing is published.
        source: who published the target.
        recipe: `"preset"`, the default settings of `polyak train`, or the name of settings in `RECIPES`.
        algorithm: its name on the command line.
        flags: of the command line, in addition.
        published: the file in `benchmarks/published/` with somebody else's learning curve of the same task.
    """

    env: str
    env_steps: int
    seeds: int
    wanted: float | None
    source: str = "RL Zoo"
    recipe: str = "preset"
    algorithm: str = "ppo"
    flags: tuple[str, ...] = ()
    published: str | None = None


def tf_agents(env_steps: int) -> dict[str, Any]:
    """The settings of TF-Agents' `examples/ppo/schulman17`, which produced its published results."""
    network = polyak.MLP(head=polyak.PolicyAndValue(squash_mean=True, log_std=math.log(0.35), value_activation="relu"))
    return {**PUBLISHED(env_steps), "network": network, "clip_obs": 5.0, "normalize_reward": "reward"}


# `published`: the settings of most published MuJoCo results, the same for every environment.
PUBLISHED = polyak.presets.preset("ppo", "Hopper-v5").settings
RECIPES = {"published": PUBLISHED, "tf_agents": tf_agents}
MILLION = 1_000_000
SUITES = {
    "cartpole": Suite("CartPole-v1", 100_000, 10, 500.0),
    "dqn-cartpole": Suite("CartPole-v1", 50_000, 10, 500.0, algorithm="dqn"),
    "dqn-acrobot": Suite("Acrobot-v1", 100_000, 10, -76.0, "this project's", algorithm="dqn"),
    "dqn-mountaincar": Suite("MountainCar-v0", 120_000, 10, -105.0, "this project's", algorithm="dqn"),
    "dqn-lunarlander": Suite("LunarLander-v3", 300_000, 10, 200.0, "solved", algorithm="dqn"),
    "dqn-breakout": Suite("gymnax/Breakout-MinAtar", 300_000, 3, 10.0, "MinAtar's DQN", algorithm="dqn"),
    "dqn-asterix": Suite("gymnax/Asterix-MinAtar", 5 * MILLION, 3, 15.0, "MinAtar's DQN", algorithm="dqn"),
    "a2c-cartpole": Suite("jax/CartPole-v1", 500_000, 10, 500.0, algorithm="a2c"),
    "a2c-pendulum": Suite("jax/Pendulum-v1", MILLION, 10, -163.0, algorithm="a2c"),
    "impala-cartpole": Suite("jax/CartPole-v1", 500_000, 10, 475.0, "solved", algorithm="impala"),
    "impala-lag-cartpole": Suite(
        "CartPole-v1", 500_000, 10, 475.0, "solved", algorithm="impala", flags=("--workers", "4", "--lag", "8")
    ),
    "a3c-cartpole": Suite("CartPole-v1", 300_000, 10, 475.0, "solved", algorithm="a3c", flags=("--workers", "4")),
    "reinforce-cartpole": Suite("jax/CartPole-v1", 500_000, 10, 500.0, "maximum", algorithm="reinforce"),
    "dqn-jax-cartpole": Suite("jax/CartPole-v1", 50_000, 10, 500.0, "maximum", algorithm="dqn"),
    "bootstrapped-dqn-cartpole": Suite("jax/CartPole-v1", 50_000, 3, 500.0, "maximum", algorithm="bootstrapped_dqn"),
    "c51-cartpole": Suite("jax/CartPole-v1", 50_000, 10, 500.0, "maximum", algorithm="c51"),
    "qrdqn-cartpole": Suite("jax/CartPole-v1", 50_000, 10, 500.0, "maximum", algorithm="qrdqn"),
    "iqn-cartpole": Suite("jax/CartPole-v1", 50_000, 10, 500.0, "maximum", algorithm="iqn"),
    "rainbow-cartpole": Suite("jax/CartPole-v1", 50_000, 10, 500.0, "maximum", algorithm="rainbow"),
    "pqn-cartpole": Suite("jax/CartPole-v1", 300_000, 10, 500.0, "maximum", algorithm="pqn"),
    "pqn-breakout": Suite("gymnax/Breakout-MinAtar", 2 * MILLION, 3, 10.0, "MinAtar's DQN", algorithm="pqn"),
    "pqn-asterix": Suite("gymnax/Asterix-MinAtar", 5 * MILLION, 3, 15.0, "MinAtar's DQN", algorithm="pqn"),
    "pqn-spaceinvaders": Suite("gymnax/SpaceInvaders-MinAtar", 5 * MILLION, 3, None, algorithm="pqn"),
    "pqn-freeway": Suite("gymnax/Freeway-MinAtar", 5 * MILLION, 3, None, algorithm="pqn"),
    "pqn-pong": Suite(
        "ALE/Pong-v5", 1_500_000, 1, -13.6, "Dopamine's DQN", algorithm="pqn", published="dopamine-dqn-pong.json"
    ),
    "ppo-jax-pendulum": Suite("jax/Pendulum-v1", 300_000, 3, -200.0, "this project's"),
    "ddpg-pendulum": Suite("jax/Pendulum-v1", 20_000, 3, -160.0, "this project's", algorithm="ddpg"),
    "sac-pendulum": Suite("jax/Pendulum-v1", 20_000, 10, -160.0, "this project's", algorithm="sac"),
    "td3-pendulum": Suite("jax/Pendulum-v1", 20_000, 10, -160.0, "this project's", algorithm="td3"),
    "tqc-pendulum": Suite("jax/Pendulum-v1", 20_000, 10, -160.0, "this project's", algorithm="tqc"),
    "crossq-pendulum": Suite("jax/Pendulum-v1", 20_000, 3, -160.0, "this project's", algorithm="crossq"),
    "xqc-pendulum": Suite("jax/Pendulum-v1", 20_000, 3, -160.0, "this project's", algorithm="xqc"),
    "simbav2-pendulum": Suite("jax/Pendulum-v1", 20_000, 3, -160.0, "this project's", algorithm="simbav2"),
    "flash-sac-pendulum": Suite("jax/Pendulum-v1", 200_000, 3, -160.0, "this project's", algorithm="flash_sac"),
    "fast-td3-pendulum": Suite("jax/Pendulum-v1", 60_000, 3, -160.0, "this project's", algorithm="fast_td3"),
    "redq-pendulum": Suite("jax/Pendulum-v1", 5_000, 3, -160.0, "this project's", algorithm="redq"),
    "droq-pendulum": Suite("jax/Pendulum-v1", 5_000, 3, -160.0, "this project's", algorithm="droq"),
    "sr-sac-pendulum": Suite("jax/Pendulum-v1", 5_000, 3, -160.0, "this project's", algorithm="sr_sac"),
    "bro-pendulum": Suite("jax/Pendulum-v1", 5_000, 3, -160.0, "this project's", algorithm="bro"),
    "naf-pendulum": Suite("jax/Pendulum-v1", 20_000, 3, -160.0, "this project's", algorithm="naf"),
    "qt-opt-pendulum": Suite("jax/Pendulum-v1", 20_000, 3, -160.0, "this project's", algorithm="qt_opt"),
    "sac-lunarlandercontinuous": Suite("LunarLanderContinuous-v3", 300_000, 3, 250.0, "this project's", algorithm="sac"),
    "sac-bipedalwalker": Suite("BipedalWalker-v3", 500_000, 3, 298.0, algorithm="sac"),
    "sac-cartpole": Suite("jax/CartPole-v1", 50_000, 10, 475.0, "solved", algorithm="sac"),
    "sac-halfcheetah": Suite("HalfCheetah-v5", MILLION, 3, 11_300.0, "this project's", algorithm="sac"),
    "sac-walker2d": Suite("Walker2d-v5", MILLION, 3, 4500.0, "this project's", algorithm="sac"),
    "sac-ant": Suite("Ant-v5", MILLION, 3, 5500.0, "this project's", algorithm="sac"),
    "td3-halfcheetah": Suite("HalfCheetah-v5", MILLION, 3, 9700.0, "this project's", algorithm="td3"),
    "td3-hopper": Suite("Hopper-v5", MILLION, 3, 3500.0, "this project's", algorithm="td3"),
    "td3-walker2d": Suite("Walker2d-v5", MILLION, 3, 4700.0, "this project's", algorithm="td3"),
    "td3-ant": Suite("Ant-v5", MILLION, 3, 5813.0, algorithm="td3"),
    "tqc-halfcheetah": Suite("HalfCheetah-v5", MILLION, 3, 12_000.0, "this project's", algorithm="tqc"),
    "pendulum": Suite("Pendulum-v1", 300_000, 10, -200.0, "this project's"),
    "acrobot": Suite("Acrobot-v1", MILLION, 10, -73.5),
    "mountaincar": Suite("MountainCar-v0", MILLION, 10, -110.0),
    "lunarlander": Suite("LunarLander-v3", MILLION, 3, 242.0),
    "lunarlandercontinuous": Suite("LunarLanderContinuous-v3", MILLION, 10, 271.0),
    "bipedalwalker": Suite("BipedalWalker-v3", 5 * MILLION, 3, 288.0),
    "invertedpendulum": Suite("InvertedPendulum-v5", MILLION, 3, 1000.0, "maximum"),
    "inverteddoublependulum": Suite("InvertedDoublePendulum-v5", MILLION, 10, 9353.0, "TF-Agents", algorithm="ppo_kl"),
    "swimmer": Suite("Swimmer-v5", MILLION, 3, 282.0),
    "ant": Suite("Ant-v5", MILLION, 3, 1327.0),
    "pusher": Suite("Pusher-v5", MILLION, 3, None),
    "reacher": Suite("Reacher-v5", MILLION, 3, -7.7, "TF-Agents"),
    "halfcheetah": Suite("HalfCheetah-v5", MILLION, 10, 5819.0),
    "hopper": Suite("Hopper-v5", MILLION, 3, 2410.0),
    "walker2d": Suite("Walker2d-v5", MILLION, 3, 3479.0),
    "halfcheetah-published": Suite("HalfCheetah-v5", MILLION, 3, 4239.0, "TF-Agents", "published"),
    "halfcheetah-tf-agents": Suite("HalfCheetah-v5", MILLION, 3, 4239.0, "TF-Agents", "tf_agents"),
    "walker2d-published": Suite("Walker2d-v5", MILLION, 3, 2971.0, "TF-Agents", "published"),
}
PUBLISHED_CURVES = Path(__file__).parent / "published"
EPISODES = 100
RETURN = "rollout/ep_rew_mean"
SECONDS = "time/time_elapsed"
HEADER = [
    "algorithm",
    "environment",
    "mean return",
    "IQM (95% interval)",
    "target",
    "reached",
    "seeds",
    "env_steps",
    "env_steps/s",
    "`--suite`",
]


def train(name: str, seed: int, env_steps: int, episodes: int, runs: Path) -> dict[str, Any]:
    """Train one seed and return its summary, with the learning curve; a finished run is read, not repeated."""
    suite, run = SUITES[name], runs / f"{name}-{seed}"
    if (run / "summary.json").exists():
        return summary_of(run, env_steps)
    flags = {"--env-steps": env_steps, "--seed": seed, "--run-dir": run, "--eval-episodes": episodes}
    command: list[Any] = [Path(sys.executable).with_name("polyak"), "train", suite.algorithm, suite.env, *suite.flags]
    if suite.recipe != "preset":
        command = [sys.executable, Path(__file__).resolve(), "--recipe", suite.recipe, "--env", suite.env]
    words = [str(word) for word in (*command, *(word for flag in flags.items() for word in flag))]
    process = subprocess.run(words, capture_output=True, text=True)
    if process.returncode:
        output = "\n".join((process.stdout + process.stderr).strip().splitlines()[-15:])
        raise SystemExit(f"{' '.join(words)} failed with exit code {process.returncode}:\n{output}")
    summary = summary_of(run, env_steps)
    print(f"{suite.env} seed {seed}: {summary['eval_mean_return']:.1f}", file=sys.stderr, flush=True)
    return summary


def summary_of(run: Path, env_steps: int) -> dict[str, Any]:
    summary: dict[str, Any] = json.loads((run / "summary.json").read_text())
    if summary["env_steps"] < env_steps:
        raise SystemExit(f"{run} ended after {summary['env_steps']:,} of {env_steps:,} env steps")
    return {**summary, "curve": learning_curve(run / "metrics.jsonl")}


def learning_curve(metrics: Path) -> dict[str, list[float]]:
    """The training return (`rollout/ep_rew_mean`) by `env_steps`, and by seconds without compilation, of a `metrics.jsonl`."""
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    rows = [row for row in rows if row.get(RETURN) is not None]
    curve = {"env_steps": [row["env_steps"] for row in rows], "ep_rew_mean": [round(row[RETURN], 3) for row in rows]}
    return curve | {"seconds": [round(row[SECONDS], 3) for row in rows if SECONDS in row]}


def iqm(values: Sequence[float]) -> float:
    """The mean of the middle half; a value on the border counts with the fraction of it that lies inside."""
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
    if args.recipe:
        train_by_recipe(args.recipe, args.env, args.env_steps, args.seed, args.eval_episodes, args.run_dir)
        return
    suite = SUITES[args.suite]
    env_steps, episodes, seeds = args.env_steps or suite.env_steps, EPISODES, args.seeds or list(range(suite.seeds))
    if args.results and (args.quick or env_steps != suite.env_steps):
        raise SystemExit(f"--results needs runs of the suite's length, {suite.env_steps:,} env steps")
    if args.quick:
        env_steps, episodes, seeds = 4_096, 4, seeds[:2]
    with tempfile.TemporaryDirectory() as scratch, ThreadPoolExecutor(args.at_once) as pool:
        runs = args.runs or Path(scratch)
        summaries = list(pool.map(lambda seed: train(args.suite, seed, env_steps, episodes, runs), seeds))
    returns = [float(summary["eval_mean_return"]) for summary in summaries]
    mean, (low, high) = float(np.mean(returns)), interval(returns)
    row = table_row(args.suite, returns, env_steps, [summary["fps"] for summary in summaries])
    reached = None if suite.wanted is None else has_reached(mean, suite.wanted)
    figures = {"returns": returns, "mean": mean, "iqm": iqm(returns), "interval": [low, high], "wanted": suite.wanted}
    result = {"benchmark": "learning", "suite": args.suite, "env": suite.env, "quick": args.quick, "seeds": seeds}
    result |= {"env_steps": env_steps, "source": suite.source, "versions": {name: version(name) for name in ("polyak", "jax")}}
    if suite.published:
        result["published"] = json.loads((PUBLISHED_CURVES / suite.published).read_text())
    report(table(HEADER, [row]), {**result, **figures, "reached": reached, "summaries": summaries}, args.json)
    if args.results:
        put_line(args.results, row)
    if reached is False and not args.quick and env_steps >= suite.env_steps:
        raise SystemExit(f"{suite.env}: the mean over {len(seeds)} seeds is {mean:.1f}, wanted {suite.wanted:g}")


def table_row(name: str, returns: Sequence[float], env_steps: int, speeds: Sequence[float]) -> list[str]:
    """A suite's line in the table. Its target is for the mean of all its seeds: with fewer it is neither reached nor missed."""
    suite = SUITES[name]
    mean, (low, high) = float(np.mean(returns)), interval(returns)
    of = f" of {suite.seeds}" if len(returns) < suite.seeds else ""
    source = "" if suite.source == "this project's" else f" ({suite.source})"
    reached = "" if suite.wanted is None else "open" if of else "yes" if has_reached(mean, suite.wanted) else "no"
    return [
        f"`{suite.algorithm}`",
        suite.env,
        f"{mean:.1f}",
        f"{iqm(returns):.1f}" + (f" ({low:.1f}, {high:.1f})" if len(returns) > 2 else ""),
        "" if suite.wanted is None else f"{suite.wanted:g}{source}",
        reached,
        f"{len(returns)}{of}",
        f"{env_steps:,}",
        f"{np.median(speeds):,.0f}",
        f"`{name}`",
    ]


def has_reached(mean: float, wanted: float) -> bool:
    """As precisely as the table shows the mean: nine seeds at a maximum of 500 and one at 499.9 have reached it."""
    return round(mean, 1) >= wanted


def train_by_recipe(recipe: str, env_id: str, env_steps: int, seed: int, episodes: int, run_dir: Path) -> None:
    """Train with settings that are not the preset's, and write the summary and metrics that `polyak train` would write."""
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    run_dir.mkdir(parents=True)
    rows: list[dict[str, float]] = []

    def record(progress: polyak.Progress, metrics: Mapping[str, float], state: Any) -> None:
        if RETURN in metrics:
            rows.append({"env_steps": progress.env_steps, RETURN: float(metrics[RETURN])})

    env = polyak.envs.make(env_id, num_envs=1)
    agent = polyak.PPO(spec=env.spec, **RECIPES[recipe](env_steps))
    result = polyak.train.run(agent, env, env_steps=env_steps, key=jax.random.key(seed), callbacks=[record])
    evaluation = polyak.train.evaluate(agent.policy(result.state), env, episodes=episodes, key=jax.random.key(seed + 1_000))
    env.close()
    figures = {"eval_mean_return": evaluation.mean_return, "eval_std_return": evaluation.std_return}
    summary = {"env": env_id, "recipe": recipe, "seed": seed, "env_steps": env_steps, "fps": result.progress.fps, **figures}
    (run_dir / "metrics.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    (run_dir / "summary.json").write_text(json.dumps(summary))


def put_line(page: Path, row: Sequence[str]) -> None:
    """Replace the suite's line in the page's table, or add one after those of its algorithm, or of all."""
    line, lines = f"| {' | '.join(row)} |", page.read_text().splitlines()
    table_lines = [i for i, text in enumerate(lines) if text.startswith("|") and text.count("|") == len(row) + 1]
    same = [i for i in table_lines if lines[i].endswith(f"| {row[-1]} |")]
    if same:
        lines[same[0]] = line
    else:
        of_algorithm = [i for i in table_lines if lines[i].startswith(f"| {row[0]} |")]
        lines.insert(max(of_algorithm or table_lines) + 1, line)
    aside = page.with_suffix(".aside")
    aside.write_text("\n".join(lines) + "\n")
    aside.replace(page)


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--suite", choices=list(SUITES), default="cartpole", help="the task")
    parser.add_argument("--seeds", type=int, nargs="+", help="default: 0, 1, ...")
    parser.add_argument("--env-steps", type=int, help="training length; default: the suite's")
    parser.add_argument("--runs", type=Path, metavar="DIR", help="keep the run directories here; finished runs are reused")
    parser.add_argument("--at-once", type=int, default=2, help="number of seeds trained in parallel")
    parser.add_argument("--results", type=Path, metavar="PAGE", help="replace the suite's line in this page's table")
    worker = parser.add_argument_group("one run by a recipe (internal: the benchmark starts itself with these)")
    worker.add_argument("--recipe", choices=list(RECIPES))
    worker.add_argument("--env")
    worker.add_argument("--seed", type=int)
    worker.add_argument("--eval-episodes", type=int)
    worker.add_argument("--run-dir", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
