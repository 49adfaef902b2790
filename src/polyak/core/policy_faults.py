"""Faults of policies: error flags in carries, since compiled code cannot raise, and exceptions of Python policies."""

import atexit
import itertools
import re
import threading
import time
import weakref
from collections.abc import Callable
from functools import lru_cache, partial
from types import TracebackType
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, PRNGKeyArray

from polyak.core.types import Act, PolicyStep, PyTree, TimeStep
from polyak.core.warn import add_note

T = TypeVar("T")

GRACE_SECONDS = 1.0
"""Seconds that Ctrl-C waits for a running call."""

SIGNAL_SECONDS = 0.2
"""Seconds after which Ctrl-C is noticed at the latest."""

BUSY_SECONDS = 60.0
"""Seconds that a new relay waits for an interrupted program to reach its next call, which ends it."""

EXIT_SECONDS = 5.0
"""Seconds that the exit of the interpreter waits for such a call: JAX aborts if a call returns during the teardown."""

MAX_PROGRAMS = 32
"""Compiled programs that call Python, the last used ones; each takes some 6 MB."""

MAX_EXCEPTIONS = 32
"""Exceptions that wait for their relay; compiled code outside of relays leaves them behind."""


@runtime_checkable
class ErrorFlag(Protocol):
    """A part of a carry that records where a policy has failed."""

    def failed_envs(self) -> Bool[Array | np.ndarray, " B"]:
        """The environments in which the policy has failed; once True, a flag stays True."""
        ...

    def error_message(self) -> str:
        """Describe the failure; for values on the host."""
        ...

    def clear(self, envs: Bool[Array, " B"]) -> "ErrorFlag":
        """This flag, False in these environments."""
        ...


def failed_envs(carry: PyTree, batch_size: int) -> Bool[Array, " B"]:
    """The environments in which a flag of the carry is True; False everywhere for a carry without flags."""
    failed = jnp.zeros(batch_size, bool)
    for flag in _flags(carry):
        failed = failed | flag.failed_envs()
    return failed


def count_failures_in(envs: Bool[Array, " B"], before: PyTree, after: PyTree) -> PyTree:
    """The carry `after` a step from `before`, in which new failures count in these environments only."""
    parts, tree = jax.tree.flatten(after, is_leaf=_is_flag)
    earlier = jax.tree.leaves(before, is_leaf=_is_flag)
    pairs = zip(parts, earlier, strict=True)
    return jax.tree.unflatten(tree, [part.clear(~envs & ~old.failed_envs()) if _is_flag(part) else part for part, old in pairs])


def has_error_flags(carry: PyTree) -> bool:
    """Return True if the carry holds flags; depends only on its structure."""
    return bool(_flags(carry))


def check_error_flags(carry: PyTree, envs: Any = True) -> None:
    """Raise the error of a flag in a carry, or in any tree that holds one.

    Args:
        envs: `[B]`, the environments that count.

    Raises:
        RuntimeError: the policy has failed in one of these environments.
    """
    for flag in _flags(carry):
        if np.any(np.asarray(flag.failed_envs()) & envs):
            raise RuntimeError(flag.error_message())


def _flags(carry: PyTree) -> list[Any]:
    return [part for part in jax.tree.leaves(carry, is_leaf=_is_flag) if _is_flag(part)]


def _is_flag(node: Any) -> bool:
    return _is_flag_class(node.__class__)


@lru_cache(maxsize=256)
def _is_flag_class(cls: type) -> bool:
    # Cached: against a protocol it takes 10 µs, and `predict` checks at every call.
    return issubclass(cls, ErrorFlag)


class CallRaised(RuntimeError):
    """Ends a compiled program; its cause is the exception of the Python policy, if there was one."""


class CallLog:
    """The calls made inside one relay: their number, the number of running calls, and a flag that ends the program."""

    def __init__(self) -> None:
        self.steps = self.under_way = 0
        self.stopped = False


