"""Time of updating a target: polyak, Optax, TF-Agents, Stable-Baselines3, torch's lerp, and the memory's limit, taking turns.

    python benchmarks/updates.py [--quick] [--large] [--json PATH]

Cases: 25M parameters in 48 leaves (with --large also 100M in 192), the target donated or not; an update that is not due,
donated; an MLP of 72k parameters, one call each and inside a scan. Contestants beside the libraries:

limit   a triad of the same size, `a <- a + 0.005 b` on one array in place, which moves the same 12 bytes a parameter
floor   a program of the same arguments and results that does nothing: what JAX takes to call it
traced  polyak with tau as an argument of the compiled program, as in `NetworkCopies`
soft    polyak with a soft update that is not due, where `optax.periodic_update` and the contestant polyak have a hard one.
        XLA runs a program that might compute much on a thread of its own, which costs more than a call in place
unchecked   polyak with a hard update that is not due and does not look for NaN (`check_finite=False`), as in Optax
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from harness import Pace, arguments, median, ratios, report, spread, table, take_turns, times, verdict
from peers import python_if_possible, python_of

TAU, PERIOD, SCANNED = 0.005, 1_000_000, 1000
MLP = [(17, 256), (256,), (256, 256), (256,), (256, 6), (6,)]
# case: contestants, calls in a turn, what polyak is compared with, its least ratio to that, its longest time in us
CASES: dict[str, tuple[tuple[str, ...], int, str, float | None, float | None]] = {
    "25M donated": (("limit", "polyak", "traced", "optax", "tf_agents", "sb3", "lerp"), 10, "limit", 0.9, None),
    # Nothing is wanted here: fresh memory for the result costs more than the update, and as it happens.
    "25M": (("polyak", "optax"), 10, "optax", None, None),
    "25M not due": (("floor", "polyak", "unchecked", "soft", "optax"), 2000, "optax", 0.9, 100.0),
    "MLP": (("polyak", "traced", "optax", "tf_agents"), 8000, "optax", None, 45.0),
    "MLP scan": (("polyak", "traced", "optax"), 20, "optax", 0.95, 11.0),
}
LARGE: dict[str, tuple[tuple[str, ...], int, str, float | None, float | None]] = {
    "100M donated": (("limit", "polyak", "traced", "optax", "tf_agents", "sb3", "lerp"), 5, "limit", 0.9, None),
    "100M not due": (("floor", "polyak", "soft", "optax"), 500, "optax", 0.9, None),
}
TORCH = ("sb3", "lerp")
WORKERS = ("limit", "floor", "polyak", "traced", "soft", "unchecked", "optax", "tf_agents", *TORCH)


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
    online, target, carried = make(1.0), make(0.0), carried_first(contestant, case)
    update = update_of(contestant, case)
    if case == "MLP scan":
        once = update

        def update(online: Any, target: Any, carried: Any) -> Any:
            body = lambda carry, _: (once(online, *carry), None)  # noqa: E731
            return jax.lax.scan(body, (target, carried), None, length=SCANNED)[0]

    donated = () if case in ("25M", "100M") else (1, 2)
    step = jax.jit(update, donate_argnums=donated).lower(online, target, carried).compile()
    done = 0
    while True:
        for _ in range(calls):
            target, carried = step(online, target, carried)
        jax.block_until_ready(target)
        done += calls * (SCANNED if case == "MLP scan" else 1)
        pace.lap(done)


def carried_first(contestant: str, case: str) -> Any:
    """What goes with the target from call to call: a count that tells whether an update is due, or tau."""
    import jax.numpy as jnp

    from polyak.copies.follow import Follow

    if contestant in ("polyak", "soft", "unchecked") and "due" in case:
        return Follow().init()
    return jnp.full((), TAU, jnp.float32) if contestant == "traced" else jnp.ones((), jnp.int32)


def update_of(contestant: str, case: str) -> Callable[[Any, Any, Any], tuple[Any, Any]]:
    """`(online, target, carried)` to the target and what it carries after one call."""
    import jax
    import optax

    from polyak.copies.follow import Follow
    from polyak.ops.updates import soft_update

    match contestant, "due" in case:
        case "polyak" | "soft" | "unchecked", True:
            follow = Follow(TAU if contestant == "soft" else 1.0, PERIOD, check_finite=contestant != "unchecked")
            return lambda online, target, state: follow.step(state, online, target)
        case "optax", True:
            return lambda online, target, n: (optax.periodic_update(online, target, n, PERIOD), n % (PERIOD - 1) + 1)
        case "floor", _:
            return lambda online, target, n: (target, n % (PERIOD - 1) + 1)
        case "polyak", _:
            return lambda online, target, n: (soft_update(online, target, TAU), n)
        case "traced", _:
            return lambda online, target, tau: (soft_update(online, target, tau), tau)
        case "optax", _:
            return lambda online, target, n: (optax.incremental_update(online, target, TAU), n)
        case _:
            return lambda online, target, n: (jax.tree.map(lambda b, a: a + TAU * b, online, target), n)


def tf_agents_worker(contestant: str, case: str, calls: int) -> None:
    import tensorflow as tf
    import tf_agents
    from tf_agents.utils import common

    pace = Pace(tf_agents=tf_agents.__version__, tensorflow=tf.__version__)
    online, target = ([tf.Variable(tf.fill(shape, value)) for shape in shapes(case, contestant)] for value in (1.0, 0.0))

    @tf.function  # type: ignore[untyped-decorator]
    def step() -> None:
        common.soft_variables_update(online, target, TAU)

    done = 0
    while True:
        for _ in range(calls):
            step()
        done += calls
        pace.lap(done)


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
    parser.add_argument("--worker", choices=WORKERS, help="(what it starts itself with)")
    parser.add_argument("--case", choices=[*CASES, *LARGE])
    parser.add_argument("--calls", type=int, default=1)
    args = parser.parse_args()
    if args.worker:
        worker = {"tf_agents": tf_agents_worker} | dict.fromkeys(TORCH, torch_worker)
        worker.get(args.worker, jax_worker)(args.worker, args.case, args.calls)
        return

    cases = CASES | (LARGE if args.large else {})
    measured = {case: compare(case, cases[case], args.quick, args.rounds) for case in cases}
    rows = [row for case in cases for row in rows_of(case, cases[case], measured[case])]
    text = table(["case", "contestant", "us per update", "polyak's speed over it", "target"], rows)
    report(text, {"benchmark": "updates", "quick": args.quick, "by_case": measured}, args.json)


def compare(case: str, about: tuple[Any, ...], quick: bool, rounds: int) -> dict[str, Any]:
    """Microseconds per update of all that there are, in turns."""
    interpreters = {name: interpreter(name) for name in about[0]}
    me = Path(__file__).resolve()
    count = str(max(1, about[1] // 10) if quick else about[1])
    commands = {
        name: [python, me, "--worker", name, "--case", case, "--calls", count]
        for name, python in interpreters.items()
        if python is not None
    }
    rates, versions = take_turns(commands, 2 if quick else rounds)
    us = {name: [1e6 / rate for rate in its] for name, its in rates.items()}
    faster = {name: ratios(rates, "polyak", name) for name in us if name != "polyak"}
    return {"us": us, "ratios": faster, "versions": versions}


def interpreter(contestant: str) -> str | Path | None:
    """Torch and TensorFlow live in the peers' environments; None where there can be no such environment."""
    if contestant in TORCH:
        return python_of("sb3")
    return python_if_possible("tf_agents") if contestant == "tf_agents" else sys.executable


def rows_of(case: str, about: tuple[Any, ...], measured: dict[str, Any]) -> list[list[str]]:
    """The table's lines for one case."""
    _, _, against, least, most = about
    rows = []
    for name in measured["us"]:
        us = measured["us"][name]
        ratio = measured["ratios"].get(name)
        wanted = ""
        if name in ("polyak", "traced", "soft") and most is not None:
            wanted = f"{'yes' if median(us) <= most else 'NO'} (<= {most:g} us)"
        if name == against and least is not None:
            wanted = verdict(median(ratio), least)
        rows.append([case, name, spread(us, "{:.1f}".format), spread(ratio, times) if ratio else "", wanted])
    return rows


if __name__ == "__main__":
    main()
