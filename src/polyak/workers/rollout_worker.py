"""A worker: a part of the environments, and the policy that acts in them.

If the policy acts in NumPy, the process starts no JAX back end, which would take a second and 80 MB.
"""

import os
import pickle
import platform
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from types import ModuleType
from typing import Any

import cloudpickle
import jax
import numpy as np
import numpy.typing as npt

from polyak.core.space_check import InvalidValue
from polyak.core.spaces import EnvSpec
from polyak.core.types import HostEnv, PyTree, TimeStep
from polyak.core.warn import add_note
from polyak.loops.episodes import InfoSums
from polyak.loops.host_actor import Actor, act_with_keys, find_numpy_actor
from polyak.loops.rollouts import collect_on_host
from polyak.workers.gradient_worker import GradientPrograms, GradientTask, WorkerGradients
from polyak.workers.packing import Packing

PLAIN = (type(None), bool, int, float, str, bytes)
"""Types of exception arguments and attributes that are sent to another process."""

PACKAGES = ("polyak", "jax", "numpy", "gymnasium")


@dataclass(frozen=True)
class WorkerState:
    """The state from which a worker starts or resumes.

    Attributes:
        seed: seed of new episodes.
        snapshot: snapshot of the environments, by `pack_snapshot`; None starts new episodes.
        time_step: the last time step before the snapshot.
        carry: the policy's carry, or None before there is a policy.
    """

    seed: int
    snapshot: bytes | None = None
    time_step: TimeStep | None = None
    carry: PyTree = None


@dataclass(frozen=True)
class Acting:
    """The policy of a worker, and how it acts.

    Attributes:
        policy: a template of the policy; each request replaces its leaves.
        packing: layout of the leaves in the vectors of a request.
        num_steps: number of steps of a rollout.
        in_numpy: the policy acts in NumPy, with random numbers from the request; else in JAX, with random keys.
        key_impl: implementation of the random keys.
    """

    policy: Any
    packing: Packing
    num_steps: int
    in_numpy: bool
    key_impl: str


@dataclass(frozen=True)
class WorkerStart:
    """The result of a worker's start.

    Attributes:
        spec: spec of the worker's environments.
        time_step: last time step of the environments; None if the learner has it.
        snapshot: state of the environments, by `pack_snapshot`, or None if they do not support snapshots.
        process: machine and process id of the worker.
        versions: versions of Python and of `PACKAGES`.
    """

    spec: EnvSpec
    time_step: TimeStep | None
    snapshot: bytes | None
    process: tuple[str, int]
    versions: Mapping[str, str]


@dataclass(frozen=True)
class WorkerRollout:
    """A rollout of a worker's environments, in NumPy.

    Attributes:
        number: number of the rollout in the training run.
        version: number of updates of the policy that collected the rollout.
        arrays: see `Collected.arrays`.
        info_sums: sums of the values that the environments reported in `info`.
        snapshot: the environments' state after the rollout, by `pack_snapshot`, or None.
        seconds: duration of the rollout.
    """

    number: int
    version: int
    arrays: tuple[TimeStep, PyTree, PyTree, PyTree]
    info_sums: InfoSums
    snapshot: bytes | None
    seconds: float


