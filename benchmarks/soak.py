"""A long training with two workers on Ray: whether memory, object store, file handles, threads and files on disk stay flat.

    python benchmarks/soak.py [--quick] [--minutes N] [--kill-every SECONDS] [--json PATH]

PPO on CartPole-v1, 8 environments, rollouts of 8 steps, two networks of (128, 128), which travel through Ray's store; a report
every 4,096 env steps, a checkpoint every 65,536, in a run directory that is deleted. A sample every 10 s; the first fifth of
the time does not count. A slope is the median of those of all pairs of samples (Theil-Sen), per hour. It is flat if it is
within 1 % of the median value (handles, threads: 1 an hour), or within the noise of the samples. Growth below zero is flat
too. The files of the run are not judged: metrics grow with every report. With `--json` the samples so far are in a file. An
error while samples are taken or workers are killed ends the training and the benchmark.
"""

import contextlib
import itertools
import json
import os
import signal
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
from harness import arguments, few_threads, report, table

import polyak

WORKERS, NUM_ENVS, NUM_STEPS = 2, 8, 8
SAMPLE_SECONDS = 10.0
WARM = 0.2
"""Share of the time that does not count."""
MIN_SAMPLES = 2
"""Without two there is no slope."""
COUNTS = ("handles", "threads")


def children(pid: int) -> list[int]:
    """The processes that a process has started, and theirs."""
    by_parent: dict[int, list[int]] = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rsplit(")", 1)[1].split()
        except OSError:
            continue
        by_parent.setdefault(int(fields[1]), []).append(int(path.parent.name))
    found, waiting = [], [pid]
    while waiting:
        new = by_parent.get(waiting.pop(), [])
        found += new
        waiting += new
    return found


def name_of(pid: int) -> str:
    """`worker`, `ray`, or `learner` for this process."""
    if pid == os.getpid():
        return "learner"
    return "worker" if "_RayWorker" in Path(f"/proc/{pid}/cmdline").read_text() else "ray"


def measure(run: Path) -> dict[str, float]:
    """What this process, its workers and Ray use now; memory in MB is anonymous: others may share pages of libraries."""
    import ray

    sample: dict[str, float] = {}
    for pid in [os.getpid(), *children(os.getpid())]:
        try:
            name = name_of(pid)
            rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            own = {
                "memory": next(int(row.split()[1]) / 1024 for row in rollup if row.startswith("Anonymous:")),
                "handles": len(list(Path(f"/proc/{pid}/fd").iterdir())),
                "threads": len(list(Path(f"/proc/{pid}/task").iterdir())),
            }
        except (OSError, StopIteration):
            continue
        for key, value in own.items():
            sample[f"{name} {key}"] = sample.get(f"{name} {key}", 0.0) + value
    total, free = (
        resources().get("object_store_memory", 0.0) for resources in (ray.cluster_resources, ray.available_resources)
    )
    sample["ray object store"] = (total - free) / 2**20
    head = Path(tempfile.gettempdir()).glob(f"polyak-ray-{os.getpid()}-*")
    sample["ray files"] = sum(map(megabytes, head))
    sample["run files"] = megabytes(run)
    return sample


def megabytes(directory: Path) -> float:
    """Of all files in a directory."""
    total = 0
    for path in directory.rglob("*"):
        try:
            total += path.stat().st_size if path.is_file() and not path.is_symlink() else 0
        except OSError:
            continue
    return total / 2**20


def slope(times: list[float], values: list[float]) -> float:
    """Per hour: the median of all pairs' (Theil-Sen)."""
    pairs = itertools.combinations(zip(times, values, strict=True), 2)
    return statistics.median(3600 * (b - a) / (t - s) for (s, a), (t, b) in pairs)


def judge(name: str, times: list[float], values: list[float]) -> dict[str, Any]:
    """The median, the slope, and whether it is flat."""
    median, growth = statistics.median(values), slope(times, values)
    noise = statistics.median(abs(value - median) for value in values)
    allowed = 1.0 if name.endswith(COUNTS) else max(0.01 * median, 0.1)
    hours = (times[-1] - times[0]) / 3600
    return {"median": median, "per_hour": growth, "flat": growth <= allowed or growth * hours <= noise}


