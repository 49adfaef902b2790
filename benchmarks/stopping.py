"""Seconds from Ctrl-C to the end of `polyak train`, with its last checkpoint, and between reports, by number of environments.

    python benchmarks/stopping.py [--quick] [--json PATH]

PPO in jax/CartPole-v1. Rollouts are so short that an update takes no more than about half a second on the machine: an update is
one program, which nothing can interrupt. The last checkpoint must be of the last report.
"""

import itertools
import json
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import arguments, report, table

from polyak.storage.checkpoint import steps

# Environments, and steps of a rollout.
CASES = ((64, 128), (2_048, 16), (8_192, 8), (32_768, 4))


def stop(num_envs: int, num_steps: int, seconds: float) -> dict[str, float]:
    """Train for some seconds after the first report, interrupt, and measure."""
    with tempfile.TemporaryDirectory() as directory:
        run = Path(directory) / "run"
        words = (
            f"ppo jax/CartPole-v1 --num-envs {num_envs} --num-steps {num_steps} --num-epochs 1 --num-minibatches 4 --devices 1"
        )
        words += f" --env-steps 1000000000 --report-every {num_envs * num_steps} --eval-episodes 0 --run-dir {run}"
        training = subprocess.Popen([sys.executable, "-m", "polyak", "train", *words.split()], stdout=subprocess.DEVNULL)
        metrics = run / "metrics.jsonl"
        while not (metrics.exists() and metrics.read_text().count("\n") > 2):
            time.sleep(0.1)
            assert training.poll() is None, "the training has ended"
        time.sleep(seconds)
        began = time.monotonic()
        training.send_signal(signal.SIGINT)
        training.wait()
        took = time.monotonic() - began
        rows = [json.loads(line) for line in metrics.read_text().splitlines()]
        times = [row["time/time_elapsed"] for row in rows if "time/time_elapsed" in row]
        saved = max(steps(run / "checkpoints"))
        assert saved == rows[-1]["env_steps"], (saved, rows[-1])
        gaps = [after - before for before, after in itertools.pairwise(times)]
        return {"stop": took, "report": max(gaps, default=float("nan")), "updates": len(rows)}


def main() -> None:
    args = arguments(__doc__).parse_args()
    rows, results = [], {}
    for num_envs, num_steps in CASES[:1] if args.quick else CASES:
        results[num_envs] = found = stop(num_envs, num_steps, 1.0 if args.quick else 8.0)
        rows.append([f"{num_envs:,} x {num_steps}", f"{found['stop']:.2f} s", f"{found['report']:.2f} s"])
    text = table(["environments x steps", "from Ctrl-C to the end", "longest time between reports"], rows)
    report(text, {"stopping": {str(number): found for number, found in results.items()}}, args.json)


if __name__ == "__main__":
    main()
