"""Env steps per second with worker processes: of environments that wait, of MuJoCo, and against RLlib; start and memory.

    python benchmarks/distributed.py [--quick] [--only KIND ...] [--json PATH]

`start`: seconds from `train.run` with two workers to its first report, without compilation, each in a process that is
alone. `waits`: a step waits 1 ms, 4 environments a worker, rollouts of 32 steps. `computes`: the same, where a step takes 1 ms
of a processor. `cheetah`: HalfCheetah-v5, 8 environments, rollouts of 64 steps; `cheetahs`: 32 environments. All train PPO
with two networks of (64, 64), 2 epochs x 2 minibatches, lag 0 if no other is named; 0 workers are the host loop. `rllib`:
CartPole-v1, 2 workers with 8 environments each, rollouts of 64 steps, 4 epochs x 4 minibatches, and RLlib's PPO with equal
settings. Every contestant has a private Ray of its own; they work one at a time.
"""

import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
from harness import Pace, arguments, few_threads, median, ratios, report, spread, steps, table, take_turns, times, verdict
from peers import python_if_possible

WAITING = (1, 2, 4, 8, 16)
LINEAR = {2: 0.9, 4: 0.9, 8: 0.8, 16: 0.8}
CORES = 2
"""Workers whose steps compute; on as many free cores they are to be as many times as fast, as `LINEAR` says."""
CHEETAHS = ("cheetah", "cheetahs")
KINDS = ("start", "waits", "computes", *CHEETAHS, "rllib")
START_SECONDS, START_MEGABYTES = 6.0, 150.0
SHARED = {"learning_rate": 3e-4, "gamma": 0.99, "gae_lambda": 0.95, "clip_range": 0.2, "ent_coef": 0.0, "vf_coef": 0.5}
RUNNERS, ENVS, STEPS, EPOCHS, MINIBATCHES = 2, 8, 64, 4, 4
"""Of the comparison with RLlib: workers, environments of each, steps of a rollout."""


class Waits(gymnasium.Env[Any, Any]):
    """A step waits for 1 ms, as for a simulator that computes elsewhere."""

    observation_space = gymnasium.spaces.Box(-1, 1, (4,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        """Start an episode."""
        super().reset(seed=seed)
        self.count = 0
        return self.np_random.random(4, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        """Wait."""
        self.work()
        self.count += 1
        return self.np_random.random(4, np.float32), 1.0, False, self.count == 200, {}

    def work(self) -> None:
        """What takes 1 ms."""
        time.sleep(0.001)


class Computes(Waits):
    """A step takes 1 ms of a processor, as a simulator in this process does."""

    def work(self) -> None:
        """Use the time of this thread, whatever else the machine does meanwhile."""
        end = time.thread_time() + 0.001
        while time.thread_time() < end:
            pass


def worker(kind: str, workers: int, lag: int, count: int) -> None:
    import jax

    jax.config.update("jax_cpu_enable_async_dispatch", False)
    few_threads(1)
    # Before anything can print: Ray does.
    pace = Pace()
    import polyak

    pace.about["polyak"] = polyak.__version__
    env: Any = {"waits": Waits, "computes": Computes, **dict.fromkeys(CHEETAHS, "HalfCheetah-v5")}.get(kind, "CartPole-v1")
    per_worker = (4 * max(workers, 1), 32)
    sizes = {"waits": per_worker, "computes": per_worker, "cheetahs": (32, 64), "rllib": (RUNNERS * ENVS, STEPS)}
    num_envs, num_steps = sizes.get(kind, (8, 64))
    made = polyak.envs.make(env, num_envs=num_envs if not workers else 1)
    settings = {"num_epochs": 2, "num_minibatches": 2, "values_when": "collect" if lag else "update"}
    if kind == "rllib":
        settings = {"num_epochs": EPOCHS, "num_minibatches": MINIBATCHES, "max_grad_norm": 0.5, **SHARED}
    agent = polyak.PPO(spec=made.spec, num_steps=num_steps, **settings)
    begin = time.monotonic()

    def lap(progress: Any, metrics: Any, state: Any) -> None:
        if kind == "start":
            seconds = time.monotonic() - begin - progress.compile_seconds
            pace.about.update(start_seconds=seconds, worker_megabytes=memory_of_workers())
        pace.lap(progress.env_steps)

    options: Any = {"env_steps": 10**9, "key": jax.random.key(0), "report_every": count, "callbacks": [lap]}
    if workers:
        split = polyak.train.Workers(workers, lag=lag)
        polyak.train.run(agent, env, num_envs=num_envs, workers=split, progress=False, **options)
    else:
        polyak.loops.host(agent, made, **options)


def rllib_worker(count: int) -> None:
    """RLlib's PPO on its new stack, in the peer's interpreter."""
    pace = Pace()
    import ray
    import torch
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

    torch.set_num_threads(1)
    pace.about["ray"] = ray.__version__
    ray.init(num_cpus=RUNNERS + 1, include_dashboard=False, log_to_driver=False)
    batch = RUNNERS * ENVS * STEPS
    config = (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=RUNNERS, num_envs_per_env_runner=ENVS, rollout_fragment_length=STEPS)
        .learners(num_learners=0)
        .training(
            lr=SHARED["learning_rate"],
            gamma=SHARED["gamma"],
            lambda_=SHARED["gae_lambda"],
            clip_param=SHARED["clip_range"],
            entropy_coeff=SHARED["ent_coef"],
            vf_loss_coeff=SHARED["vf_coef"],
            use_kl_loss=False,
            grad_clip=0.5,
            train_batch_size_per_learner=batch,
            minibatch_size=batch // MINIBATCHES,
            num_epochs=EPOCHS,
        )
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=[64, 64], fcnet_activation="tanh", vf_share_layers=False))
    )
    algorithm = config.build_algo()
    done = 0
    while True:
        end = done + count
        while done < end:
            done = int(algorithm.train()["env_runners"]["num_env_steps_sampled_lifetime"])
        pace.lap(done)


