"""N critics as products with a leading axis N, as `polyak.Critics` computes them, against one network after another.

    python benchmarks/critics.py [--quick] [--json PATH]

The loss of a batch of 256 and its gradient, with layers of (256, 256) and the 17 + 6 numbers of HalfCheetah-v5. Both are
compiled and warm, and take turns in one process with one thread; the ratio is that of neighbours in time.
"""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from harness import arguments, few_threads, report, spread, table, times

few_threads(1)

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

import polyak  # noqa: E402
from polyak.core.spaces import Box, EnvSpec  # noqa: E402

SPEC = EnvSpec(Box(-jnp.inf, jnp.inf, (17,)), Box(-1.0, 1.0, (6,)))
BATCH = 256


def together(number: int) -> tuple[Callable[..., Any], Any]:
    """The loss of all, and their parameters."""
    return losses(number, 1)


def one_after_another(number: int) -> tuple[Callable[..., Any], Any]:
    """The loss of N networks of one critic each, in one program, and their parameters."""
    return losses(1, number)


def losses(critics: int, networks: int) -> tuple[Callable[..., Any], Any]:
    network = polyak.Critics(num_critics=critics)
    variables = [network.init(key, SPEC) for key in jax.random.split(jax.random.key(0), networks)]

    def loss(params: Any, obs: Any, action: Any, target: Any) -> Any:
        each = [network.apply(replace(v, params=p), (obs, action))[0][0] for v, p in zip(variables, params, strict=True)]
        return jnp.square(jnp.concatenate(each, axis=-1) - target[:, None]).sum()

    return loss, [made.params for made in variables]


def measure(call: Callable[[], Any], repetitions: int) -> float:
    """Milliseconds of a call."""
    start = time.perf_counter()
    for _ in range(repetitions):
        jax.block_until_ready(call())
    return 1e3 * (time.perf_counter() - start) / repetitions


def main() -> None:
    args = arguments(__doc__ or "").parse_args()
    rounds, repetitions = (2, 2) if args.quick else (15, 20)
    keys = jax.random.split(jax.random.key(1), 3)
    batch = [jax.random.normal(key, shape) for key, shape in zip(keys, ((BATCH, 17), (BATCH, 6), (BATCH,)), strict=True)]
    rows, result = [], {}
    for number in (2, 10):
        calls = {}
        for form in (together, one_after_another):
            loss, params = form(number)
            gradient = jax.jit(jax.value_and_grad(loss))
            calls[form.__name__] = lambda gradient=gradient, params=params: gradient(params, *batch)
            measure(calls[form.__name__], 3)
        taken: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds):
            for name, call in calls.items():
                taken[name].append(measure(call, repetitions))
        ratio = [b / a for a, b in zip(*taken.values(), strict=True)]
        rows.append([number, *(spread(ms, times) for ms in taken.values()), spread(ratio, times)])
        result[str(number)] = {**taken, "ratio": ratio}
    text = table(["critics", "together, ms", "one after another, ms", "time of one after another / together"], rows)
    report(text, {"benchmark": "critics", "quick": args.quick, **result}, args.json)


if __name__ == "__main__":
    main()
