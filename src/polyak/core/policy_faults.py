"""Calls of Python from compiled programs: they are counted, and what they raise comes out as it was raised."""

import atexit
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Protocol, TypeVar, runtime_checkable

import jax

T = TypeVar("T")

GRACE_SECONDS = 1.0
"""After Ctrl-C, how long a call that is under way is waited for."""

BUSY_SECONDS = 60.0
"""How long a new watch waits for an interrupted program to come to its next call, which ends it."""

EXIT_SECONDS = 5.0
"""How long the interpreter's end waits for such a call: JAX aborts when one returns into what is being torn down."""


class CallRaised(RuntimeError):
    """Ends a compiled program; its cause is what Python raised, if it did."""


class CallLog:
    """What happened under one watch: calls made, those under way, and the first exception."""

    def __init__(self) -> None:
        self.steps = self.under_way = 0
        self.raised: BaseException | None = None
        self.stopped = False


class PythonCalls:
    """The calls of one piece of Python.

    Attributes:
        name: who is called, for messages.
        count: calls so far.
        inexact: why a program with these calls may not do the same twice, or None.
    """

    def __init__(self, name: str, inexact: str | None = None) -> None:
        self.name, self.inexact = name, inexact
        self.count = 0
        self.tally = CallLog()
        self._ending: threading.Thread | None = None

    def __repr__(self) -> str:
        return self.name

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """`function(*args)`; what it raises gets a note of who was called and when.

        Raises:
            CallRaised: the program shall end.
        """
        if self._ending is not None and not self._ending.is_alive():
            self.wait()
        tally = self.tally
        if tally.stopped:
            raise CallRaised(f"{self.name}: stopped, until the program that was interrupted has ended")
        step = tally.steps
        tally.steps = step + 1
        self.count += 1
        tally.under_way += 1
        try:
            result = function(*args)
        except BaseException as error:
            if tally.raised is None:
                error.add_note(f"raised by {self.name} at its step {step}, counted from 0")
                tally.raised = error
            raise
        finally:
            tally.under_way -= 1
        if tally.stopped:
            raise CallRaised(f"{self.name}: stopped")
        return result

    def stay_stopped(self, thread: threading.Thread) -> None:
        """Until this thread, which runs a program that was left between two calls, has ended: its next call ends it."""
        self._ending = thread

    def wait(self) -> None:
        """For such a program.

        Raises:
            TimeoutError: it is still busy after a minute.
        """
        if self._ending is not None:
            self._ending.join(BUSY_SECONDS)
            if self._ending.is_alive():
                raise TimeoutError(f"{self.name}: a program that was interrupted is still busy after {BUSY_SECONDS:g} seconds")
            self._ending, self.tally = None, CallLog()

    def switch(self, tally: CallLog) -> None:
        """To the tally of another watch, unless calls stay stopped."""
        if self._ending is None:
            self.tally = tally

    def call_compiled(self, function: Callable[..., T], *args: Any) -> T:
        """As `call`, from inside a compiled program: whatever is raised is the cause of a `CallRaised`."""
        try:
            return self.call(function, *args)
        except CallRaised:
            raise
        except BaseException as error:
            said = f"{self.name} raised {type(error).__name__}: {error}"
            raise CallRaised(f"{said} (inside `with policy.raising():` it comes out as it was raised)") from error


@runtime_checkable
class CallsPython(Protocol):
    """A part of a policy that calls Python, also from compiled programs; host loops call it directly."""

    @property
    def python_calls(self) -> PythonCalls:
        """Its calls."""
        ...


def python_calls_in(tree: Any) -> list[PythonCalls]:
    """Those of all parts of a tree, each once."""
    nodes = jax.tree.leaves(tree, is_leaf=lambda node: isinstance(node, CallsPython))
    return list(dict.fromkeys(node.python_calls for node in nodes if isinstance(node, CallsPython)))


class ExceptionRelay:
    """What Python raises inside compiled programs comes out as it was raised: same exception, same traceback.

    A context manager; and `run`, for one program. Watches of the same policy nest.

    Args:
        tree: anything with policies in it.
    """

    def __init__(self, tree: Any) -> None:
        self._tallies = [(calls, CallLog()) for calls in python_calls_in(tree)]
        self._before: list[CallLog] = []

    @property
    def active(self) -> bool:
        """There is something to watch."""
        return bool(self._tallies)

    @property
    def inexact(self) -> tuple[str, ...]:
        """Why programs with these calls may not do the same twice."""
        return tuple(calls.inexact for calls, _ in self._tallies if calls.inexact is not None)

    def __enter__(self) -> "ExceptionRelay":
        for calls, _ in self._tallies:
            calls.wait()
        self._before = [calls.tally for calls, _ in self._tallies]
        for calls, tally in self._tallies:
            calls.switch(tally)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        try:
            if self._tallies and error is None:
                # What is still running belongs to this block.
                jax.effects_barrier()
        except jax.errors.JaxRuntimeError as late:
            error = late
        finally:
            for (calls, _), tally in zip(self._tallies, self._before, strict=True):
                calls.switch(tally)
        raised = self._raised()
        if raised is None or error is raised or not isinstance(error, jax.errors.JaxRuntimeError):
            if error is not None and kind is None:
                raise error
            return
        context = raised.__context__
        try:
            raise raised
        finally:
            # JAX's error around it would hide it in a long text.
            raised.__context__ = context

    def run(self, program: Callable[[], T]) -> T:
        """The program's result, once it is there.

        In the main thread the program runs in another one, since a thread that waits inside XLA hears no signal: Ctrl-C stops
        it at the next call, or leaves it alone with a call that does not return.

        Args:
            program: runs what was compiled before; JAX's thread-local settings do not hold in it.
        """
        if not self._tallies:
            return program()
        with self:
            if threading.current_thread() is not threading.main_thread():
                return jax.block_until_ready(program())
            return self._in_a_thread(program)

    def _in_a_thread(self, program: Callable[[], T]) -> T:
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
            done.wait()
        except BaseException:
            for _, tally in self._tallies:
                tally.stopped = True
            if not done.wait(GRACE_SECONDS) and thread.is_alive():
                self._abandon(thread)
            raise
        if errors:
            raise errors[0]
        return results[0]

    def _abandon(self, thread: threading.Thread) -> None:
        _abandoned.append(thread)
        # A call that is under way ends the program when it returns, and may never; between calls, the next one must.
        if not any(tally.under_way for _, tally in self._tallies):
            for calls, _ in self._tallies:
                calls.stay_stopped(thread)

    def _raised(self) -> BaseException | None:
        return next((tally.raised for _, tally in self._tallies if tally.raised is not None), None)


def compiling(jitted: Any) -> Callable[..., Any]:
    """`compiled(*arguments)`: the program of a jitted function for these argument shapes, for `ExceptionRelay.run`.

    A function that is traced in the watch's thread would not see the settings of the caller's.
    """
    kept = dict[Any, Any]()

    def compiled(*arguments: Any) -> Any:
        shapes = jax.tree.structure(arguments), tuple(jax.typeof(leaf) for leaf in jax.tree.leaves(arguments))
        if shapes not in kept:
            kept[shapes] = jitted.lower(*arguments).compile()
        return kept[shapes]

    return compiled


_abandoned: list[threading.Thread] = []


@atexit.register
def _wait_for_abandoned() -> None:
    ends = time.monotonic() + EXIT_SECONDS
    for thread in _abandoned:
        thread.join(max(0.0, ends - time.monotonic()))
