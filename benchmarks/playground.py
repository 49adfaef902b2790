"""Env steps per second, compile time, memory and return of polyak's PPO and of Brax' PPO in MuJoCo Playground, same settings.

    python benchmarks/playground.py [--quick] [--json PATH] [--env CartpoleBalance CheetahRun] [--learn 200000 --seeds 3]

It needs `pip install '.[playground]'`, and runs both with the same interpreter. The settings are Playground's for the DM
Control suite with 64 environments instead of 2,048: unrolls of 30 steps, 8 minibatches of 32 unrolls, 16 epochs, γ 0.995, λ
0.95, learning rate 1e-3, entropy bonus 0.01, clipping 0.3, normalized observations, an actor of (32,) * 4 and a critic of
(256,) * 5, both silu, and a tanh-normal policy whose standard deviation is an output. polyak's physics is MJX too
(`impl="jax"`). Three things differ: Brax multiplies rewards by 10, polyak divides them by the standard deviation of the
return; Brax computes advantages in each minibatch anew, and within each unroll; and its episodes all begin in an environment's
first state. Brax 0.14.2 needs a function that JAX 0.10 no longer has, and gets it.

Each goes on training while it is measured, without evaluation. polyak counts valid transitions only. Compile time is the
processor time until the second report, without that of its steps. Each library runs on one host device and on two; the ratios
are to the faster Brax. Then, with `--learn`, both train that many env steps from fresh seeds on one device, in turns; ten times
their greedy policies play 64 episodes. The seconds to a return of 900 count compiling, and no evaluation.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from harness import Pace, arguments, few_threads, median, ratios, report, spread, steps, table, take_turns, times, verdict

NUM_ENVS, UNROLL, BATCH, MINIBATCHES, EPOCHS = 64, 30, 32, 8, 16
ROLLOUT = BATCH * MINIBATCHES * UNROLL
EPISODES, EVALUATIONS = 64, 10
SOLVED = 900.0
LOG_STD = -0.365  # Brax' standard deviation begins at softplus(0) + 0.001.
LAPS = 10_000
TARGET = 1.3
Curve = list[tuple[int, float, float]]
ENVS = ("CartpoleBalance", "CheetahRun")
CONTESTANTS = {
    "Brax, 1 device": ("brax", 1),
    "Brax, 2 devices": ("brax", 2),
    "polyak, 1 device": ("polyak", 1),
    "polyak, 2 devices": ("polyak", 2),
}


def polyak_agent(spec: Any) -> Any:
    import polyak

    head = polyak.PolicyAndValue(std="state", log_std=LOG_STD, value_hidden=(256,) * 5)
    return polyak.PPO(
        spec=spec,
        network=polyak.MLP((32,) * 4, activation="silu", head=head),
        num_steps=ROLLOUT // NUM_ENVS,
        num_epochs=EPOCHS,
        num_minibatches=MINIBATCHES,
        gamma=0.995,
        gae_lambda=0.95,
        learning_rate=1e-3,
        adam_eps=1e-8,
        max_grad_norm=None,
        ent_coef=0.01,
        vf_coef=0.5,
        clip_range=0.3,
        normalize_obs=True,
        normalize_reward="return",
        squash=True,
    )


def polyak_env(name: str) -> Any:
    import polyak

    return polyak.envs.make(f"playground/{name}", num_envs=NUM_ENVS, action_scaling="rescale")


def brax_train(name: str, **settings: Any) -> Any:
    import jax
    import jax.numpy as jnp
    import numpy as np
    from brax.training.agents.ppo.train import train
    from jax.sharding import Mesh, NamedSharding, PartitionSpec
    from mujoco_playground import registry, wrapper

    def replicate(tree: Any, devices: Any) -> Any:
        sharding = NamedSharding(Mesh(np.array(devices), ("devices",)), PartitionSpec("devices"))
        return jax.tree.map(lambda x: jax.device_put(jnp.stack([x] * len(devices)), sharding), tree)

    # Brax 0.14.2 calls a function that JAX 0.10 no longer has; this is the replacement that JAX names.
    jax.device_put_replicated = replicate
    return train(
        environment=registry.load(name, config_overrides={"impl": "jax"}),
        wrap_env_fn=wrapper.wrap_for_brax_training,
        episode_length=1000,
        num_envs=NUM_ENVS,
        unroll_length=UNROLL,
        batch_size=BATCH,
        num_minibatches=MINIBATCHES,
        num_updates_per_batch=EPOCHS,
        discounting=0.995,
        gae_lambda=0.95,
        learning_rate=1e-3,
        entropy_cost=0.01,
        clipping_epsilon=0.3,
        reward_scaling=10.0,
        normalize_observations=True,
        **settings,
    )


def set_devices(devices: int) -> None:
    """So many host devices for JAX, each with one thread where there are several, as `polyak train` does."""
    if devices > 1:
        few_threads(devices)
    import jax

    jax.config.update("jax_num_cpu_devices", devices)


def brax_worker(name: str, rollouts: int, devices: int) -> None:
    set_devices(devices)
    import brax

    first = FirstReport(Pace(brax=brax.__version__))
    brax_train(
        name,
        num_timesteps=LAPS * rollouts * ROLLOUT,
        num_evals=LAPS + 1,
        run_evals=False,
        progress_fn=lambda env_steps, metrics: first.lap(env_steps),
    )


def polyak_worker(name: str, rollouts: int, devices: int) -> None:
    set_devices(devices)
    import jax

    import polyak

    first = FirstReport(Pace(polyak=polyak.__version__, jax=jax.__version__))
    env = polyak_env(name)
    polyak.loops.compiled(
        polyak_agent(env.spec),
        env,
        env_steps=LAPS * rollouts * ROLLOUT,
        key=jax.random.key(0),
        report_every=rollouts * ROLLOUT,
        devices=devices,
        callbacks=[lambda progress, metrics, state: first.lap(progress.env_steps)],
    )


class FirstReport:
    """Laps from the third report on; the first three say how long compiling took, in processor time, which load leaves alone.

    Brax compiles its program a second time between the first report and the second.
    """

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self._times = [time.process_time()]

    def lap(self, env_steps: int) -> None:
        """Report; the pace begins with the third report."""
        if len(self._times) < 4:
            self._times.append(time.process_time())
        if len(self._times) == 4:
            start, _, second, third = self._times
            self._pace.about["compile_seconds"] = (second - start) - 2 * (third - second)
            self._pace.lap(env_steps)


def brax_learning(name: str, env_steps: int, seed: int) -> Curve:
    curve: Curve = []

    def record(env_steps: int, metrics: Any) -> None:
        # The first evaluation is of the initial policy.
        if env_steps:
            curve.append((env_steps, float(metrics["training/walltime"]), float(metrics["eval/episode_reward"])))

    brax_train(
        name,
        num_timesteps=env_steps,
        num_evals=EVALUATIONS + 1,
        num_eval_envs=EPISODES,
        deterministic_eval=True,
        seed=seed,
        progress_fn=record,
    )
    return curve


def polyak_learning(name: str, env_steps: int, seed: int) -> Curve:
    import jax

    import polyak

    env = polyak_env(name)
    agent = polyak_agent(env.spec)
    curve: Curve = []
    evaluating = 0.0

    def record(progress: Any, metrics: Any, state: Any) -> None:
        nonlocal evaluating
        now = time.perf_counter()
        evaluation = polyak.train.evaluate(agent.policy(state.agent), env, episodes=EPISODES, key=jax.random.key(99))
        curve.append((progress.env_steps, now - start - evaluating, float(evaluation.mean_return)))
        evaluating += time.perf_counter() - now

    start = time.perf_counter()
    polyak.loops.compiled(
        agent,
        env,
        env_steps=env_steps,
        key=jax.random.key(seed),
        report_every=-(-env_steps // EVALUATIONS),
        callbacks=[record],
    )
    return curve


def seconds_to_solve(curve: Curve) -> float:
    """Seconds of training until the first evaluation with a return of `SOLVED`; infinity if there is none."""
    return next((seconds for _, seconds, value in curve if value >= SOLVED), math.inf)


def main() -> None:
    args = parsed()
    if args.worker:
        work(args)
        return
    names, rounds, rollouts = (ENVS[:1], 1, 1) if args.quick else (args.env, args.rounds, args.rollouts)
    # Compiling is measured.
    os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
    measured = {name: compare(name, rounds, rollouts, args.learn, args.seeds) for name in names}
    header = ["environment", "contestant", "env steps/s", "times Brax", "target", "compile", "peak memory", "return", "to 900"]
    rows = [row for name in names for row in rows_of(name, measured[name])]
    report(table(header, rows), {"benchmark": "playground", "quick": args.quick, "by_env": measured}, args.json)


def compare(name: str, rounds: int, rollouts: int, learn: int, seeds: int) -> dict[str, Any]:
    """All figures for one environment."""
    me = Path(__file__).resolve()

    def command(worker: str, *more: object) -> list[str | Path]:
        return [sys.executable, me, "--env", name, "--worker", worker, *map(str, more)]

    commands = {
        contestant: command(worker, "--rollouts", rollouts, "--devices", devices)
        for contestant, (worker, devices) in CONTESTANTS.items()
    }
    rates, about = take_turns(commands, rounds, one_by_one=True)
    learning: dict[str, list[Curve]] = {"brax": [], "polyak": []}
    for seed in range(seeds if learn else 0):
        for library, curves in learning.items():
            line = command(f"{library}-learning", "--learn", learn, "--seed", seed)
            said = subprocess.run(line, stdout=subprocess.PIPE, check=True, text=True).stdout
            curves.append(json.loads(said.splitlines()[-1]))
    best = {library: fastest(rates, library) for library in learning}
    versus = {contestant: ratios(rates, contestant, best["brax"]) for contestant in rates}
    return {"rates": rates, "ratios": versus, "best": best, "learning": learning, "env_steps": learn, "about": about}


def fastest(rates: dict[str, list[float]], library: str) -> str:
    """The fastest contestant of a library."""
    return max((name for name, (worker, _) in CONTESTANTS.items() if worker == library), key=lambda name: median(rates[name]))


def rows_of(name: str, measured: dict[str, Any]) -> list[list[str]]:
    """The table's lines for one environment."""
    rows = []
    for contestant, (library, devices) in CONTESTANTS.items():
        about, ratio = measured["about"][contestant], measured["ratios"][contestant]
        curves = measured["learning"][library] if devices == 1 else []
        rows.append([
            name,
            contestant,
            spread(measured["rates"][contestant], steps),
            "1" if contestant == measured["best"]["brax"] else spread(ratio, times),
            verdict(median(ratio), TARGET) if contestant == measured["best"]["polyak"] else "",
            f"{about['compile_seconds']:.0f} s",
            f"{about['peak_mb']:.0f} MB",
            f"{spread([curve[-1][2] for curve in curves], '{:.0f}'.format)} after {measured['env_steps']:,}" if curves else "",
            spread([seconds_to_solve(curve) for curve in curves], "{:.0f} s".format) if curves else "",
        ])  # fmt: skip
    return rows


def work(args: argparse.Namespace) -> None:
    """One contestant's share."""
    (name,) = args.env
    match args.worker:
        case "polyak":
            polyak_worker(name, args.rollouts, args.devices)
        case "brax":
            brax_worker(name, args.rollouts, args.devices)
        case "polyak-learning":
            print(json.dumps(polyak_learning(name, args.learn, args.seed)))
        case "brax-learning":
            print(json.dumps(brax_learning(name, args.learn, args.seed)))


def parsed() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--env", nargs="+", choices=ENVS, default=list(ENVS), help="environments to measure")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each")
    parser.add_argument("--rollouts", type=int, default=1, help="rollouts a measurement")
    parser.add_argument("--learn", type=int, default=0, help="env steps of the comparison of learning; 0 leaves it out")
    parser.add_argument("--seeds", type=int, default=3, help="trainings of each for the comparison of learning")
    parser.add_argument(
        "--worker",
        choices=["brax", "polyak", "brax-learning", "polyak-learning"],
        help="(what the benchmark starts itself with, like the rest)",
    )
    parser.add_argument("--devices", type=int, default=1, help=argparse.SUPPRESS)
    parser.add_argument("--seed", type=int, default=0, help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    main()
