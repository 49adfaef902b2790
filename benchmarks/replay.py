"""Time of adding to a replay, of sampling 256 transitions from it and of setting their priorities, by capacity.

Observations of 17 numbers, 4 environments x 1 step a rollout, 3-step transitions, a full replay; each operation inside a scan,
on one thread. Sampling and setting are the differences to adding alone, and to adding and sampling.
"""

import argparse
import sys
from functools import partial
from pathlib import Path
from typing import Any

from harness import Pace, arguments, few_threads, median, report, spread, table, take_turns

CAPACITIES = (10_000, 100_000, 1_000_000)
# What is done in each step of the scan, and the most that it may take at the largest capacity.
OPERATIONS = {
    "uniform: add and sample": 50.0,
    "prioritized: add": None,
    "prioritized: add and sample": None,
    "prioritized: add, sample and set": None,
}
NUM_ENVS, OBS, BATCH = 4, 17, 256


def worker(operation: str, capacity: int, steps: int) -> None:
    few_threads(1)
    import jax
    import jax.numpy as jnp

    from polyak import Rollout, TimeStep
    from polyak.replay import PrioritizedReplay, UniformReplay

    pace = Pace(jax=jax.__version__)
    is_prioritized = operation.startswith("prioritized")
    replay = PrioritizedReplay(capacity, beta=0.5) if is_prioritized else UniformReplay(capacity)

    def rollout(key: Any) -> Rollout:
        obs = jax.random.normal(key, (2, NUM_ENVS, OBS))
        no = jnp.zeros((2, NUM_ENVS), bool)
        return Rollout(TimeStep(obs, jnp.ones((2, NUM_ENVS)), no, no, no), jnp.zeros((1, NUM_ENVS), jnp.int32))

    def step(new: Rollout, carry: Any, key: Any) -> Any:
        state, total = carry
        state = replay.add(state, new)
        if "sample" in operation:
            batch = replay.sample(state, key, BATCH, num_envs=NUM_ENVS, n_step=3, gamma=0.99)
            total += batch.weight.sum() + batch.reward.sum() + batch.obs.sum() + batch.next_obs.sum()
            if "set" in operation:
                state = replay.set_priorities(state, batch.index, jnp.abs(batch.obs[:, 0]))
        return (state, total), None

    def fill(state: Any, keys: Any) -> Any:
        return jax.lax.scan(lambda state, key: (replay.add(state, rollout(key)), None), state, keys)[0]

    state = jax.jit(partial(replay.init, num_steps=1))(jnp.zeros(OBS), jnp.zeros((), jnp.int32))
    state = jax.jit(fill, donate_argnums=0)(state, jax.random.split(jax.random.key(0), capacity // NUM_ENVS))
    scan = jax.jit(partial(jax.lax.scan, partial(step, rollout(jax.random.key(1)))), donate_argnums=0)
    keys = jax.random.split(jax.random.key(2), steps)
    carry = state, jnp.zeros(())
    done = 0
    while True:
        carry, _ = jax.block_until_ready(scan(carry, keys))
        done += steps
        pace.lap(done)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=15, help="measurements of each")
    parser.add_argument("--worker", choices=list(OPERATIONS), help="(what it starts itself with)")
    parser.add_argument("--capacity", type=int, default=CAPACITIES[-1])
    parser.add_argument("--steps", type=int, default=1_000)
    args = parser.parse_args()
    if args.worker:
        worker(args.worker, args.capacity, args.steps)
        return
    measured = {name: {n: measure(name, n, args) for n in CAPACITIES} for name in OPERATIONS}
    rows = [
        [name, *[spread(us, "{:.1f}".format) for us in measured[name].values()], most_of(measured[name][CAPACITIES[-1]], most)]
        for name, most in OPERATIONS.items()
    ]
    full, sampled, added = (measured[name] for name in reversed(list(OPERATIONS)[1:]))
    for name, more, less in (("prioritized: sample", sampled, added), ("prioritized: set", full, sampled)):
        difference = [median(more[n]) - median(less[n]) for n in CAPACITIES]
        rows.append([name, *[f"{us:.1f}" for us in difference], most_of([difference[-1]], 100.0)])
    text = table(["us a step", *[f"capacity {n:,}" for n in CAPACITIES], "target"], rows)
    report(text, {"benchmark": "replay", "quick": args.quick, "us": measured}, args.json)


def measure(operation: str, capacity: int, args: argparse.Namespace) -> list[float]:
    """Microseconds a step."""
    steps = 100 if args.quick else args.steps
    command = [sys.executable, Path(__file__), "--worker", operation, "--capacity", str(capacity), "--steps", str(steps)]
    rates, _ = take_turns({operation: command}, 2 if args.quick else args.rounds)
    return [1e6 / rate for rate in rates[operation]]


def most_of(us: list[float], most: float | None) -> str:
    """Whether the target is met, with the target."""
    return "" if most is None else f"{'yes' if median(us) <= most else 'NO'} (<= {most:g} us)"


if __name__ == "__main__":
    main()
