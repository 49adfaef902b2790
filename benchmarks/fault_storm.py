"""Faults at random in runs of four workers: what is noticed when, what is lost, and whether a bit of the result differs.

    python benchmarks/fault_storm.py [--quick] [--faults N] [--ray-faults N] [--seed N] [--json PATH]

PPO on CartPole, 16 environments, rollouts of 8 steps. `in process`: workers in this process, whose calls die, hang, are slow,
return an earlier rollout, raise, or return NaN, other shapes, huge numbers or garbage. `Ray`: processes that are killed, exit,
crash, are stopped, or step for ever. The engines are the workers' own with faults put in; everything else is public.

`lost` counts valid transitions that workers returned and nobody learned from. A run that takes ten times as long as it should
has hung, and ends the script. Where a fault ends episodes by design, two runs with the same faults must have the same bits.
"""

import collections
import dataclasses
import faulthandler
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import gymnasium
import jax
import numpy as np
from gymnasium.envs.classic_control import CartPoleEnv
from harness import arguments, few_threads, report, table

import polyak
from polyak.train import Workers
from polyak.workers.in_process_workers import InProcessWorkers
from polyak.workers.ray_workers import RayWorkers
from polyak.workers.rollout_worker import Failure, WorkerRollout, WorkerStart
from polyak.workers.supervise import WorkerLost

WORKERS, NUM_ENVS, NUM_STEPS = 4, 16, 8
TIMEOUT, RAY_TIMEOUT = 0.3, 3.0
SLOW = 0.2
"""Seconds of a rollout that takes 100 times as long as it should, in process."""

TRACELESS = ("dies before", "dies after", "hangs", "returns too late", "100 times slower", "returns an earlier rollout")
COSTLY = ("raises", "NaN", "other shapes", "huge", "garbage")
IN_RAY = ("SIGKILL", "os._exit", "segfault", "SIGSEGV", "SIGSTOP", "endless step", "100 times slower")
TIMES, TARGET = ("dead_seconds", "hung_seconds"), 0.1
AT_START = 0.02
"""Share of new workers that die before they have started."""


