"""Agents that learn from data, beside d3rlpy on the same files: data sets, returns, and gradient steps per second.

    python benchmarks/offline.py make DIRECTORY [--envs Pendulum-v1 ...]       # SAC, until a third of its final score
    python benchmarks/offline.py scores DIRECTORY --steps 10000 [--data Pendulum-v1-medium ...] [--agents bc iql ...]
        [--checkpoints 5 --every 2000] [--first-seed 0 --seeds 3]
    python benchmarks/offline.py speed DIRECTORY [--data ...] [--agents ...]

The data sets of an environment are `medium`, transitions of the policy that SAC explores with at that score; `medium-replay`,
its replay up to there; in Pendulum `expert`, of SAC after training. Both have batches of `--batch`, layers of (256, 256)
and one thread. Each learns with the seeds 0, 1 and 2, and its greedy policy acts in the same 20 episodes, after training or at
the last checkpoints, over which the score is the mean. BC minimizes squared errors in both.
"""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from harness import Pace, arguments, few_threads, median, ratios, report, spread, table, take_turns, times, verdict
from peers import python_of

HIDDEN, GAMMA, TAU = (256, 256), 0.99, 0.005
EPISODES, SEEDS = 20, 3
LEARNING_RATES = {"bc": 1e-3, "td3_bc": 3e-4, "iql": 3e-4, "cql": 3e-4, "fql": 3e-4}
CONSERVATIVE_WEIGHT = 5.0
TARGET = 3.0
"""Of polyak's gradient steps per second, as a multiple of d3rlpy's."""


@dataclass(frozen=True)
class Task:
    """An environment, and the data sets that are made in it.

    Attributes:
        score: a third of the final score of SAC; of Pendulum, a third of the way from a random policy's.
        env_steps: steps of SAC, of which it takes as many as it needs for the score.
        eval_every: steps between its evaluations.
        transitions: size of the data set that the policy with that score collects.
        has_expert: whether there is a data set of the policy after `env_steps` too.
        num_envs: environments of SAC; with one it has its preset, with several the settings of `SEVERAL_ENVS`.
    """

    score: float
    env_steps: int
    eval_every: int
    transitions: int
    has_expert: bool = False
    num_envs: int = 1


TASKS = {
    "Pendulum-v1": Task(-850, 20_000, 250, 20_000, has_expert=True),
    "Hopper-v5": Task(1_100, 300_000, 5_000, 100_000),
    "HalfCheetah-v5": Task(3_800, 300_000, 5_000, 100_000, num_envs=8),
}
# Half as many gradient steps as the presets, on half as many transitions.
SEVERAL_ENVS = {"updates_per_step": 0.5, "batch_size": 128, "learning_rate": 6e-4, "tau": 0.01, "learning_starts": 5_000}


def make(env: str, directory: Path) -> None:
    """Write the data sets of one environment."""
    import polyak

    medium = train_sac(env, directory / f"{env}-medium", TASKS[env].score)
    data = {"medium": collect(medium, env), "medium-replay": polyak.data.load(directory / f"{env}-medium")}
    if TASKS[env].has_expert:
        data["expert"] = collect(train_sac(env, directory / f"{env}-expert", None), env)
    for name, data_set in data.items():
        polyak.data.save(data_set, directory / f"{env}-{name}.npz")
        print(f"{env} {name}: {data_set}", flush=True)


def train_sac(env: str, run_dir: Path, score: float | None) -> Any:
    """SAC's result after the first evaluation with that score, or after all steps."""
    import polyak

    task, reached = TASKS[env], []

    def note(progress: Any, metrics: Any, state: Any) -> None:
        value = metrics.get("eval/mean_reward")
        if score is not None and value is not None and value >= score:
            reached.append(value)

    return polyak.train.run(
        "sac",
        env,
        env_steps=task.env_steps,
        settings=None if task.num_envs == 1 else SEVERAL_ENVS | {"critics": polyak.Critics(norm="layer")},
        num_envs=task.num_envs,
        seed=0,
        run_dir=run_dir,
        eval_every=task.eval_every,
        eval_episodes=10,
        callbacks=[note],
        should_stop=lambda: bool(reached),
    )


