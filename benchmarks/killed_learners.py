"""SIGKILL of the learner at random moments: what is left of it, and whether resuming gives the bits of the whole run.

    python benchmarks/killed_learners.py [--quick] [--kills N] [--ray-kills N] [--seed N] [--json PATH]

PPO on CartPole-v1 with four workers, a checkpoint every 20th of the run. The run is killed after its first checkpoint, and goes
on with 4, 2 or 1 workers or with none. Workers are in the learner's process, or processes of Ray: of these, `left` counts the
processes, listening ports, files in /dev/shm and directories that are there 5 seconds after the kill.
"""

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from fault_storm import same_bits
from harness import arguments, few_threads, report, table

import polyak
from polyak.train import Workers
from polyak.workers.in_process_workers import InProcessWorkers

ENV_STEPS, NUM_ENVS, PATIENCE = 30_000, 16, 5.0
RESUMED_WITH = (4, 2, 1, 0)


def learn(directory: Path, in_ray: bool) -> Any:
    """The whole run."""
    few_threads(1)
    env = "CartPole-v1"
    agent = polyak.PPO(polyak.envs.make(env).spec, num_steps=16, num_epochs=2, num_minibatches=2)
    workers = Workers(number=4, make_engine=None if in_ray else InProcessWorkers)
    options: Any = {"env_steps": ENV_STEPS, "checkpoint_every": ENV_STEPS // 20, "seed": 0, "num_envs": NUM_ENVS}
    return polyak.train.run(agent, env, run_dir=directory, workers=workers, progress=False, **options)


def kill_and_resume(directory: Path, in_ray: bool, delay: float, number: int, whole: Any) -> dict[str, Any]:
    """Kill a run `delay` seconds after its first checkpoint, and resume it with so many workers."""
    shared = set(os.listdir("/dev/shm"))
    command = [sys.executable, str(Path(__file__).resolve()), "--learner", str(directory), "ray" if in_ray else "here"]
    learner = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not checkpoints(directory) and learner.poll() is None:
        time.sleep(0.01)
    time.sleep(delay)
    own = descendants(learner.pid)
    ports = listening(own)
    learner.kill()
    was_running = learner.wait() == -9
    start = time.monotonic()
    deadline = start + PATIENCE
    while left(own, ports, shared, learner.pid) and time.monotonic() < deadline:
        own |= {child for pid in own for child in descendants(pid)}
        time.sleep(0.02)
    seconds = time.monotonic() - start
    workers = Workers(number=number, make_engine=InProcessWorkers) if number else 0
    done = max(checkpoints(directory))
    result = polyak.resume(directory, workers=workers, progress=False)
    return {
        "engine": "Ray" if in_ray else "in process",
        "was_running": was_running,
        "killed_after": done,
        "resumed_with": number,
        "processes": len(own),
        "ports": len(ports),
        "left": left(own, ports, shared, learner.pid),
        "ended_seconds": seconds,
        "same_bits": same_bits(result, whole),
    }


def checkpoints(directory: Path) -> list[int]:
    """The env steps of the checkpoints."""
    return [int(path.name) for path in (directory / "checkpoints").glob("*") if path.name.isdigit()]


def left(pids: set[int], ports: set[str], shared: set[str], learner: int) -> list[str]:
    """What is still there of a run."""
    running = [f"process {pid}" for pid in pids if state_of(pid) not in ("", "Z")]
    open_ports = {line.split()[1] for line in tcp() if line.split()[3] == "0A"}
    files = [f"/dev/shm/{name}" for name in set(os.listdir("/dev/shm")) - shared]
    return [
        *running,
        *sorted(ports & open_ports),
        *files,
        *map(str, Path(tempfile.gettempdir()).glob(f"polyak-ray-{learner}-*")),
    ]


def state_of(pid: int) -> str:
    """The state of a process; empty if there is none."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return ""


def descendants(pid: int) -> set[int]:
    """The processes that a process has started, and theirs."""
    try:
        threads = list(Path(f"/proc/{pid}/task").iterdir())
        children = {int(child) for thread in threads for child in (thread / "children").read_text().split()}
    except OSError:
        return set()
    return children.union(*(descendants(child) for child in children))


def listening(pids: set[int]) -> set[str]:
    """The addresses, in hexadecimal, on which processes listen."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes.add(os.readlink(link))
            except OSError:
                continue
    lines = [line.split() for line in tcp()]
    return {fields[1] for fields in lines if fields[3] == "0A" and f"socket:[{fields[9]}]" in inodes}


def tcp() -> list[str]:
    """The system's table of TCP sockets."""
    return [line for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]]


def summarize(kills: Sequence[dict[str, Any]]) -> list[list[Any]]:
    """A row for each engine."""
    rows = []
    for engine in dict.fromkeys(kill["engine"] for kill in kills):
        of_engine = [kill for kill in kills if kill["engine"] == engine]
        resumed = [f"{sum(k['resumed_with'] == n for k in of_engine)} with {n or 'none'}" for n in RESUMED_WITH]
        same = sum(kill["same_bits"] for kill in of_engine)
        seconds = [kill["ended_seconds"] for kill in of_engine]
        ended = f"{np.median(seconds):.1f}, at most {max(seconds):.1f}"
        remains = sum(len(kill["left"]) for kill in of_engine)
        rows.append([engine, len(of_engine), ", ".join(resumed), f"{same} of {len(of_engine)}", ended, remains])
    return rows


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--kills", type=int, default=16, help="of runs whose workers are in their process")
    parser.add_argument("--ray-kills", type=int, default=4, help="of runs whose workers are processes of Ray")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    parser.add_argument("--learner", nargs=2, metavar=("DIRECTORY", "ENGINE"), help="(what the benchmark starts itself with)")
    args = parser.parse_args()
    if args.learner:
        learn(Path(args.learner[0]), args.learner[1] == "ray")
        return
    numbers = (2, 1) if args.quick else (args.kills, args.ray_kills)
    random, kills = np.random.default_rng(args.seed), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as directory:
        whole = learn(Path(directory) / "whole", in_ray=False)
        for in_ray, number in zip((False, True), numbers, strict=True):
            done = 0
            while done < number:
                delay = random.uniform(0.0, 0.8 * whole.progress.seconds)
                path, resumed_with = Path(directory) / f"{in_ray}-{len(kills)}", RESUMED_WITH[done % len(RESUMED_WITH)]
                kill = kill_and_resume(path, in_ray, delay, resumed_with, whole)
                print(kill, file=sys.stderr)
                # A run that was over counts for nothing.
                done += kill["was_running"]
                kills += [kill] * kill["was_running"]
    header = ["workers", "kills", "resumed", "same bits", "ended after s", "left after 5 s"]
    report(table(header, summarize(kills)), {"benchmark": "killed_learners", "kills": kills, "quick": args.quick}, args.json)
    sys.exit(0 if all(kill["same_bits"] and not kill["left"] for kill in kills) else 1)


if __name__ == "__main__":
    main()