class FaultyCartPole(CartPoleEnv):
    """CartPole with 2 ms a step; a file named like its process tells it what to do in its next step."""

    orders: str | None = None

    def step(self, action: Any) -> Any:
        """Step, after what the file says."""
        if self.orders is not None:
            time.sleep(0.002)
            order = Path(self.orders) / str(os.getpid())
            if order.exists():
                kind = order.read_text()
                order.unlink()
                fail(kind)
        return super().step(action)

    def get_state(self) -> dict[str, Any]:
        """The numbers that a step changes."""
        beyond = self.steps_beyond_terminated
        return {"state": np.array(self.state, np.float64), "beyond": -1 if beyond is None else beyond}

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from there."""
        self.state = state["state"]
        self.steps_beyond_terminated = None if state["beyond"] < 0 else state["beyond"]


def fail(kind: str) -> None:
    """What happens inside a step."""
    if kind == "os._exit":
        os._exit(0)
    elif kind == "segfault":
        import ctypes

        ctypes.string_at(0)
    elif kind == "endless step":
        while True:
            pass
    elif kind == "100 times slower":
        time.sleep(0.2)


def make_env(orders: str | None = None) -> Callable[[], gymnasium.Env[Any, Any]]:
    def make() -> gymnasium.Env[Any, Any]:
        env = FaultyCartPole()
        env.orders = orders
        return gymnasium.wrappers.TimeLimit(env, 500)

    return make


@dataclasses.dataclass(eq=False)
class Call:
    """A call in this process: what it returns and when, and whether that is learned from."""

    result: Any
    returns_at: float = 0.0
    is_right: bool = False


@dataclasses.dataclass
class Fault:
    """A fault; it can be noticed from `since` on."""

    kind: str
    since: float
    noticed: float | None = None


class Storm(InProcessWorkers):
    """Workers in this process, whose calls fail at random.

    Args:
        seed: of the faults.
        kinds: which.
        count: how many.
    """

    def __init__(self, seed: int, kinds: Sequence[str], count: int) -> None:
        super().__init__()
        self.faults: list[Fault] = []
        self.valid: collections.Counter[int] = collections.Counter()
        self._kinds, self._left = kinds, dict[bytes, int]()
        self._seed, self._count, self._random = seed, count, dict[bytes, np.random.Generator]()
        self._pending: dict[int, Fault] = {}
        self._recovering: set[bytes] = set()
        self._payloads: dict[int, bytes] = {}
        self._earlier: dict[bytes, WorkerRollout] = {}

    def start(self, payload: bytes) -> Any:
        """Start a worker, and remember whose."""
        handle = super().start(payload)
        self._payloads[id(handle)] = payload
        # Each worker has faults of its own, whatever the order of their calls.
        self._random.setdefault(payload, np.random.default_rng([self._seed, len(self._random)]))
        self._left.setdefault(payload, self._count // WORKERS)
        return handle

    def call(self, handle: Any, method: str, arguments: Sequence[Any]) -> Any:
        """Call the method now, or let it fail."""
        payload, now = self._payloads[id(handle)], time.monotonic()
        self._pending.pop(id(handle), None)
        kind = self._draw(payload, method)
        is_late = kind in ("hangs", "returns too late")
        if kind is not None:
            self.faults.append(Fault(kind, now + TIMEOUT * is_late))
            self._pending[id(handle)] = self.faults[-1]
        if kind in ("dies before", "hangs"):
            self._recovering.add(payload)
            return Call(WorkerLost("died: in a storm"), float("inf") if is_late else now)
        result = super().call(handle, method, arguments).result
        if kind in (None, "100 times slower", "huge"):
            # Learned from: it is right, or at least what an environment may return.
            self._pending.pop(id(handle), None)
            if method == "rollout":
                self._recovering.discard(payload)
                self._earlier[payload] = result
            return Call(spoil(result, kind, None), now + SLOW if kind == "100 times slower" else 0.0, True)
        self._recovering.add(payload)
        fault = self._pending[id(handle)]
        fault.since = time.monotonic() + TIMEOUT * is_late
        if kind == "returns too late":
            # On a busy machine it may arrive before anybody sees that it is late.
            return Call(result, fault.since + 0.1, is_right=True)
        return Call(WorkerLost("died: in a storm") if kind == "dies after" else spoil(result, kind, self._earlier[payload]))

    def wait(self, calls: Sequence[Any], seconds: float) -> Sequence[Any]:
        """The calls whose time has come."""
        end = time.monotonic() + seconds
        while True:
            now = time.monotonic()
            done = [call for call in calls if call.returns_at <= now]
            if done or now >= end:
                return done
            time.sleep(max(0.0, min([end, *(call.returns_at for call in calls)]) - now))

    def result(self, call: Any) -> Any:
        """What the call returned."""
        if isinstance(call.result, WorkerLost):
            raise call.result
        if call.is_right and isinstance(call.result, WorkerRollout):
            self.valid[call.result.number] += count_valid(call.result)
        return call.result

    def end(self, handle: Any) -> None:
        """Note when the fault was noticed."""
        fault = self._pending.pop(id(handle), None)
        if fault is not None:
            fault.noticed = time.monotonic()
        super().end(handle)

    def _draw(self, payload: bytes, method: str) -> str | None:
        if not self._left[payload] or method not in ("rollout", "begin") or payload not in self._earlier:
            return None
        chance = self._random[payload].random()
        # A worker that fails twice in a row waits for a second; few do.
        if chance > (AT_START if method == "begin" or payload in self._recovering else 0.4):
            return None
        self._left[payload] -= 1
        return "dies before" if method == "begin" else str(self._random[payload].choice(self._kinds))


def count_valid(rollout: WorkerRollout) -> int:
    """Its valid transitions."""
    return int(np.sum(~rollout.arrays[0].last[:-1]))


def spoil(rollout: Any, kind: str | None, earlier: Any) -> Any:
    """What a faulty worker returns."""
    if kind in (None, "100 times slower"):
        return rollout
    if kind == "returns an earlier rollout":
        return earlier
    if kind == "garbage":
        return "garbage"
    if kind == "raises":
        try:
            raise ArithmeticError("in a storm")
        except ArithmeticError as error:
            return Failure.of(error)
    time_steps, actions, *rest = rollout.arrays
    if kind == "other shapes":
        return dataclasses.replace(rollout, arrays=(time_steps, actions[:-1], *rest))
    reward = np.array(time_steps.reward)
    reward[2] = np.nan if kind == "NaN" else 1e30
    return dataclasses.replace(rollout, arrays=(dataclasses.replace(time_steps, reward=reward), actions, *rest))


class RayStorm(RayWorkers):
    """Worker processes of Ray, which a thread lets fail at random until `count` have.

    Args:
        seed: of the faults.
        count: how many.
        orders: the directory in which environments look for orders.
    """

    def __init__(self, seed: int, count: int, orders: Path) -> None:
        super().__init__(WORKERS)
        self.faults: list[Fault] = []
        self.is_over, self._noticed = False, 0.0
        self.valid: collections.Counter[int] = collections.Counter()
        self._random, self._count, self._orders = np.random.default_rng(seed), count, orders
        self._pids: dict[Any, int] = {}
        self._rollouts: collections.Counter[Any] = collections.Counter()
        self._called: dict[Any, float] = {}
        self._calls: dict[Any, Any] = {}
        self._pending: dict[Any, Fault] = {}
        threading.Thread(target=self._run, daemon=True).start()

    def call(self, handle: Any, method: str, arguments: Sequence[Any]) -> Any:
        """Call the method, and note when."""
        self._called[handle._actor_id] = time.monotonic()
        call = super().call(handle, method, arguments)
        self._calls[call] = handle._actor_id
        return call

    def start(self, payload: bytes) -> Any:
        """Start a worker, and note when: the failure of an earlier one has just been noticed."""
        self._noticed = time.monotonic()
        return super().start(payload)

    def result(self, call: Any) -> Any:
        """The result; note the process of a worker that has started, and rollouts."""
        worker = self._calls.pop(call)
        result = super().result(call)
        if isinstance(result, WorkerStart):
            self._pids[worker] = result.process[1]
        if isinstance(result, WorkerRollout):
            self.valid[result.number] += count_valid(result)
            self._rollouts[worker] += 1
            fault = self._pending.get(worker)
            if fault is not None and fault.kind == "100 times slower" and not self._order_of(worker).exists():
                del self._pending[worker]
        return result

    def end(self, handle: Any) -> None:
        """Note when the fault was noticed: a hang, from the end of its timeout on."""
        worker = handle._actor_id
        fault = self._pending.pop(worker, None)
        if fault is not None:
            late = RAY_TIMEOUT if fault.kind in ("SIGSTOP", "endless step") else 0.0
            fault.since = self._called[worker] + late if late else max(fault.since, self._called[worker])
            fault.noticed = max(self._noticed, self._called[worker])
        self._pids.pop(worker, None)
        super().end(handle)

    def _run(self) -> None:
        while len(self.faults) < self._count:
            time.sleep(0.01)
            ready = [worker for worker in list(self._pids) if self._rollouts[worker] > 1]
            if len(ready) < WORKERS or self._pending:
                continue
            time.sleep(self._random.uniform(0.0, 0.3))
            for worker in self._random.permutation(WORKERS)[: self._random.integers(1, WORKERS + 1)]:
                self._inject(ready[worker], str(self._random.choice(IN_RAY)))
        while self._pending:
            time.sleep(0.01)
        self.is_over = True

    def _inject(self, worker: Any, kind: str) -> None:
        pid = self._pids.get(worker)
        if pid is None:
            return
        fault = Fault(kind, time.monotonic())
        self._pending[worker] = fault
        self.faults.append(fault)
        if kind.startswith("SIG"):
            os.kill(pid, getattr(signal, kind))
        else:
            order = self._order_of(worker)
            order.with_suffix(".new").write_text(kind)
            order.with_suffix(".new").rename(order)

    def _order_of(self, worker: Any) -> Path:
        return self._orders / str(self._pids[worker])


def make_agent(**settings: Any) -> Any:
    spec = polyak.envs.make(make_env()).spec
    return polyak.PPO(spec, num_steps=NUM_STEPS, num_epochs=1, num_minibatches=2, **settings)


def train(env_steps: int, engine: Any = None, limit: float = 600.0, agent: Any = None, **arguments: Any) -> Any:
    """Train, without workers or with those of an engine; a run that takes longer than `limit` seconds ends the script."""
    env = arguments.pop("env", make_env())
    options = {key: arguments.pop(key) for key in ("lag", "timeout", "on_env_error") if key in arguments}
    workers = None if engine is None else Workers(number=WORKERS, restarts=10**6, make_engine=engine, **options)
    faulthandler.dump_traceback_later(limit, exit=True)
    try:
        if workers is None:
            env = polyak.envs.make(env, num_envs=NUM_ENVS, vectorization="sync")
        return polyak.train.run(
            agent or make_agent(),
            env,
            env_steps=env_steps,
            seed=0,
            num_envs=NUM_ENVS,
            progress=False,
            workers=workers,
            **arguments,
        )
    finally:
        faulthandler.cancel_dump_traceback_later()


def leaves(result: Any) -> list[Any]:
    """The whole state of the loop, in NumPy."""
    is_key = lambda leaf: jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key)  # noqa: E731
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in jax.tree.leaves(result.loop_state)]


def same_bits(one: Any, other: Any) -> bool:
    """Whether two results have the same state of the loop, bit by bit."""
    return all(a.tobytes() == b.tobytes() for a, b in zip(leaves(one), leaves(other), strict=True))


def run_in_process(name: str, seed: int, kinds: Sequence[str], count: int, lag: int = 0) -> dict[str, Any]:
    """Train with so many faults, and once more: without any, or with the same."""
    # A rollout of every worker has up to 128 transitions and 1.6 faults.
    env_steps, agent = count * 85, make_agent(values_when="collect" if lag else "update")
    invalid = 0

    def add(progress: Any, metrics: Any, state: Any) -> None:
        nonlocal invalid
        invalid += int(metrics["rollouts/invalid"])

    def run(engine: Any) -> Any:
        options = {"lag": lag, "timeout": TIMEOUT, "on_env_error": "restart", "callbacks": [add]}
        return train(env_steps, lambda: engine, 60 + 20 * TIMEOUT * count, agent, **options)

    start, engine = time.monotonic(), Storm(seed, kinds, count)
    result = run(engine)
    outcome = {"run": name, "seconds": time.monotonic() - start, "invalid": invalid}
    lost = count_lost(engine, result)
    if kinds == COSTLY:
        again = Storm(seed, kinds, count)
        other = run(again)
        engine.faults += again.faults
    else:
        other = run(InProcessWorkers()) if lag else train(env_steps, agent=agent)
    return {**outcome, "lost": lost, **compare(result, other), **describe(engine.faults)}


def run_in_ray(seed: int, count: int) -> dict[str, Any]:
    """Train with so many faults of processes, and once more without workers."""
    with tempfile.TemporaryDirectory() as directory:
        engines: list[RayStorm] = []

        def make_engine() -> RayStorm:
            engines.append(RayStorm(seed, count, Path(directory)))
            return engines[0]

        start = time.monotonic()
        result = train(
            10**9,
            make_engine,
            120 + 20 * count,
            env=make_env(directory),
            timeout=RAY_TIMEOUT,
            should_stop=lambda: bool(engines) and engines[0].is_over,
        )
        seconds, engine = time.monotonic() - start, engines[0]
    other = train(result.progress.env_steps)
    outcome = {"run": "Ray", "seconds": seconds, "invalid": 0, "lost": count_lost(engine, result)}
    return {**outcome, **compare(result, other), **describe(engine.faults)}


def count_lost(engine: Storm | RayStorm, result: Any) -> int:
    """Valid transitions of rollouts that workers returned and nobody learned from."""
    learned = range(result.progress.iteration)
    return sum(engine.valid[number] for number in learned) - int(result.progress.env_steps)


def compare(result: Any, other: Any) -> dict[str, Any]:
    """Two results: whether they have the same bits."""
    weights = jax.tree.leaves(result.state.copies.online.params)
    return {
        "env_steps": result.progress.env_steps,
        "same_bits": same_bits(result, other),
        "finite": all(bool(np.isfinite(np.asarray(leaf)).all()) for leaf in weights),
    }


def describe(faults: Sequence[Fault]) -> dict[str, Any]:
    """How many there were of each kind, and the longest times to notice: of deaths, and of hangs after their timeout."""
    late = {"hangs", "returns too late", "SIGSTOP", "endless step"}
    times: dict[bool, list[float]] = {True: [], False: []}
    for fault in faults:
        if fault.noticed is not None:
            times[fault.kind in late].append(fault.noticed - fault.since)
    return {
        "restarts": sum(fault.noticed is not None for fault in faults),
        "faults": dict(collections.Counter(fault.kind for fault in faults)),
        "dead_seconds": spread(times[False]),
        "hung_seconds": spread(times[True]),
    }


def spread(seconds: Sequence[float]) -> dict[str, float]:
    """The median and the longest time, and the share of those that reach the target."""
    times = np.array(seconds or [0.0])
    return {"median": float(np.median(times)), "max": float(times.max()), "within": float((times <= TARGET).mean())}


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--faults", type=int, default=1000, help="in this process")
    parser.add_argument("--ray-faults", type=int, default=100, help="of processes; 0 leaves Ray out")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    args = parser.parse_args()
    few_threads(1)
    jax.config.update("jax_cpu_enable_async_dispatch", False)
    number, in_ray = (40, 4) if args.quick else (args.faults, args.ray_faults)
    runs = [
        run_in_process("traceless, lag 0", args.seed, TRACELESS, number // 2),
        run_in_process("traceless, lag 1", args.seed + 1, TRACELESS, number // 4, lag=1),
        # Twice.
        run_in_process("costly", args.seed + 2, COSTLY, number // 8),
    ]
    if in_ray:
        runs.append(run_in_ray(args.seed + 3, in_ray))
    header = [
        "run",
        "faults",
        "restarts",
        "seconds",
        "lost",
        "same bits",
        "dead: noticed in ms; within 100",
        "hung: ms after the timeout; within 100",
    ]
    rows = []
    for run in runs:
        milliseconds = [
            f"{1000 * run[key]['median']:.0f}, at most {1000 * run[key]['max']:.0f}; {run[key]['within']:.0%}" for key in TIMES
        ]
        bits = "yes" if run["same_bits"] else "NO"
        total = sum(run["faults"].values())
        rows.append([run["run"], total, run["restarts"], f"{run['seconds']:.0f}", run["lost"], bits, *milliseconds])
    kinds = "; ".join(f"{run['run']}: " + ", ".join(f"{n} {kind}" for kind, n in run["faults"].items()) for run in runs)
    report(f"{table(header, rows)}\n\n{kinds}", {"benchmark": "fault_storm", "runs": runs, "quick": args.quick}, args.json)
    sys.exit(0 if all(run["same_bits"] and run["finite"] and not run["lost"] for run in runs) else 1)


if __name__ == "__main__":
    main()