@dataclass(frozen=True)
class Failure:
    """An exception of another process, as text and plain data, so that reading it runs no code.

    Attributes:
        module: module of the exception's type.
        name: qualified name of the exception's type.
        arguments: arguments of the exception, or None if an argument is not plain.
        attributes: plain attributes of the exception.
        summary: type and text of the exception.
        traceback: traceback of the exception and of its causes.
        invalid_value: message of an `InvalidValue`, which names the environment; None for any other exception.
    """

    module: str
    name: str
    arguments: tuple[Any, ...] | None
    attributes: Mapping[str, Any]
    summary: str
    traceback: str
    invalid_value: str | None = None

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Convert the exception that is being handled."""
        # The name of a file is no longer among the arguments of an OSError.
        file = (error.filename,) if isinstance(error, OSError) and error.filename is not None and len(error.args) == 2 else ()
        arguments: tuple[Any, ...] | None = (*error.args, *file)
        if not all(type(value) in PLAIN for value in (*error.args, *file)):
            arguments = None
        attributes = {name: value for name, value in vars(error).items() if type(value) in PLAIN}
        kind, summary = type(error), f"{type(error).__name__}: {error}"
        invalid_value = str(error) if isinstance(error, InvalidValue) else None
        trace = traceback.format_exc()
        return cls(kind.__module__, kind.__qualname__, arguments, attributes, summary, trace, invalid_value)

    def exception(self, where: str) -> Exception:
        """Recreate the exception, with its type if this process has imported it; worker and traceback are a note."""
        error = self._of_its_type() or RuntimeError(f"{where} raised {self.summary}")
        add_note(error, f"Raised in {where}:\n{self.traceback}")
        return error

    def _of_its_type(self) -> Exception | None:
        """Recreate the exception; None if its type is unknown in this process, or needs more than plain arguments."""
        found: Any = sys.modules.get(self.module)
        for part in self.name.split("."):
            # `vars`, not getattr: a module may import an attribute lazily.
            found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
        if self.arguments is None or not (isinstance(found, type) and issubclass(found, Exception)):
            return None
        # The constructor may take other arguments than `args`.
        for make in (found, partial(found.__new__, found)):
            try:
                error = make(*self.arguments)
                vars(error).update(self.attributes)
                if isinstance(error, found) and f"{type(error).__name__}: {error}" == self.summary:
                    return error
            except Exception:
                continue
        return None


class RolloutWorker:
    """Collects rollouts of its environments; every method returns a `Failure` in place of raising.

    Args:
        make_env: creates the environments, pickled by cloudpickle.
    """

    def __init__(self, make_env: bytes) -> None:
        self._make_env = make_env
        self._env: HostEnv | None = None
        self._time_step: Any = None
        self._carry: PyTree = ()
        self._acting: Acting | GradientTask | None = None
        self._programs: GradientPrograms | None = None

    def begin(self, state: WorkerState, acting: Acting | GradientTask | None) -> "WorkerStart | Failure":
        """Create the environments if there are none yet, and start or continue episodes."""
        return _failure_of(self._begin, state, acting)

    def prepare(self, acting: Acting | GradientTask, time_step: TimeStep, carry: PyTree) -> "Failure | None":
        """Set the policy, and the time step and carry from which it goes on."""
        return _failure_of(self._prepare, acting, time_step, carry)

    def rollout(
        self, number: int, version: int, policy: Mapping[str, npt.NDArray[Any]], random: npt.NDArray[Any]
    ) -> "WorkerRollout | Failure":
        """Collect a rollout with the policy in the vectors `policy`.

        Args:
            random: `[T, ...]`, random numbers for a policy in NumPy, else the bits of random keys.
        """
        return _failure_of(self._rollout, number, version, policy, random)

    def gradients(
        self, number: int, version: int, weights: Mapping[str, npt.NDArray[Any]], key: npt.NDArray[Any]
    ) -> "WorkerGradients | Failure":
        """Collect a rollout with these weights, and return the gradients of its loss.

        Args:
            weights: the state that the worker pulls, as vectors.
            key: bits of the rollout's random key.
        """
        return _failure_of(self._gradients, number, version, weights, key)

    def step(self, action: PyTree) -> "tuple[TimeStep, bytes | None] | Failure":
        """Step the environments; returns the time step, and a snapshot."""
        return _failure_of(self._step, action)

    def ping(self) -> None:
        """Return at once, to measure the latency of a call."""

    def close(self) -> "Failure | None":
        """Close the environments."""
        env, self._env = self._env, None
        return None if env is None else _failure_of(env.close)

    def _begin(self, state: WorkerState, acting: Acting | GradientTask | None) -> WorkerStart:
        if self._env is None:
            self._env = cloudpickle.loads(self._make_env)()
        env = self._env
        assert env is not None, "made above"
        if state.snapshot is None:
            self._time_step = env.reset(state.seed)
        else:
            env.restore(unpack_snapshot(state.snapshot))
            self._time_step = state.time_step
        self._carry, self._acting = state.carry, acting
        process = platform.node(), os.getpid()
        return WorkerStart(env.spec, self._time_step, pack_snapshot(env.snapshot()), process, installed_versions())

    def _prepare(self, acting: Acting | GradientTask, time_step: TimeStep, carry: PyTree) -> None:
        self._acting, self._time_step, self._carry = acting, time_step, carry

    def _rollout(
        self, number: int, version: int, policy: Mapping[str, npt.NDArray[Any]], random: npt.NDArray[Any]
    ) -> WorkerRollout:
        assert self._env is not None and isinstance(self._acting, Acting), "begin() and prepare() come first"
        start, sums = time.monotonic(), InfoSums()
        actor = make_worker_actor(self._acting, policy, random)
        arrays = collect_on_host(actor, self._carry, self._env, self._time_step, self._acting.num_steps, sums)
        assert arrays is not None, "a rollout without a deadline is always complete"
        self._time_step, self._carry = jax.tree.map(lambda x: x[-1], arrays[0]), arrays[3]
        snapshot = pack_snapshot(self._env.snapshot())
        return WorkerRollout(number, version, arrays, sums, snapshot, time.monotonic() - start)

    def _gradients(
        self, number: int, version: int, weights: Mapping[str, npt.NDArray[Any]], key: npt.NDArray[Any]
    ) -> WorkerGradients:
        start = time.monotonic()
        assert self._env is not None and isinstance(self._acting, GradientTask), "begin() and prepare() come first"
        if self._programs is None or self._programs.task is not self._acting:
            self._programs = GradientPrograms(self._acting)
        halves, finished, sums, *place = self._programs.run(weights, key, self._env, self._time_step, self._carry)
        self._time_step, self._carry = place
        snapshot, seconds = pack_snapshot(self._env.snapshot()), time.monotonic() - start
        return WorkerGradients(number, version, halves, finished, sums, snapshot, self._time_step, self._carry, seconds)

    def _step(self, action: PyTree) -> tuple[TimeStep, bytes | None]:
        assert self._env is not None, "begin() comes first"
        self._time_step = self._env.step(action)
        return self._time_step, pack_snapshot(self._env.snapshot())


def make_worker_actor(acting: Acting, vectors: Mapping[str, npt.NDArray[Any]], random: npt.NDArray[Any]) -> Actor:
    """Create the actor of one rollout from the policy's vectors and the random numbers or key bits."""
    policy = jax.tree.unflatten(jax.tree.structure(acting.policy), acting.packing.unpack(vectors))
    actor = find_numpy_actor(policy, random.shape[1]) if acting.in_numpy else None
    if actor is None:
        return act_with_keys(jax.device_put(policy), random, acting.key_impl)
    act = actor.start(policy)
    return lambda t, time_step, carry: act(time_step, carry, random[t])


