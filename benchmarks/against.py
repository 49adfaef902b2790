"""Speed, memory and compile time of this checkout beside another commit's polyak, in turns.

    python benchmarks/against.py COMMIT [CASE ...] [--rounds 9] [--quick] [--json PATH]

A ratio above 1 means that this checkout is faster; below 0.97 it has become slower. The other commit's files and a virtual
environment with its dependencies are made once, and kept in `benchmarks/.venv-against-COMMIT`. Each checkout runs the worker
of its own benchmark, or this one's where the other has none: they train alike, though settings may have other names. Until a
worker is ready it imports, compiles and trains once; that is its start. Memory is its peak (Linux).
"""

import io
import os
import shutil
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from typing import Any, NamedTuple

from harness import HERE, Worker, arguments, median, ratios, report, spread, table, times, verdict

SLOWER = 0.97


class Case(NamedTuple):
    """A worker: the file of its benchmark, and its arguments."""

    file: str
    words: tuple[str, ...]


def case(file: str, *words: str | int) -> Case:
    return Case(file, ("--worker", *map(str, words)))


CASES = {
    "predict": case("predict.py", "polyak", "--count", 10_000),
    "python-policy": case("python_policy.py", "host", "--batch", 64, "--count", 10),
    "compiled-4": case("compiled_loop.py", "polyak", "--envs", 4, "--count", 80_000),
    "compiled-64": case("compiled_loop.py", "polyak", "--envs", 64, "--count", 120_000),
    "compiled-512": case("compiled_loop.py", "polyak", "--envs", 512, "--count", 200_000),
    "host": case("host_loop.py", "polyak", "--count", 16_384),
    "host-halfcheetah": case("host_loop.py", "polyak", "--env", "HalfCheetah-v5", "--count", 4096),
    "update-32": case("ppo_update.py", "polyak", "--minibatches", 32, "--updates", 12),
    "update-1": case("ppo_update.py", "polyak", "--minibatches", 1, "--updates", 25),
    "dqn-1": case("dqn.py", "polyak host", "--setting", "1", "--count", 600),
    "dqn-8": case("dqn.py", "polyak host", "--setting", "8", "--count", 4000),
    "sac": case("sac.py", "polyak", "--task", "sac", "--count", 60),
    "td3": case("sac.py", "polyak", "--task", "td3", "--count", 70),
    "target-72k": case("updates.py", "polyak", "--case", "MLP", "--calls", 8000),
    "target-25M-not-due": case("updates.py", "polyak", "--case", "25M not due", "--calls", 5000),
}


class Checkout(NamedTuple):
    """The files of a commit, and the Python in which its polyak is installed."""

    source: Path
    python: Path


HERE_NOW = Checkout(HERE.parent, Path(sys.executable))


def checkout_of(commit: str) -> Checkout:
    """The checkout of another commit, made unless it is there.

    Raises:
        SystemExit: git knows no such commit, or pip cannot install it; with their words.
    """
    full = _run("git", "-C", str(HERE), "rev-parse", "--verify", f"{commit}^{{commit}}").decode().strip()
    home = HERE / f".venv-against-{full[:10]}"
    found = Checkout(home / "checkout", home / "bin" / "python")
    if (home / "is-complete").exists():
        return found
    print(
        f"against: installing {full[:10]} into {home.relative_to(HERE.parent)} (once; some minutes)",
        file=sys.stderr,
        flush=True,
    )
    shutil.rmtree(home, ignore_errors=True)
    _run(sys.executable, "-m", "venv", str(home))
    with tarfile.open(fileobj=io.BytesIO(_run("git", "-C", str(HERE.parent), "archive", full))) as archive:
        archive.extractall(found.source, filter="data")
    _run(str(found.python), "-m", "pip", "install", "--quiet", "-e", f"{found.source}[mujoco]")
    (home / "is-complete").touch()
    return found


def _run(*command: str) -> bytes:
    done = subprocess.run(command, capture_output=True, env=_environment())
    if done.returncode:
        said = "\n".join((done.stdout + done.stderr).decode(errors="replace").strip().splitlines()[-10:])
        raise SystemExit(f"against: {' '.join(command)} failed with {done.returncode}:\n{said}")
    return done.stdout


def _environment() -> dict[str, str]:
    # A PYTHONPATH of the caller would put this checkout before the other.
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


class Measured(NamedTuple):
    """Of both checkouts, this one first: units of work per second by turn, seconds until ready, and peak memory in MB."""

    rates: dict[str, list[float]]
    starts: list[float]
    peaks: list[float]
    is_own_worker: bool


def start(name: str, checkout: Checkout, script: Path, words: tuple[str, ...]) -> tuple[Worker, float]:
    """A worker that is ready, and the seconds that took."""
    before = time.perf_counter()
    worker = Worker(name, [checkout.python, script, *words], env=_environment() | {"PYTHONPATH": str(checkout.source / "src")})
    try:
        worker.wait_until_warm()
    except SystemExit:
        worker.close()
        raise
    return worker, time.perf_counter() - before


def compare(case: Case, other: Checkout, rounds: int) -> Measured:
    """Measure a case in turns.

    Raises:
        SystemExit: neither worker runs with the other commit's polyak; with its last words.
    """
    mine, my_start = start("this", HERE_NOW, HERE / case.file, case.words)
    try:
        script = other.source / "benchmarks" / case.file
        try:
            theirs, their_start = start("other", other, script, case.words)
        except SystemExit:
            script = HERE / case.file
            theirs, their_start = start("other", other, script, case.words)
        try:
            pairs = [(mine.measure(), theirs.measure()) for _ in range(rounds)]
            peaks = [mine.peak_mb(), theirs.peak_mb()]
        finally:
            theirs.close()
    finally:
        mine.close()
    rates = {"this": [pair[0] for pair in pairs], "other": [pair[1] for pair in pairs]}
    return Measured(rates, [my_start, their_start], peaks, script.is_relative_to(other.source))


def row_of(name: str, measured: Measured) -> list[str]:
    """A line of the table."""
    ratio = ratios(measured.rates, "this", "other")
    (start, its_start), (peak, its_peak) = measured.starts, measured.peaks
    worker = "its own" if measured.is_own_worker else "this one's"
    both = f"{start:.1f} ({its_start:.1f})", f"{peak:.0f} ({its_peak:.0f})"
    return [name, spread(ratio, times), verdict(median(ratio), SLOWER), *both, worker]


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("commit", help="anything that git resolves to a commit, such as HEAD~1")
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"default: all of {', '.join(CASES)}")
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each")
    args = parser.parse_args()
    if unknown := [name for name in args.cases if name not in CASES]:
        parser.error(f"unknown case {unknown[0]!r}; there are {', '.join(CASES)}")
    other = checkout_of(args.commit)
    measured: dict[str, Measured] = {}
    for name in args.cases or CASES:
        print(f"against: {name}", file=sys.stderr, flush=True)
        try:
            measured[name] = compare(CASES[name], other, 2 if args.quick else args.rounds)
        except SystemExit as error:
            print(f"against: {name} is left out: {error}", file=sys.stderr, flush=True)
    rows = [row_of(name, each) for name, each in measured.items()]
    text = table(["case", f"times {args.commit}", "target", "start, s (other)", "peak, MB (other)", "its worker"], rows)
    result: dict[str, Any] = {"benchmark": "against", "commit": args.commit, "quick": args.quick}
    report(text, {**result, "cases": {name: each._asdict() for name, each in measured.items()}}, args.json)


if __name__ == "__main__":
    main()
