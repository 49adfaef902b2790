"""Seconds that a Python program takes to the end of its first rollouts and update, with the cache of programs and without.

    python benchmarks/start.py [--rounds 5] [--quick] [--json PATH]

PPO in CartPole-v1 with 8 environments and its preset, for 2,048 env_steps. Each round starts one process of each contestant, in
turns. polyak's first process fills the cache and is not counted.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from harness import arguments, ratios, report, spread, table, times
from peers import python_of

POLYAK = """
import polyak
polyak.train.run("ppo", "CartPole-v1", env_steps=2048, num_envs=8, progress=False)
"""
COMMAND = ["train", "ppo", "CartPole-v1", "--env-steps", "2048", "--num-envs", "8", "--eval-episodes", "0", "--run-dir"]
SB3 = """
from stable_baselines3 import PPO
from stable_baselines3.common.env_util import make_vec_env
PPO("MlpPolicy", make_vec_env("CartPole-v1", n_envs=8), n_steps=32, batch_size=256, n_epochs=20, device="cpu").learn(2048)
"""


def main() -> None:
    args = parse_arguments()
    with tempfile.TemporaryDirectory() as directory:
        seconds = measure(Path(directory), 2 if args.quick else args.rounds)
    rows = []
    for name, values in seconds.items():
        ratio = [] if name == "Stable-Baselines3" else ratios(seconds, "Stable-Baselines3", name)
        rows.append([name, spread(values, lambda x: f"{x:.1f}"), spread(ratio, times) if ratio else ""])
    header = ["program", "seconds", "times as fast as Stable-Baselines3"]
    report(table(header, rows), {"benchmark": "start", "seconds": seconds}, args.json)


def measure(directory: Path, rounds: int) -> dict[str, list[float]]:
    """Seconds of each contestant, by round."""
    commands = {
        "polyak from Python": [sys.executable, "-c", POLYAK],
        "polyak from Python, no cache": [sys.executable, "-c", POLYAK],
        "polyak train": [sys.executable, "-m", "polyak", *COMMAND],
        "Stable-Baselines3": [python_of("sb3"), "-c", SB3],
    }
    env = {name: value for name, value in os.environ.items() if not name.startswith("JAX_COMPILATION")}
    seconds: dict[str, list[float]] = {name: [] for name in commands}
    for round_number in range(rounds + 1):
        for name, words in commands.items():
            own = {"XDG_CACHE_HOME": str(directory), "POLYAK_COMPILATION_CACHE": "0" if "no cache" in name else "1"}
            if name == "polyak train":
                words = [*words, str(directory / f"run-{round_number}")]
            start = time.perf_counter()
            subprocess.run(words, env=env | own, check=True, capture_output=True)
            if round_number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def parse_arguments() -> argparse.Namespace:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="processes of each")
    return parser.parse_args()


if __name__ == "__main__":
    main()
