"""Time to make and to open a report of many runs, its size, and the cost of a live page for the trainings beside it.

`python benchmarks/report.py` writes synthetic runs, makes the report of all of them, opens it in headless Chromium if there is
one, and serves a live page of runs that are being written. The targets: 100 settings x 10 seeds x 10,000 rows in under 5 s and
at most 8 MB, usable in under 1 s, and under 1 % of a core for the live page.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import harness
import numpy as np

ROOT = Path(__file__).parents[1]
MEASURED_SECONDS = 120.0


def rows_of_run(rows: int, setting: int, seed: int) -> bytes:
    """The metrics of a synthetic run: a return that rises with noise, and a falling loss."""
    rng = np.random.default_rng([setting, seed])
    x = np.linspace(0, 1, rows)
    returns = 500 * (1 - np.exp(-(3 + setting / 20) * x)) + rng.normal(0, 15, rows)
    loss = np.exp(-3 * x) + rng.normal(0, 0.02, rows)
    lines = (
        f'{{"env_steps": {100 * (i + 1)}, "time/time_elapsed": {0.01 * (i + 1):.3f}, "rollout/ep_rew_mean": {a:.4f}, '
        f'"train/loss": {b:.5f}, "time/fps": 9000.0}}\n'
        for i, (a, b) in enumerate(zip(returns, loss, strict=True))
    )
    return "".join(lines).encode()


def write_runs(directory: Path, settings: int, seeds: int, rows: int) -> None:
    """Write run directories; runs share some texts of metrics, as formatting ten million rows would take minutes."""
    texts: dict[tuple[int, int], bytes] = {}
    for setting in range(settings):
        for seed in range(seeds):
            run = directory / f"lr{setting}" / f"seed-{seed}"
            run.mkdir(parents=True)
            agent = {"$class": "PPO", "learning_rate": 1e-4 * (setting + 1), "gamma": 0.99}
            steps = 100 * rows
            config = {"format": 4, "algorithm": "ppo", "env": "CartPole-v1", "seed": seed, "env_steps": steps, "agent": agent}
            summary = {"env_steps": steps, "eval_mean_return": 480.0 - seed, "stopped": None, "wall_seconds": 100.0}
            for name, content in (("config", config), ("system", {"command_line": ["polyak", "train"]}), ("summary", summary)):
                (run / f"{name}.json").write_text(json.dumps(content))
            key = setting % 10, seed % 5
            if key not in texts:
                texts[key] = rows_of_run(rows, *key)
            (run / "metrics.jsonl").write_bytes(texts[key])


def measure_report(directory: Path, output: Path) -> tuple[float, float]:
    """Seconds of `polyak report`, with the start of Python, and megabytes of the file."""
    start = time.perf_counter()
    subprocess.run([sys.executable, "-m", "polyak", "report", str(directory), "-o", str(output)], check=True)
    return time.perf_counter() - start, output.stat().st_size / 1e6


def measure_opening(page: Path, rounds: int) -> list[float]:
    """Seconds from the navigation to the drawn charts that are in sight, in headless Chromium; none without it."""
    sys.path.insert(0, str(ROOT))
    from tests.reports.browser import CHROMIUM, Browser

    if CHROMIUM is None:
        return []
    times = []
    with tempfile.TemporaryDirectory() as profile, Browser(profile) as browser:
        for _ in range(rounds):
            browser.open(page.as_uri())
            browser.wait_until("performance.getEntriesByName('polyak-drawn').length > 0")
            times.append(browser.evaluate("performance.getEntriesByName('polyak-drawn')[0].startTime") / 1000)
    return times


@contextmanager
def writing_runs(directory: Path, runs: int) -> Iterator[None]:
    """Append a row to each run every two seconds, as trainings do."""
    stop = threading.Event()

    def write() -> None:
        row = 10_000
        while not stop.wait(2.0):
            row += 1
            line = f'{{"env_steps": {100 * row}, "time/time_elapsed": {0.01 * row:.3f}, "rollout/ep_rew_mean": 480.0}}\n'
            for path in sorted(directory.glob("*/*/metrics.jsonl"))[:runs]:
                with path.open("a") as file:
                    file.write(line)

    thread = threading.Thread(target=write)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def measure_live(directory: Path, runs: int, tabs: int, seconds: float) -> float:
    """Share of a core that the live page takes, with tabs that ask every two seconds and compare all runs."""
    command = [sys.executable, "-m", "polyak", "report", "--live", str(directory), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server, writing_runs(directory, runs):
        assert server.stdout is not None
        address = server.stdout.readline().split()[0]
        names = [str(path.parent.relative_to(directory)) for path in sorted(directory.glob("*/*/config.json"))[:runs]]
        query = "&".join(f"run={name}" for name in names)
        tags = [""] * tabs

        def poll() -> None:
            for tab, tag in enumerate(tags):
                asked = urllib.request.Request(f"{address}update?{query}", headers={"If-None-Match": tag})
                try:
                    with urllib.request.urlopen(asked) as answer:
                        answer.read()
                        tags[tab] = answer.headers["ETag"]
                except urllib.error.HTTPError as error:
                    assert error.code == 304

        poll()
        before, start = cpu_seconds(server.pid), time.perf_counter()
        while time.perf_counter() - start < seconds:
            poll()
            time.sleep(2.0)
        share = (cpu_seconds(server.pid) - before) / (time.perf_counter() - start)
        server.terminate()
        return share


def cpu_seconds(pid: int) -> float:
    """CPU time of a process so far."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = harness.arguments(__doc__ or "")
    asked = parser.parse_args()
    settings, seeds, rows, seconds = (4, 2, 200, 4.0) if asked.quick else (100, 10, 10_000, MEASURED_SECONDS)
    work = Path(tempfile.mkdtemp(prefix="polyak-report-"))
    try:
        write_runs(work / "runs", settings, seeds, rows)
        output = work / "report.html"
        built, size = min(measure_report(work / "runs", output) for _ in range(3))
        opened = measure_opening(output, 5)
        share = {tabs: measure_live(work / "runs", min(100, settings * seeds), tabs, seconds) for tabs in (1, 100)}
    finally:
        shutil.rmtree(work)
    opening = harness.median(opened) if opened else None
    lines = [
        ("report built", f"{built:.2f} s", "< 5 s"),
        ("size", f"{size:.2f} MB", "<= 8 MB"),
        ("usable in Chromium", "no Chromium" if opening is None else harness.spread(opened, "{:.2f} s".format), "< 1 s"),
        *(
            (f"live page, 100 runs being written, {tabs} tabs", f"{100 * x:.2f} % of a core", "< 1 %")
            for tabs, x in share.items()
        ),
    ]
    text = f"{settings} settings x {seeds} seeds x {rows:,} rows\n\n" + harness.table(("what", "measured", "target"), lines)
    result = {"built_seconds": built, "megabytes": size, "opened_seconds": opened, "live_share": list(share.values())}
    harness.report(text, result, asked.json)


if __name__ == "__main__":
    main()