def memory_of_workers() -> list[float]:
    """Proportional set size in MB of this process's Ray workers."""
    listed = subprocess.run(["ps", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout.splitlines()
    sizes = []
    for line in listed:
        pid, _, name = line.strip().partition(" ")
        if "ray::_RayWorker" not in name:
            continue
        try:
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text()
        except OSError:
            continue
        sizes.append(next(int(row.split()[1]) / 1024 for row in rollup.splitlines() if row.startswith("Pss:")))
    return sizes


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each")
    parser.add_argument("--worker", nargs=3, metavar=("KIND", "WORKERS", "LAG"), help="(what the benchmark starts itself with)")
    parser.add_argument("--count", type=int, default=4096, help="env steps in a measurement, for one worker")
    parser.add_argument("--most", type=int, default=16, help="workers, at most, whose steps wait")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, metavar="KIND", help=f"of {', '.join(KINDS)}")
    args = parser.parse_args()
    if args.worker:
        kind, *numbers = args.worker
        rllib_worker(args.count) if kind == "peer" else worker(kind, *map(int, numbers), args.count)
        return
    rounds, most, count = (2, 2, args.count // 4) if args.quick else (args.rounds, args.most, args.count)
    rows, rates, about = [], {}, {}
    for kind in args.only:
        if kind == "start":
            about["start"] = [start_once() for _ in range(rounds)]
            continue
        numbers = {
            "waits": [(0, 0), *((number, 0) for number in WAITING if number <= most)],
            "computes": [(0, 0), (1, 0), (CORES, 0)],
            **{name: [(0, 0), (1, 0), (2, 0), (2, 1)] for name in CHEETAHS},
            "rllib": [(RUNNERS, 0)],
        }[kind]
        times_count = {"cheetah": 2, "cheetahs": 8, "rllib": 2}.get(kind)
        group = {name_of(kind, *pair): command(kind, *pair, count * (times_count or max(pair[0], 1))) for pair in numbers}
        peer = python_if_possible("rllib") if kind == "rllib" else None
        if peer is not None:
            group["rllib-peer"] = command("peer", RUNNERS, 0, count * 2, str(peer))
        measured, said = take_turns(group, rounds, one_by_one=True)
        rates |= measured
        about |= said
        rows += rows_of(kind, numbers, measured)
    text = table(["environment", "", "env steps/s", "times", "target"], rows)
    text += describe_start(about["start"]) if "start" in about else ""
    report(text, {"benchmark": "distributed", "rates": rates, "about": about, "quick": args.quick}, args.json)


def command(kind: str, workers: int, lag: int, count: int, python: str = sys.executable) -> list[Any]:
    return [python, Path(__file__).resolve(), "--worker", kind, workers, lag, "--count", count]


def name_of(kind: str, workers: int, lag: int) -> str:
    return f"{kind}-{workers}" + (f"-lag-{lag}" if lag else "")


def start_once() -> dict[str, Any]:
    """What one contestant that is alone says of its start."""
    _, about = take_turns({"start": command("start", 2, 0, 1)}, 0)
    said: dict[str, Any] = about["start"]
    return said


def describe_start(starts: list[dict[str, Any]]) -> str:
    seconds = [start["start_seconds"] for start in starts]
    megabytes = [max(start["worker_megabytes"]) for start in starts]
    met = verdict(-median(seconds), -START_SECONDS).replace(">= -", "<= ")
    memory = verdict(-median(megabytes), -START_MEGABYTES).replace(">= -", "<= ")
    return (
        f"\n\nstart {spread(seconds, lambda x: f'{x:.1f}')} s: {met}; "
        f"{median(megabytes):.0f} MB a worker (proportional set size): {memory}"
    )


def rows_of(kind: str, numbers: list[tuple[int, int]], measured: dict[str, list[float]]) -> list[list[str]]:
    rows = []
    for workers, lag in numbers:
        name = name_of(kind, workers, lag)
        base, against, target = f"{kind}-1", "one worker", LINEAR.get(workers, 0) * workers
        if kind == "rllib":
            base, against, target = "rllib-peer", "RLlib", 3.0
        elif workers == 1:
            base, against, target = f"{kind}-0", "host loop", 0.95
        elif kind in CHEETAHS:
            target = 1.7
        label = "host loop" if workers == 0 else f"{workers} workers" + (f", lag {lag}" if lag else "")
        row = [kind, label, spread(measured[name], steps), "", ""]
        if workers and base in measured:
            ratio = ratios(measured, name, base)
            row[3:] = [f"{against}: {spread(ratio, times)}", verdict(median(ratio), target)]
        rows.append(row)
    if "rllib-peer" in measured:
        rows.append([kind, f"RLlib's PPO, {RUNNERS} workers", spread(measured["rllib-peer"], steps), "", ""])
    return rows


if __name__ == "__main__":
    main()
