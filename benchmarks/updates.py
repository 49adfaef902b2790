"""Time of updating a target: polyak, Optax, Stable-Baselines3, torch's fused lerp, and the memory's own limit, taking turns.

    python benchmarks/updates.py [--quick] [--large] [--json PATH]

Cases: 25M parameters in 48 leaves (with --large also 100M in 192), the target donated or not; an update that is not due,
donated; an MLP of 72k parameters, one call each and inside a scan. The limit is a triad of the same size, `a <- a + 0.005 b` on
one array in place, which moves the same 12 bytes a parameter.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Pace, arguments, median, ratios, report, spread, table, take_turns, times, verdict
from peers import python_of

TAU, PERIOD, SCANNED = 0.005, 1_000_000, 1000
MLP = [(17, 256), (256,), (256, 256), (256,), (256, 6), (6,)]
# case: contestants, calls in a turn, what polyak is compared with, its least ratio to that, its longest time in us
CASES: dict[str, tuple[tuple[str, ...], int, str, float, float | None]] = {
    "25M donated": (("limit", "polyak", "optax", "sb3", "lerp"), 10, "limit", 0.9, None),
    "25M": (("polyak", "optax"), 5, "optax", 0.95, None),
    "25M not due": (("polyak", "optax"), 500, "optax", 0.9, 100.0),
    "MLP": (("polyak", "optax"), 2000, "optax", 0.95, 45.0),
    "MLP scan": (("polyak", "optax"), 20, "optax", 0.95, 11.0),
}
LARGE: dict[str, tuple[tuple[str, ...], int, str, float, float | None]] = {
    "100M donated": (("limit", "polyak", "optax", "sb3", "lerp"), 5, "limit", 0.9, None),
    "100M not due": (("polyak", "optax"), 200, "optax", 0.9, 100.0),
}


def shapes(case: str, contestant: str) -> list[tuple[int, ...]]:
    """Those of the leaves; one for the limit."""
    if case.startswith("MLP"):
        return list(MLP)
    millions, leaves = (25, 48) if case.startswith("25M") else (100, 192)
    each = millions * 1_000_000 // leaves // 64 * 64
    return [(each * leaves,)] if contestant == "limit" else [(each,)] * leaves


def jax_worker(contestant: str, case: str, calls: int) -> None:
    import jax
    import jax.numpy as jnp

    pace = Pace(jax=jax.__version__)
    make = jax.jit(lambda value: [jnp.full(shape, value, jnp.float32) for shape in shapes(case, contestant)])
    online, target, counted = make(1.0), make(0.0), first_count(contestant, case)
    update = update_of(contestant, case)
    if case == "MLP scan":
        once = update

        def update(online: Any, target: Any, counted: Any) -> Any:
            body = lambda carry, _: (once(online, *carry), None)  # noqa: E731
            return jax.lax.scan(body, (target, counted), None, length=SCANNED)[0]

    donated = () if case in ("25M", "100M") else (1, 2)
    step = jax.jit(update, donate_argnums=donated).lower(online, target, counted).compile()
    done = 0
    while True:
        for _ in range(calls):
            target, counted = step(online, target, counted)
        jax.block_until_ready(target)
        done += calls * (SCANNED if case == "MLP scan" else 1)
        pace.lap(done)


def first_count(contestant: str, case: str) -> Any:
    """What tells the contestant whether an update is due."""
    import jax.numpy as jnp

    from polyak.ops.follow import Follow

    return Follow().init() if contestant == "polyak" and "due" in case else jnp.ones((), jnp.int32)


def update_of(contestant: str, case: str) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """`(online, target, counted)` to the target and the count after one call."""
    import jax
    import optax

    from polyak.ops.follow import Follow
    from polyak.ops.updates import soft_update

    match contestant, "due" in case:
        case "polyak", True:
            follow = Follow(TAU, PERIOD)
            return lambda online, target, state: follow.step(state, online, target)
        case "optax", True:
            return lambda online, target, n: (optax.periodic_update(online, target, n, PERIOD), n % (PERIOD - 1) + 1)
        case "polyak", _:
            return lambda online, target, state: (soft_update(online, target, TAU), state)
        case "optax", _:
            return lambda online, target, n: (optax.incremental_update(online, target, TAU), n)
        case _:
            return lambda online, target, n: (jax.tree.map(lambda b, a: a + TAU * b, online, target), n)


def torch_worker(contestant: str, case: str, calls: int) -> None:
    import torch
    from stable_baselines3.common.utils import polyak_update

    pace = Pace(torch=torch.__version__)
    online, target = ([torch.full(shape, value) for shape in shapes(case, contestant)] for value in (1.0, 0.0))
    done = 0
    while True:
        for _ in range(calls):
            if contestant == "sb3":
                polyak_update(online, target, TAU)
            else:
                torch._foreach_lerp_(target, online, TAU)
        done += calls
        pace.lap(done)


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--rounds", type=int, default=9, help="measurements of each")
    parser.add_argument("--large", action="store_true", help="also 100M parameters (0.8 GB a contestant)")
    parser.add_argument("--worker", choices=["limit", "polyak", "optax", "sb3", "lerp"], help="(what it starts itself with)")
    parser.add_argument("--case", choices=[*CASES, *LARGE])
    parser.add_argument("--calls", type=int, default=1)
    args = parser.parse_args()
    if args.worker:
        (torch_worker if args.worker in ("sb3", "lerp") else jax_worker)(args.worker, args.case, args.calls)
        return

    cases = CASES | (LARGE if args.large else {})
    measured = {case: compare(case, cases[case], args.quick, args.rounds) for case in cases}
    rows = [row for case in cases for row in rows_of(case, cases[case], measured[case])]
    text = table(["case", "contestant", "us per update", "polyak's speed over it", "target"], rows)
    report(text, {"benchmark": "updates", "quick": args.quick, "by_case": measured}, args.json)


def compare(case: str, about: tuple[Any, ...], quick: bool, rounds: int) -> dict[str, Any]:
    """Microseconds per update of all, in turns."""
    contestants, calls = about[:2]
    me = Path(__file__).resolve()
    count = str(max(1, calls // 10) if quick else calls)
    commands = {name: [interpreter(name), me, "--worker", name, "--case", case, "--calls", count] for name in contestants}
    rates, versions = take_turns(commands, 2 if quick else rounds)
    us = {name: [1e6 / rate for rate in its] for name, its in rates.items()}
    faster = {name: ratios(rates, "polyak", name) for name in contestants if name != "polyak"}
    return {"us": us, "ratios": faster, "versions": versions}


def interpreter(contestant: str) -> str | Path:
    """Torch lives in the peer's environment."""
    return python_of("sb3") if contestant in ("sb3", "lerp") else sys.executable


def rows_of(case: str, about: tuple[Any, ...], measured: dict[str, Any]) -> list[list[str]]:
    """The table's lines for one case."""
    contestants, _, against, least, most = about
    rows = []
    for name in contestants:
        us = measured["us"][name]
        ratio = measured["ratios"].get(name)
        wanted = ""
        if name == "polyak" and most is not None:
            wanted = f"{'yes' if median(us) <= most else 'NO'} (<= {most:g} us)"
        if name == against:
            wanted = verdict(median(ratio), least)
        rows.append([case, name, spread(us, "{:.1f}".format), spread(ratio, times) if ratio else "", wanted])
    return rows


if __name__ == "__main__":
    main()
