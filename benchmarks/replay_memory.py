"""Memory and disk of a large replay: while it is filled 10 times over, and for checkpoints of it.

    python benchmarks/replay_memory.py [--quick] [--json PATH]

A DQN with a network of (4,) trains in the compiled loop with a replay of 10^6 rows of 64 floats (267 MB), by default for 10^7
transitions; the resident memory of the process is read at every report. Its checkpoints say what they wrote and how long a save
took: all of the replay first, then the rows of 100,000 new transitions.
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from harness import arguments, few_threads, report, table

NUM_ENVS, WIDTH = 8, 64


def environment() -> Any:
    """An environment in JAX with wide observations, in which nothing happens."""
    import jax.numpy as jnp
    import numpy as np

    from polyak.core.spaces import Box, Discrete, EnvSpec
    from polyak.core.struct import struct
    from polyak.envs.autoreset import AutoReset

    bound = np.ones(WIDTH, np.float32)

    @struct
    class Wide:
        @property
        def spec(self) -> EnvSpec:
            return EnvSpec(Box(-bound, bound), Discrete(2), "wide")

        def reset(self, key: Any, num_envs: int) -> Any:
            return jnp.zeros(num_envs, jnp.int32)

        def step(self, state: Any, action: Any, key: Any) -> Any:
            state = state + 1
            return state, jnp.ones(state.shape), state >= 100, jnp.zeros(state.shape, bool)

        def observe(self, state: Any) -> Any:
            return jnp.sin(state[:, None].astype(jnp.float32) + jnp.arange(WIDTH))

    return AutoReset(Wide(), NUM_ENVS)


def resident() -> float:
    """Megabytes of this process in memory."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 1e6


def main() -> None:
    args = arguments(__doc__).parse_args()
    capacity, env_steps = (100_000, 1_000_000) if args.quick else (1_000_000, 10_000_000)
    few_threads(1)
    import jax

    import polyak

    env = environment()
    agent = polyak.DQN(
        env.spec,
        network=polyak.MLP((4,)),
        batch_size=4,
        replay=polyak.UniformReplay(capacity),
        updates_per_step=0.125,
        num_steps=1,
    )
    memory: dict[int, float] = {}
    saves: list[tuple[int, int, float]] = []
    with tempfile.TemporaryDirectory() as directory:
        result = polyak.train.run(
            agent,
            env,
            env_steps=env_steps,
            seed=0,
            report_every=capacity // 10,
            callbacks=[lambda progress, metrics, state: memory.update({progress.env_steps: resident()})],
            progress=False,
        )
        saves = measure_saves(agent, env, Path(directory) / "run", capacity)
    # Before that, pages of the replay that nobody has written are not in memory.
    full = {steps: mb for steps, mb in memory.items() if steps >= 2 * capacity}
    first, last = full[min(full)], full[max(full)]
    rows = [[f"{min(full):,}", f"{first:.1f}", ""], [f"{max(full):,}", f"{last:.1f}", f"{last - first:+.1f}"]]
    text = table(["transitions", "resident MB", "growth"], rows) + "\n\n"
    text += table(
        ["checkpoint at", "MB written", "seconds"], [[f"{at:,}", f"{size / 1e6:.1f}", f"{s:.2f}"] for at, size, s in saves]
    )
    figures = {
        "benchmark": "replay_memory",
        "quick": args.quick,
        "resident_mb": memory,
        "saves": saves,
        "fps": result.progress.fps,
    }
    report(text, {**figures, "jax": jax.__version__}, args.json)


def measure_saves(agent: Any, env: Any, run: Path, capacity: int) -> list[tuple[int, int, float]]:
    """(env steps, bytes written, seconds) of three checkpoints after the replay has filled, 100,000 transitions apart."""
    import polyak

    segments, saves, began = run / "checkpoints" / "segments", [], 0.0

    def start_clock(progress: Any, metrics: Any, state: Any) -> None:
        nonlocal began
        began = time.perf_counter()

    def files() -> set[int]:
        return {path.stat().st_ino for path in segments.iterdir()} if segments.exists() else set()

    every = capacity // 10
    before: set[int] = set()
    for count in (12, 13, 14):
        target = count * every
        if count == 12:
            polyak.train.run(
                agent, env, env_steps=target, seed=0, run_dir=run, report_every=target, checkpoint_every=target,
                callbacks=[start_clock], progress=False,
            )  # fmt: skip
        else:
            polyak.resume(run, env=env, agent=agent, env_steps=target, callbacks=[start_clock], progress=False, force=True)
        seconds = time.perf_counter() - began
        newest = max((path for path in segments.parent.iterdir() if path.name.isdigit()), key=lambda path: path.name)
        size = sum(path.stat().st_size for path in segments.iterdir() if path.stat().st_ino not in before)
        size += sum(path.stat().st_size for path in newest.iterdir())
        saves.append((target, size, seconds))
        before = files()
    return saves


if __name__ == "__main__":
    main()