class PythonCalls:
    """The calls of one Python function or object.

    Attributes:
        name: for messages.
        count: calls so far.
        nondeterminism: why a program with these calls may not be reproducible, or None.
        logs: logs of the enclosing relays, innermost last; the first log is for calls outside of relays.
    """

    def __init__(self, name: str, nondeterminism: str | None = None) -> None:
        self.name, self.nondeterminism = name, nondeterminism
        self.count = 0
        self.logs = [CallLog()]
        self._ending: threading.Thread | None = None

    def __repr__(self) -> str:
        return self.name

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """`function(*args)`; an exception gets a note with the policy's name and step.

        Raises:
            CallRaised: the program was interrupted and must end.
        """
        if self._ending is not None and not self._ending.is_alive():
            self.wait()
        # Several threads may be inside relays; Ctrl-C ends all of their programs.
        if any(log.stopped for log in self.logs):
            raise CallRaised(f"{self.name}: stopped, until the program that was interrupted has ended")
        log = self.logs[-1]
        step = log.steps
        log.steps = step + 1
        self.count += 1
        log.under_way += 1
        try:
            result = function(*args)
        except BaseException as error:
            add_note(error, f"raised by {self.name} at its step {step}, counted from 0")
            raise
        finally:
            log.under_way -= 1
        if log.stopped:
            raise CallRaised(f"{self.name}: stopped")
        return result

    def call_compiled(self, function: Callable[..., T], *args: Any) -> T:
        """Call `call` from a compiled program: every exception becomes the cause of a `CallRaised`."""
        try:
            return self.call(function, *args)
        except CallRaised:
            raise
        except BaseException as error:
            text = f"{self.name} raised {type(error).__name__}: {_text(error)}"
            number = _remember(error)
            raise CallRaised(f"{text} (`with policy.raising():` raises the exception itself; [exception {number}])") from error

    def stay_stopped(self, thread: threading.Thread) -> None:
        """Make calls end their programs until this thread, which runs an interrupted program, has ended."""
        self._ending = thread
        self.logs[0].stopped = True

    def wait(self) -> None:
        """Wait for the interrupted program.

        Raises:
            TimeoutError: the program is still busy after a minute.
        """
        if self._ending is not None:
            self._ending.join(BUSY_SECONDS)
            if self._ending.is_alive():
                raise TimeoutError(f"{self.name}: a program that was interrupted is still busy after {BUSY_SECONDS:g} seconds")
            self._ending = None
            self.logs[0] = CallLog()


@runtime_checkable
class CallsPython(Protocol):
    """A part of a policy that calls Python, also from compiled programs; host loops call it directly."""

    @property
    def python_calls(self) -> PythonCalls:
        """The calls of the function or object."""
        ...

    def seed(self, key: PRNGKeyArray, num_envs: int) -> Array:
        """The seeds of the calls of one step, derived from the key."""
        ...

    def direct_call(self) -> Act:
        """The call of one step in NumPy, with its seed."""
        ...

    def step_in_numpy(self, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray | None) -> PolicyStep | None:
        """One step without JAX, the mode if the key is None; None where that mode needs JAX."""
        ...