def collect(result: Any, env: str) -> Any:
    """Transitions of the policy that SAC explores with."""
    import jax

    import polyak

    made = polyak.envs.make(env, num_envs=4, action_scaling="rescale")
    policy = result.agent.collect_policy(result.state)
    return polyak.data.collect(policy, made, TASKS[env].transitions, key=jax.random.key(1))


def mean_return(predict: Callable[[Any], Any], env: str) -> float:
    """The mean return of a policy for one observation, in the same episodes for all."""
    import gymnasium
    import numpy as np

    made, returns = gymnasium.make(env), []
    for seed in range(EPISODES):
        obs, _ = made.reset(seed=seed)
        total, ended = 0.0, False
        while not ended:
            obs, reward, terminated, truncated, _ = made.step(predict(np.asarray(obs, np.float32)))
            total, ended = total + float(reward), terminated or truncated
        returns.append(total)
    return fmean(returns)


def polyak_settings(agent: str, batch: int) -> dict[str, Any]:
    import polyak

    settings: dict[str, Any] = {"batch_size": batch, "learning_rate": LEARNING_RATES[agent]}
    if agent == "bc":
        # Squared errors of means that are squashed by tanh, as in d3rlpy.
        return settings | {"network": polyak.Actor(HIDDEN, std="fixed", squash_mean=True)}
    settings |= {"gamma": GAMMA, "tau": TAU}
    if agent == "td3_bc":
        settings |= {"normalize_obs": True}
    if agent == "cql":
        # The squared errors of polyak have a half, as in the authors' code.
        settings |= {"cql_weight": CONSERVATIVE_WEIGHT / 2, "actor_learning_rate": 1e-4, "alpha_learning_rate": 1e-4}
    if agent == "fql":
        settings |= {"normalize_q": True, "distill_weight": 1.0, "critics": polyak.Critics(HIDDEN, norm="layer")}
        settings |= {"actor": polyak.Actor(HIDDEN, std="fixed")}
    return settings


def train_polyak(agent: str, path: Path, steps: int, seed: int, batch: int, callback: Any, every: int) -> Any:
    import polyak

    return polyak.train.offline(
        agent,
        polyak.data.load(path),
        gradient_steps=steps,
        settings=polyak_settings(agent, batch),
        seed=seed,
        progress=False,
        callbacks=[callback],
        report_every=every,
        checkpoint_every=10**9,
    )


def d3rlpy_config(agent: str, batch: int, low: Any, high: Any) -> Any:
    from d3rlpy import algos, models, preprocessing

    encoder = models.VectorEncoderFactory(hidden_units=list(HIDDEN), activation="relu")
    shared: dict[str, Any] = {"batch_size": batch, "action_scaler": preprocessing.MinMaxActionScaler(low, high)}
    rate = LEARNING_RATES[agent]
    if agent == "bc":
        return algos.BCConfig(learning_rate=rate, encoder_factory=encoder, **shared)
    shared |= {"gamma": GAMMA, "tau": TAU, "actor_encoder_factory": encoder, "critic_encoder_factory": encoder}
    shared |= {"critic_learning_rate": rate, "actor_learning_rate": 1e-4 if agent == "cql" else rate}
    if agent == "td3_bc":
        return algos.TD3PlusBCConfig(observation_scaler=preprocessing.StandardObservationScaler(), **shared)
    if agent == "iql":
        return algos.IQLConfig(value_encoder_factory=encoder, **shared)
    return algos.CQLConfig(alpha_learning_rate=0.0, conservative_weight=CONSERVATIVE_WEIGHT, **shared)


