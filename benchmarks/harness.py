"""What the speed benchmarks share: workers that take turns, and tables. Only the standard library, so that peers can import it.

A benchmark starts itself once for each contestant, in that contestant's interpreter. All are compiled and warm before the first
measurement; then they work one at a time, A B A B ..., each waiting while another works. A ratio is that of two neighbours
in time, so a machine that slows down, or is shared, slows both; the median of the ratios is what is reported.
"""

import argparse
import datetime
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent


class Pace:
    """The worker's side: `lap(count)` reports what was done since the last lap and waits for the next turn.

    The first lap says that the worker is warm, and its peak memory. What is printed after the pace was made goes to stderr.

    Attributes:
        about: what the first lap says.
    """

    def __init__(self, **about: Any) -> None:
        self._answers = os.fdopen(os.dup(1), "w")
        os.dup2(2, 1)
        self.about = about
        self._is_warm = False
        self._count = 0
        self._start = 0.0

    def lap(self, count: int) -> None:
        """Ends the worker when there is no next turn.

        Args:
            count: the units of work (env steps, updates) done since the worker started.
        """
        seconds = time.perf_counter() - self._start
        peak_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1000
        about = {"about": {**self.about, "peak_mb": peak_mb}}
        answer = {"count": count - self._count, "seconds": seconds} if self._is_warm else about
        self._is_warm = True
        print(json.dumps(answer), file=self._answers, flush=True)
        if not sys.stdin.readline():
            raise SystemExit(0)
        self._count = count
        self._start = time.perf_counter()


def few_threads(count: int) -> None:
    """So many for JAX, before it starts; as `polyak train` does where waking another thread costs more than it saves."""
    os.environ["PJRT_NPROC"] = str(count)


class Worker:
    """A contestant: a process that answers with one measurement each turn."""

    def __init__(self, name: str, command: Sequence[str | Path], env: Mapping[str, str] | None = None) -> None:
        self.name = name
        self._about: dict[str, Any] | None = None
        # A pipe that nobody reads would fill up and block the worker.
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        words, pipe = [str(word) for word in command], subprocess.PIPE
        self._process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=self._errors, text=True, env=env)

    def wait_until_warm(self) -> dict[str, Any]:
        """What the worker says about itself once it is ready."""
        if self._about is None:
            self._about = self._answer()["about"]
        return self._about

    def measure(self) -> float:
        """Units of work per second, in one turn."""
        assert self._process.stdin is not None
        self._process.stdin.write("go\n")
        self._process.stdin.flush()
        answer = self._answer()
        return float(answer["count"] / answer["seconds"])

    def peak_mb(self) -> float:
        """The process' peak memory so far, as Linux has it."""
        lines = Path(f"/proc/{self._process.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM")) / 1000

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._errors.close()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self._errors.seek(0)
        said = "\n".join(self._errors.read().strip().splitlines()[-15:])
        raise SystemExit(f"{self.name}: the worker ended with {self._process.wait()}:\n{said}")


def take_turns(
    commands: dict[str, Sequence[str | Path]], rounds: int, *, one_by_one: bool = False
) -> tuple[dict[str, list[float]], dict[str, Any]]:
    """Measure all, so many times, in turns; returns the rates by contestant and what they said about themselves.

    Args:
        commands: start the contestants.
        rounds: measurements of each.
        one_by_one: start the next contestant when the one before it is warm.
    """
    workers: list[Worker] = []
    try:
        for name, command in commands.items():
            workers.append(Worker(name, command))
            if one_by_one:
                workers[-1].wait_until_warm()
        about = {worker.name: worker.wait_until_warm() for worker in workers}
        rates: dict[str, list[float]] = {worker.name: [] for worker in workers}
        for _ in range(rounds):
            for worker in workers:
                rates[worker.name].append(worker.measure())
        return rates, about
    finally:
        for worker in workers:
            worker.close()


def ratios(rates: dict[str, list[float]], name: str, peer: str) -> list[float]:
    """How many times as fast as the peer, pair by pair."""
    return [ours / theirs for ours, theirs in zip(rates[name], rates[peer], strict=True)]


def median(values: Sequence[float]) -> float:
    """The middle value."""
    return statistics.median(values)


def spread(values: Sequence[float], form: Callable[[float], str]) -> str:
    """The median, with the lowest and highest: `4.31 (4.10 to 4.52)`."""
    return f"{form(median(values))} ({form(min(values))} to {form(max(values))})"


def steps(rate: float) -> str:
    """A rate in thousands: `43.1k`."""
    return f"{rate / 1000:.1f}k"


def times(ratio: float) -> str:
    """A ratio: `4.31`."""
    return f"{ratio:.2f}"


def verdict(value: float, at_least: float) -> str:
    """Whether the target is met, with the target."""
    return f"{'yes' if value >= at_least else 'NO'} (>= {at_least:g})"


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table, padded so that it also reads in a terminal."""
    cells = [list(header), *[[str(cell) for cell in row] for row in rows]]
    widths = [max(len(row[i]) for row in cells) for i in range(len(header))]
    lines = ["| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |" for row in cells]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([lines[0], rule, *lines[1:]])


def machine() -> dict[str, Any]:
    """What was measured on, and how busy it was."""
    load = os.getloadavg()
    return {
        "date": datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "cpu": _cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_average": [round(x, 2) for x in load],
    }


def report(text: str, result: dict[str, Any], json_path: Path | None) -> None:
    """Print the table and where it was measured; write the JSON."""
    where = machine()
    result = {**result, "machine": where}
    print(text)
    print(f"\n{where['cpu']}, {where['cores']} cores, Python {where['python']}, {where['date']}, load {where['load_average']}")
    if json_path is not None:
        json_path.parent.mkdir(parents=True, exist_ok=True)
        entries = ",\n".join(f" {json.dumps(name)}: {json.dumps(value)}" for name, value in result.items())
        json_path.write_text(f"{{\n{entries}\n}}\n")


def arguments(description: str) -> argparse.ArgumentParser:
    """The arguments that every benchmark has."""
    parser = argparse.ArgumentParser(description=description.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a smoke run; its figures mean nothing")
    parser.add_argument("--json", type=Path, metavar="PATH", help="also write the figures here")
    return parser


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())