def python_calls_in(tree: Any) -> list[PythonCalls]:
    """The calls of all Python policies in a tree, each once."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, CallsPython))
    return list(dict.fromkeys(node.python_calls for node in nodes if isinstance(node, CallsPython)))


class ExceptionRelay:
    """Raises the original exceptions of Python policies instead of JAX's errors about them.

    A context manager; and `run`, for one program. Relays nest, also of the same policy, and threads have their own.

    Args:
        tree: anything with policies in it.
    """

    def __init__(self, tree: Any) -> None:
        self._logs = [(calls, CallLog()) for calls in python_calls_in(tree)]

    @property
    def active(self) -> bool:
        """Return True if the tree calls Python."""
        return bool(self._logs)

    @property
    def nondeterminism(self) -> tuple[str, ...]:
        """Reasons why programs with these calls may not be reproducible."""
        return tuple(calls.nondeterminism for calls, _ in self._logs if calls.nondeterminism is not None)

    def __enter__(self) -> "ExceptionRelay":
        for calls, _ in self._logs:
            calls.wait()
        for calls, log in self._logs:
            calls.logs.append(log)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        try:
            if self._logs and error is None:
                # Programs that are still running belong to this block.
                jax.effects_barrier()
        except jax.errors.JaxRuntimeError as late:
            error = late
        finally:
            for calls, log in self._logs:
                calls.logs.remove(log)
        raised = _recall(error)
        if raised is None:
            if error is not None and kind is None:
                raise error
            return
        context = raised.__context__
        try:
            raise raised
        finally:
            # JAX's error around it would hide it in a long text. The exception's own class may reject assignments.
            BaseException.__setattr__(raised, "__context__", context)

    def run(self, program: Callable[..., T], *arguments: Any) -> T:
        """The program's result, after both kinds of faults were looked for: exceptions, and error flags in the result.

        In the main thread a program that calls Python runs in another one, since a thread that waits inside XLA receives no
        signals: Ctrl-C stops it at the next call, or abandons it with a call that does not return.

        Args:
            program: jitted, or compiled. If it calls Python it is compiled here first, because JAX's thread-local settings do
                not hold in the other thread.

        Raises:
            RuntimeError: a policy has failed; see `check_error_flags`.
            Exception: whatever a Python policy raised.
        """
        if not self._logs:
            result = program(*arguments)
        else:
            compiled = (
                partial(program, *arguments) if isinstance(program, jax.stages.Compiled) else _compile(program, arguments)
            )
            with self:
                in_main = threading.current_thread() is threading.main_thread()
                result = self._run_in_thread(compiled) if in_main else jax.block_until_ready(compiled())
        check_error_flags(result)
        return result

    def _run_in_thread(self, program: Callable[[], T]) -> T:
        done, results, errors = threading.Event(), list[T](), list[BaseException]()

        def body() -> None:
            try:
                results.append(jax.block_until_ready(program()))
            except BaseException as error:
                errors.append(error)
            finally:
                done.set()

        thread = threading.Thread(target=body, name="polyak-program", daemon=True)
        try:
            thread.start()
            # A signal that arrives just before a wait begins does not end it, so no wait is long.
            while not done.wait(SIGNAL_SECONDS):
                pass
        except BaseException:
            for _, log in self._logs:
                log.stopped = True
            if not done.wait(GRACE_SECONDS) and thread.is_alive():
                self._abandon(thread)
            raise
        if errors:
            raise errors[0]
        return results[0]

    def _abandon(self, thread: threading.Thread) -> None:
        _abandoned.append(thread)
        # A call that is under way ends the program when it returns, and may never; between calls, the next one must.
        if not any(log.under_way for _, log in self._logs):
            for calls, _ in self._logs:
                calls.stay_stopped(thread)


def _text(error: BaseException) -> str:
    try:
        return str(error)
    except Exception:
        return ""


# JAX passes on only the text of an exception: a number in the text identifies the exception, in whatever thread it arrives.
_numbers = itertools.count(1)
_exceptions: dict[int, BaseException] = {}


def _remember(error: BaseException) -> int:
    number = next(_numbers)
    _exceptions[number] = error
    _exceptions.pop(number - MAX_EXCEPTIONS, None)
    return number


def _recall(error: BaseException | None) -> BaseException | None:
    """The exception of a Python policy that caused an error of JAX."""
    if not isinstance(error, jax.errors.JaxRuntimeError):
        return None
    numbers = re.findall(r"\[exception (\d+)\]", str(error))
    return _exceptions.pop(int(numbers[-1]), None) if numbers else None


_programs: dict[Any, Any] = {}


def _compile(jitted: Any, arguments: tuple[Any, ...]) -> Callable[[], Any]:
    """The program of a jitted function with these arguments; cached no longer than the policies that it calls."""
    leaves, structure = jax.tree.flatten(arguments)
    key = jitted, structure, tuple(jax.typeof(leaf) for leaf in leaves)
    program = _programs.pop(key, None)
    if program is None:
        # A new function, because JAX's caches drop what belongs to a function with it; of leaves, because JAX's programs keep
        # their trees of arguments, with the policies in them.
        def function(*leaves: Any) -> Any:
            return jitted.__wrapped__(*jax.tree.unflatten(structure, leaves))

        program = jax.jit(function).lower(*leaves).compile()
        for calls in python_calls_in(arguments):
            weakref.finalize(calls, _programs.pop, key, None)
    _programs[key] = program
    while len(_programs) > MAX_PROGRAMS:
        _programs.pop(next(iter(_programs)), None)
    return partial(program, *leaves)


_abandoned: list[threading.Thread] = []


@atexit.register
def _wait_for_abandoned() -> None:
    ends = time.monotonic() + EXIT_SECONDS
    for thread in _abandoned:
        thread.join(max(0.0, ends - time.monotonic()))