def train_d3rlpy(agent: str, path: Path, steps: int, seed: int, batch: int, env: str, callback: Any) -> None:
    import d3rlpy
    import gymnasium
    import numpy as np
    import torch
    from d3rlpy.logging import NoopAdapterFactory

    torch.set_num_threads(1)
    d3rlpy.seed(seed)
    arrays, space = np.load(path), gymnasium.make(env).action_space
    data = d3rlpy.dataset.MDPDataset(
        arrays["observations"].astype(np.float32),
        arrays["actions"].astype(np.float32),
        arrays["rewards"].astype(np.float32),
        arrays["terminations"].astype(np.float32),
        arrays["truncations"].astype(np.float32),
        action_space=d3rlpy.ActionSpace.CONTINUOUS,
    )
    algo = d3rlpy_config(agent, batch, space.low, space.high).create(device="cpu:0")
    # With short epochs, whose means of all losses it takes again every ten steps.
    options = {"n_steps_per_epoch": 1_000, "show_progress": False, "logger_adapter": NoopAdapterFactory()}
    algo.fit(data, n_steps=steps, save_interval=10**9, callback=callback, **options)


def score_polyak(args: argparse.Namespace, path: Path, seed: int, env: str) -> list[float]:
    """The returns of the last checkpoints of a seed."""
    states: list[Any] = []

    def keep(progress: Any, metrics: Any, state: Any) -> None:
        states.append(state.agent)

    result = train_polyak(args.agents[0], path, args.steps, seed, args.batch, keep, args.every)
    policies = [result.agent.policy(state) for state in states[-args.checkpoints :]]
    return [mean_return(lambda obs, policy=policy: policy.predict(obs)[0], env) for policy in policies]


def score_d3rlpy(args: argparse.Namespace, path: Path, seed: int, env: str) -> list[float]:
    """The returns of the last checkpoints of a seed."""
    returns: list[float] = []
    steps = range(args.steps, 0, -args.every)[: args.checkpoints]

    def note(algo: Any, epoch: int, step: int) -> None:
        if step in steps:
            returns.append(mean_return(lambda obs: algo.predict(obs[None])[0], env))

    train_d3rlpy(args.agents[0], path, args.steps, seed, args.batch, env, note)
    return returns


def work(args: argparse.Namespace) -> None:
    """A contestant's scores, as JSON in the last line; or its gradient steps in turns."""
    few_threads(1)
    path, is_polyak, env = args.directory / f"{args.data[0]}.npz", args.worker == "polyak", env_of(args.data[0])
    agent = args.agents[0]
    if is_polyak:
        import jax

        jax.config.update("jax_cpu_enable_async_dispatch", False)
    if args.command == "scores":
        for seed in range(args.first_seed, args.first_seed + args.seeds):
            returns = (score_polyak if is_polyak else score_d3rlpy)(args, path, seed, env)
            print(json.dumps({"seed": seed, "returns": returns}), flush=True)
        return
    pace = Pace()
    if is_polyak:
        train_polyak(agent, path, 10**9, 0, args.batch, lambda progress, *_: pace.lap(progress.env_steps), args.steps)
    else:
        lap = lambda algo, epoch, step: pace.lap(step) if step % args.steps == 0 else None  # noqa: E731
        train_d3rlpy(agent, path, 10**9, 0, args.batch, env, lap)


def env_of(data: str) -> str:
    return next(env for env in TASKS if data.startswith(env))


def command(worker: str, args: argparse.Namespace, data: str, agent: str, steps: int) -> list[str | Path]:
    python = sys.executable if worker == "polyak" else python_of("d3rlpy")
    words = ["--data", data, "--agents", agent, "--worker", worker]
    words += ["--steps", str(steps), "--seeds", str(args.seeds), "--batch", str(args.batch)]
    words += ["--first-seed", str(args.first_seed), "--checkpoints", str(args.checkpoints), "--every", str(args.every)]
    return [python, Path(__file__).resolve(), args.command, args.directory.resolve(), *words]


def contestants(agent: str) -> list[str]:
    return ["polyak"] if agent == "fql" else ["polyak", "d3rlpy"]


