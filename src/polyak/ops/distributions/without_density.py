"""The base of distributions that have samples and a mode, but no density."""

from typing import Any, ClassVar

from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.types import PyTree


class WithoutDensity:
    """The methods of `Distribution` that need a density; all raise `NotImplementedError`.

    Attributes:
        owner: the policy, for the errors.
    """

    owner: ClassVar[str]

    def log_prob(self, value: PyTree) -> Float[Array, "*B"]:
        """Not available: raises `NotImplementedError`."""
        raise self._error("log-probabilities of actions")

    def sample_and_log_prob(self, *, seed: PRNGKeyArray) -> tuple[PyTree, Float[Array, "*B"]]:
        """Not available: raises `NotImplementedError`."""
        raise self._error("log-probabilities of actions")

    def entropy(self) -> Float[Array, "*B"]:
        """Not available: raises `NotImplementedError`."""
        raise self._error("entropy")

    def kl_divergence(self, other: Any) -> Float[Array, "*B"]:
        """Not available: raises `NotImplementedError`."""
        raise self._error("KL divergence")

    def _error(self, wanted: str) -> NotImplementedError:
        return NotImplementedError(f"{self.owner} has no {wanted}, only samples and a mode")
