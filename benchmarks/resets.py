"""Environment steps per second without resets, with a reset in every step, and with a pool of initial states, taking turns.

    python benchmarks/resets.py playground/CheetahRun [ENV ...] [--num-envs 64] [--skip-every] [--quick] [--json PATH]

Random actions, episodes as they come. `ready` never resets: its environments stay in their last states, which costs least.
`every` computes initial states of all environments in every step, which some environments take minutes to compile.
All are compiled and warm, and take turns in one process; the ratio is that of neighbours in time.
"""

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from harness import arguments, report, spread, steps, table, times

import polyak
from polyak.core.spaces import EnvSpec
from polyak.envs.autoreset import AutoReset
from polyak.policies.scripted import uniform_over

Loop = Callable[[Any, Any], tuple[Any, tuple[Any, Any]]]


def ready(env: AutoReset) -> tuple[Any, Loop]:
    """Dynamics alone; the sums of rewards and observations are outputs, so that nothing is optimized away."""

    def step(state: Any, key: Any) -> tuple[Any, tuple[Any, Any]]:
        action = env.spec.native_action(draw(env.spec, env.num_envs, key))
        state, reward, terminated, truncated = env.dynamics.step(state, action, jax.random.fold_in(key, 1))
        seen = sum(jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves(env.dynamics.observe(state)))
        return state, (jnp.sum(reward) + seen, jnp.sum(terminated | truncated))

    return env.dynamics.reset(jax.random.key(0), env.num_envs), step


def resetting(env: AutoReset) -> tuple[Any, Loop]:
    def step(state: Any, key: Any) -> tuple[Any, tuple[Any, Any]]:
        state, time_step = env.step(state, draw(env.spec, env.num_envs, key), jax.random.fold_in(key, 1))
        seen = sum(jnp.sum(x, dtype=jnp.float32) for x in jax.tree.leaves(time_step.obs))
        return state, (jnp.sum(time_step.reward) + seen, jnp.sum(time_step.first))

    return env.init(jax.random.key(0))[0], step


def draw(spec: EnvSpec, num_envs: int, key: Any) -> Any:
    """Random actions."""
    return uniform_over(spec, num_envs).sample(seed=key)


def measure(name: str, num_envs: int, *, skip_every: bool, num_steps: int, rounds: int) -> dict[str, dict[str, Any]]:
    """Rates, seconds to compile and resets of each contestant."""
    made: Any = polyak.envs.make(name, num_envs=num_envs)
    pool = made.reset_pool or -(-num_envs // 8)
    remake = partial(AutoReset, made.dynamics, num_envs, made.spec.action_scaling)
    makers = {"ready": partial(ready, made), "every": partial(resetting, remake()), "pool": partial(resetting, remake(pool))}
    found: dict[str, dict[str, Any]] = {}
    for contestant, make in makers.items():
        if contestant == "every" and skip_every:
            continue
        state, step = make()

        def run(state: Any, key: Any, step: Loop = step) -> Any:
            state, (sums, ends) = jax.lax.scan(step, state, jax.random.split(key, num_steps))
            return state, sums.sum(), ends.sum()

        start = time.perf_counter()
        # A copy, as two names may have one buffer in a fresh state.
        state = jax.tree.map(jnp.array, state)
        program = jax.jit(run, donate_argnums=0).lower(state, jax.random.key(1)).compile()
        compiled = time.perf_counter() - start
        found[contestant] = {"program": program, "state": state, "rates": [], "ends": 0, "seconds_to_compile": compiled}
    for number in range(rounds + 1):
        for each in found.values():
            start = time.perf_counter()
            each["state"], _, ends = jax.block_until_ready(each["program"](each["state"], jax.random.key(number)))
            if number:
                each["rates"].append(num_steps * num_envs / (time.perf_counter() - start))
                each["ends"] += int(ends)
    kept = ("rates", "ends", "seconds_to_compile")
    return {contestant: {field: each[field] for field in kept} for contestant, each in found.items()}


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("envs", nargs="+", metavar="ENV")
    parser.add_argument("--num-envs", type=int, default=64)
    parser.add_argument("--num-steps", type=int, default=100, help="steps of each environment in a turn")
    parser.add_argument("--skip-every", action="store_true", help="without a reset in every step")
    args = parser.parse_args()
    rows, result = [], {}
    for name in args.envs:
        found = measure(
            name, args.num_envs, skip_every=args.skip_every, num_steps=args.num_steps, rounds=2 if args.quick else 7
        )
        for contestant, each in found.items():
            slower = [a / b for a, b in zip(found["ready"]["rates"], each["rates"], strict=True)]
            seconds = f"{each['seconds_to_compile']:.0f}"
            ends = "" if contestant == "ready" else each["ends"]
            rows.append([name, contestant, spread(each["rates"], steps), spread(slower, times), ends, seconds])
        result[name] = found
    header = ["environment", "initial states", "env_steps/s", "time / ready", "ends", "compiled in, s"]
    report(table(header, rows), {"benchmark": "resets", "num_envs": args.num_envs, "quick": args.quick, **result}, args.json)


if __name__ == "__main__":
    main()
