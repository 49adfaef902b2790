"""What a step of a Python policy costs: polyak in a scan and in a host loop, TF-Agents in tf.function and tf.while_loop.

    python benchmarks/python_policy.py [--quick] [--json PATH]

The policy is the same rule in NumPy, on observations of 4 numbers, for a batch of 1 and of 64, with the checks of each library.
The time of the Python call itself is measured too: in a host loop what counts is what comes on top of it.

scan    polyak.PythonPolicy inside jax.lax.scan, by an ordered callback
host    the same policy as the host loop calls it, directly
call    the rule alone
inside  turned inside out: Python calls the rule, and then a compiled step
tf_function, tf_while_loop   TFPyPolicy around a PyPolicy, one call of a tf.function a step, and in one graph
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from harness import Pace, arguments, median, report, spread, table, take_turns
from peers import python_if_possible

BATCHES = (1, 64)
OURS = ("scan", "host", "call", "inside")
THEIRS = ("tf_function", "tf_while_loop")
SCANNED = 1000
MOST_IN_SCAN, MOST_BEYOND_THE_CALL = 55.0, 10.0


def rule(obs: Any) -> Any:
    return (3 * obs[:, 2] + obs[:, 3] > 0).astype(np.int32)


def polyak_steps(contestant: str, batch: int) -> Callable[[], None]:
    """A thousand steps."""
    import jax
    import jax.numpy as jnp

    import polyak

    env = polyak.envs.make("jax/CartPole-v1", num_envs=batch)
    policy = polyak.PythonPolicy(rule, env.spec, deterministic=True)
    obs, no = jnp.full((batch, 4), 0.1), jnp.zeros(batch, bool)

    def moved(obs: Any, action: Any) -> Any:
        return -obs + 0 * action[:, None].astype(jnp.float32)

    def step(obs: Any, _: Any) -> Any:
        now = polyak.TimeStep(obs, jnp.zeros(batch), no, no, no)
        return moved(obs, policy.action(now, (), jax.random.key(0)).action), None

    scanned = jax.jit(lambda obs: jax.lax.scan(step, obs, None, SCANNED)[0])
    jitted, act = jax.jit(moved), policy.direct_call()
    now = jax.tree.map(np.asarray, polyak.TimeStep(obs, jnp.zeros(batch), no, no, no))

    def host() -> None:
        for _ in range(SCANNED):
            act(now, (), None)

    def call() -> None:
        for _ in range(SCANNED):
            rule(now.obs)

    def inside() -> None:
        seen: Any = now.obs
        for _ in range(SCANNED):
            seen = jitted(seen, rule(np.asarray(seen)))
        seen.block_until_ready()

    return {"scan": lambda: scanned(obs).block_until_ready(), "host": host, "call": call, "inside": inside}[contestant]


def tf_agents_steps(contestant: str, batch: int) -> Callable[[], None]:
    """The same with TF-Agents."""
    import tensorflow as tf
    from tf_agents.policies import py_policy, tf_py_policy
    from tf_agents.specs import array_spec
    from tf_agents.trajectories import policy_step, time_step

    obs_spec = array_spec.ArraySpec((4,), np.float32)
    action_spec = array_spec.BoundedArraySpec((), np.int32, 0, 1)

    class Rule(py_policy.PyPolicy):
        def _action(self, time_step: Any, policy_state: Any, seed: Any = None) -> Any:
            # It hands an unbatched policy (batch of 1) one observation, and puts the batch back.
            obs = time_step.observation
            return policy_step.PolicyStep(rule(obs[None])[0] if obs.ndim == 1 else rule(obs), policy_state, ())

    policy = tf_py_policy.TFPyPolicy(Rule(time_step.time_step_spec(obs_spec), action_spec), py_policy_is_batched=batch > 1)
    first = time_step.restart(tf.fill((batch, 4), 0.1), batch_size=batch)
    act = tf.function(lambda now: policy.action(now).action)

    def body(i: Any, obs: Any) -> Any:
        action = policy.action(first._replace(observation=obs)).action
        # A py_function's result has no shape, which a loop must have.
        return i + 1, tf.ensure_shape(-obs + 0 * tf.cast(action, tf.float32)[:, None], (batch, 4))

    looped = tf.function(lambda: tf.while_loop(lambda i, _: i < SCANNED, body, (0, first.observation)))

    def function() -> None:
        for _ in range(SCANNED):
            act(first)

    return function if contestant == "tf_function" else lambda: looped()


def work(contestant: str, batch: int, count: int) -> None:
    pace = Pace()
    thousand = (polyak_steps if contestant in OURS else tf_agents_steps)(contestant, batch)
    thousand()
    done = 0
    while True:
        pace.lap(done)
        for _ in range(count):
            thousand()
        done += count * SCANNED


def microseconds(rates: list[float]) -> list[float]:
    return [1e6 / rate for rate in rates]


def main() -> None:
    parser = arguments(__doc__ or "")
    parser.add_argument("--rounds", type=int, default=7, help="measurements of each")
    parser.add_argument("--worker", choices=[*OURS, *THEIRS], help="(what the benchmark starts itself with)")
    parser.add_argument("--batch", type=int, default=1, help="(likewise)")
    parser.add_argument("--count", type=int, default=5, help="thousands of steps in a measurement")
    args = parser.parse_args()
    if args.worker:
        work(args.worker, args.batch, args.count)
        return

    count, rounds = (1, 2) if args.quick else (args.count, args.rounds)
    me, peer = Path(__file__).resolve(), python_if_possible("tf_agents")
    pythons = {name: sys.executable for name in OURS} | ({name: peer for name in THEIRS} if peer else {})
    rows, result = [], {}
    for batch in BATCHES:
        commands = {
            name: [python, me, "--worker", name, "--batch", str(batch), "--count", str(count)]
            for name, python in pythons.items()
        }
        rates, _ = take_turns(commands, rounds)
        times = {name: microseconds(measured) for name, measured in rates.items()}
        result[str(batch)] = times
        beyond = [host - call for host, call in zip(times["host"], times["call"], strict=True)]
        rows += [[batch, name, spread(measured, "{:.1f}".format), wanted(name, measured)] for name, measured in times.items()]
        rows.append([batch, "host - call", spread(beyond, "{:.1f}".format), wanted("beyond", beyond)])
    text = table(["batch", "", "µs a step", "target"], rows)
    report(text, {"benchmark": "python_policy", "microseconds": result, "quick": args.quick, "count": count}, args.json)


def wanted(name: str, measured: list[float]) -> str:
    most = {"scan": MOST_IN_SCAN, "beyond": MOST_BEYOND_THE_CALL}.get(name)
    return "" if most is None else f"{'yes' if median(measured) <= most else 'NO'} (<= {most:g})"


if __name__ == "__main__":
    main()