def judge_all(samples: list[dict[str, float]]) -> dict[str, dict[str, Any]]:
    """Judge every series; a sample that was taken while all workers were dead has none of theirs.

    Raises:
        ValueError: there are too few samples.
    """
    counted = [sample for sample in samples if sample["time"] >= WARM * samples[-1]["time"]]
    judged = {}
    for name in dict.fromkeys(name for sample in counted for name in sample if name != "time"):
        own = [sample for sample in counted if name in sample]
        if len(own) >= MIN_SAMPLES:
            judged[name] = judge(name, [sample["time"] for sample in own], [sample[name] for sample in own])
    if not {"worker memory", "learner memory"} <= judged.keys():
        raise ValueError(f"soak: {MIN_SAMPLES} samples with workers are needed, got {len(counted)}; train for longer")
    return judged


def watch(samples: list[dict[str, float]], run: Path, path: Path | None, is_over: threading.Event) -> None:
    """Take samples until the training is over."""
    start = time.monotonic()
    while not is_over.wait(SAMPLE_SECONDS):
        try:
            sample = measure(run)
        except Exception:
            # Ray ends with the training, also while a sample is taken.
            if is_over.wait(SAMPLE_SECONDS):
                return
            raise
        samples.append({"time": time.monotonic() - start, **sample})
        if path is not None:
            path.with_suffix(".samples").write_text(json.dumps(samples))


def kill_workers(seconds: float, is_over: threading.Event) -> None:
    """Kill a worker every so often."""
    while not is_over.wait(seconds):
        workers = []
        for pid in children(os.getpid()):
            # It may have ended.
            with contextlib.suppress(OSError):
                workers += [pid] if name_of(pid) == "worker" else []
        for pid in workers[:1]:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def in_thread(function: Callable[..., None], *arguments: Any, errors: list[Exception]) -> threading.Thread:
    """A thread that calls a function, whose last argument is the event that ends everything; its exception ends it too."""

    def call() -> None:
        try:
            function(*arguments)
        except Exception as error:
            errors.append(error)
            arguments[-1].set()

    return threading.Thread(target=call, daemon=True)


def make_agent() -> Any:
    spec = polyak.envs.make("CartPole-v1").spec
    return polyak.PPO(spec, network=polyak.MLP(hidden=(128, 128)), num_steps=NUM_STEPS, num_epochs=1, num_minibatches=2)


def train(run: Path, should_stop: Callable[[], bool], first_report: threading.Event) -> Any:
    """Train until it should stop."""
    return polyak.train.run(
        make_agent(),
        "CartPole-v1",
        env_steps=10**11,
        num_envs=NUM_ENVS,
        workers=polyak.train.Workers(number=WORKERS, restarts=10**6),
        run_dir=run,
        report_every=4096,
        checkpoint_every=65_536,
        progress=False,
        callbacks=[lambda progress, metrics, state: first_report.set()],
        should_stop=should_stop,
    )


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--minutes", type=float, default=60.0, help="of training")
    parser.add_argument("--kill-every", type=float, default=0.0, metavar="SECONDS", help="kill a worker so often; 0 kills none")
    args = parser.parse_args()
    few_threads(1)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    seconds = 30.0 if args.quick else 60 * args.minutes
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
    samples: list[dict[str, float]] = []
    errors: list[Exception] = []
    is_over, first_report = threading.Event(), threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: is_over.set())
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        threads = [in_thread(watch, samples, run, args.json, is_over, errors=errors)]
        if args.kill_every:
            threads.append(in_thread(kill_workers, args.kill_every, is_over, errors=errors))
        end = float("inf")

        def should_stop() -> bool:
            nonlocal end
            if first_report.is_set() and end == float("inf"):
                end = time.monotonic() + seconds
                for thread in threads:
                    thread.start()
            return is_over.is_set() or time.monotonic() >= end

        result = train(run, should_stop, first_report)
        is_over.set()
        for thread in threads:
            # None before the first report.
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[0]
    judged = judge_all(samples)
    files = judged.pop("run files")
    rows = [
        [name, f"{one['median']:.1f}", f"{one['per_hour']:+.2f}", "yes" if one["flat"] else "NO"]
        for name, one in judged.items()
    ]
    progress = result.progress
    text = table(["", "median (MB or number)", "per hour", "flat"], rows)
    text += f"\n\n{progress.env_steps:,} env steps in {progress.iteration:,} rounds, {samples[-1]['time'] / 60:.0f} minutes, "
    text += f"{files['median']:.1f} MB of the run's files ({files['per_hour']:+.2f} an hour), "
    text += f"{result.metrics.get('workers/restarts', 0):.0f} restarts"
    report(text, {"benchmark": "soak", "judged": judged, "samples": samples, "quick": args.quick}, args.json)
    sys.exit(0 if all(one["flat"] for one in judged.values()) else 1)


if __name__ == "__main__":
    main()