def pack_snapshot(snapshot: dict[str, Any] | None) -> bytes | None:
    """Pickle a snapshot: one object in place of hundreds of small arrays, each of which costs Ray 10 µs."""
    return None if snapshot is None else pickle.dumps(snapshot, protocol=pickle.HIGHEST_PROTOCOL)


def unpack_snapshot(packed: bytes) -> dict[str, Any]:
    """Unpickle the result of `pack_snapshot`, from a process of this training run."""
    snapshot: dict[str, Any] = pickle.loads(packed)
    return snapshot


def installed_versions() -> dict[str, str]:
    """Return the versions of Python and packages, which must be equal in a worker and the learner."""
    return {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}}


def configure_process() -> None:
    """Restrict JAX in this process to one CPU thread."""
    os.environ["PJRT_NPROC"] = "1"
    jax.config.update("jax_platforms", "cpu")
    # Dispatch to another thread costs as much as the 50 µs of a step.
    jax.config.update("jax_cpu_enable_async_dispatch", False)


def find_sources(paths: list[str]) -> None:
    """Extend `sys.path` by the learner's entries: the function of an environment may be in the user's script."""
    sys.path.extend(path for path in paths if path not in sys.path)


def _failure_of(function: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return function(*arguments)
    except (Exception, SystemExit) as error:
        # An environment that calls sys.exit would end its worker without a message.
        return Failure.of(error)


def slice_rows(tree: PyTree, rows: slice) -> PyTree:
    """Slice the rows of every leaf, as NumPy arrays."""
    return jax.tree.map(lambda leaf: np.asarray(leaf)[rows], tree)
