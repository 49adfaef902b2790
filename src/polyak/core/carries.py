"""What of a policy's memory says that acting could not go on: compiled code cannot raise, so loops look there."""

from functools import lru_cache
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool

from polyak.core.types import PyTree


@runtime_checkable
class Failing(Protocol):
    """A part of a carry that remembers what went wrong."""

    def went_wrong(self) -> Bool[Array | np.ndarray, " B"]:
        """The environments in which it did; once True, it stays."""
        ...

    def diagnose(self) -> str:
        """What did, in words; for values on the host."""
        ...

    def excused(self, rows: Bool[Array, " B"]) -> "Failing":
        """The same, with nothing wrong in these environments."""
        ...


def failed_rows(carry: PyTree, batch_size: int) -> Bool[Array, " B"]:
    """The environments in which a policy could not go on; False everywhere where its carry holds nothing that fails."""
    failed = jnp.zeros(batch_size, bool)
    for part in _failing(carry):
        failed = failed | part.went_wrong()
    return failed


def failing_only_in(rows: Bool[Array, " B"], before: PyTree, after: PyTree) -> PyTree:
    """The carry `after` a step from `before`; what newly went wrong counts only in these environments."""
    parts, tree = jax.tree.flatten(after, is_leaf=_is_failing)
    earlier = jax.tree.leaves(before, is_leaf=_is_failing)
    pairs = zip(parts, earlier, strict=True)
    return jax.tree.unflatten(
        tree, [part.excused(~rows & ~was.went_wrong()) if _is_failing(part) else part for part, was in pairs]
    )


def can_fail(carry: PyTree) -> bool:
    """The carry holds something that may say so; looks at the structure alone."""
    return bool(_failing(carry))


def check_carry(carry: PyTree) -> None:
    """Raise what a policy could not while it was compiled.

    Raises:
        RuntimeError: the policy could not go on in some environment.
    """
    for part in _failing(carry):
        if np.any(np.asarray(part.went_wrong())):
            raise RuntimeError(part.diagnose())


def _failing(carry: PyTree) -> list[Any]:
    return [part for part in jax.tree.leaves(carry, is_leaf=_is_failing) if _is_failing(part)]


def _is_failing(node: Any) -> bool:
    return _is_kind_failing(node.__class__)


@lru_cache(maxsize=256)
def _is_kind_failing(kind: type) -> bool:
    # Looked up once: against a protocol it takes 10 µs, and `predict` asks at every call.
    return issubclass(kind, Failing)