def scores(args: argparse.Namespace, data: str, agent: str) -> dict[str, Any]:
    """The returns of each contestant by seed and checkpoint."""
    returns: dict[str, Any] = {}
    for name in contestants(agent):
        words = command(name, args, data, agent, args.steps)
        env = {key: value for key, value in os.environ.items() if name == "polyak" or key != "PYTHONPATH"}
        done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True, env=env)
        lines = [line for line in done.stdout.splitlines() if line.startswith('{"seed"')]
        returns[name] = [json.loads(line)["returns"] for line in lines]
    return returns


def speed(args: argparse.Namespace, data: str, agent: str) -> dict[str, Any]:
    """Gradient steps per second of each contestant, in turns."""
    words = {name: command(name, args, data, agent, args.steps) for name in contestants(agent)}
    return take_turns(words, args.rounds)[0]


def row(args: argparse.Namespace, data: str, agent: str, measured: dict[str, Any]) -> list[str]:
    has_peer = "d3rlpy" in measured
    if args.command == "scores":
        import numpy as np

        arrays = np.load(args.directory / f"{data}.npz")
        last = np.flatnonzero(arrays["terminations"] | arrays["truncations"])
        own = fmean(x.sum() for x in np.split(arrays["rewards"].astype(np.float64), last[:-1] + 1))
        means = [[fmean(returns) for returns in seeds] for seeds in measured.values()]
        cells = [f"{fmean(x):.0f} ({', '.join(f'{y:.0f}' for y in x)})" for x in means]
        return [data, f"{own:.0f}", agent, *cells, *([] if has_peer else [""])]
    cells = [spread(x, lambda rate: f"{rate:.0f}") for x in measured.values()]
    if not has_peer:
        return [data, agent, *cells, "", "", ""]
    ratio = ratios(measured, "polyak", "d3rlpy")
    return [data, agent, *cells, spread(ratio, times), verdict(median(ratio), TARGET)]


def main() -> None:
    args = parse_arguments()
    if args.worker:
        work(args)
        return
    names = [path.stem for path in sorted(args.directory.glob("*.npz"))] if args.data is None else args.data
    if args.command == "make":
        for env in args.envs:
            make(env, args.directory)
        return
    rows, results = [], []
    header = ["data", "agent", "polyak", "d3rlpy", "times", "target"]
    if args.command == "scores":
        header = ["data", "its return", "agent", "polyak", "d3rlpy"]
    for data in names:
        for agent in args.agents:
            measured = (scores if args.command == "scores" else speed)(args, data, agent)
            rows.append(row(args, data, agent, measured))
            results.append({"data": data, "agent": agent, "steps": args.steps, "batch": args.batch, **measured})
            print(table(header, rows), flush=True)
    report(table(header, rows), {"benchmark": f"offline {args.command}", "results": results}, args.json)


def parse_arguments() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("command", choices=["make", "scores", "speed"])
    parser.add_argument("directory", type=Path, help="where the data sets are")
    parser.add_argument("--envs", nargs="+", choices=list(TASKS), default=list(TASKS), help="what is made")
    parser.add_argument("--data", nargs="+", help="data sets, such as Hopper-v5-medium; default: all")
    parser.add_argument("--agents", nargs="+", choices=list(LEARNING_RATES), default=["bc", "td3_bc", "iql", "fql"])
    parser.add_argument("--steps", type=int, help="gradient steps, of a turn or of a training")
    parser.add_argument("--batch", type=int, default=256, help="transitions of a gradient step")
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--checkpoints", type=int, default=1, help="a score is the mean over the last of them")
    parser.add_argument("--every", type=int, default=2_000, help="gradient steps between checkpoints")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each")
    parser.add_argument("--worker", help="(what the benchmark starts itself with)")
    args = parser.parse_args()
    default = 1_000 if args.command == "scores" and args.quick else 10_000 if args.command == "scores" else 200
    args.steps = default if args.steps is None else args.steps
    args.rounds = 2 if args.quick else args.rounds
    if args.checkpoints > 1 and (args.steps % args.every or args.steps < args.checkpoints * args.every):
        parser.error("--every must divide --steps, and --checkpoints must be at most their ratio")
    return args


if __name__ == "__main__":
    main()
