"""Goals of an environment: the entries of its observations, and the outcome of a step under another goal."""

import abc
from typing import Any, NamedTuple

from polyak.core.spaces import Box, Dict, EnvSpec, leaf_spaces
from polyak.core.types import PyTree

ACHIEVED, DESIRED = "achieved_goal", "desired_goal"
GOAL_ENTRIES = ("observation", ACHIEVED, DESIRED)
"""The entries of an observation with a goal, as in Gymnasium-Robotics."""

FLAGS = ("compute_terminated", "compute_truncated")
"""The functions of goals of an environment, besides `compute_reward`."""


class Outcomes(NamedTuple):
    """The results of M steps.

    Attributes:
        reward: float32 `[M]`.
        terminated: bool `[M]`, or None if goals do not decide it.
        truncated: bool `[M]`, or None if goals do not decide it.
    """

    reward: Any
    terminated: Any
    truncated: Any


class Goals(abc.ABC):
    """The rewards of an environment as a function of goals; `EnvSpec.goals`.

    Two objects are equal only if their functions are equal, because compiled programs hold them.

    Attributes:
        is_python: the functions are Python, called from compiled programs, which must be on one device.
    """

    is_python: bool

    @abc.abstractmethod
    def check(self) -> None:
        """Check the functions before training.

        Raises:
            TypeError, ValueError: a function does not take goals, or returns something else.
        """

    @abc.abstractmethod
    def outcomes(self, achieved: PyTree, desired: PyTree) -> Outcomes:
        """The results of steps that achieved these goals, leaves `[M, ...]`, where those were desired; may be traced."""


def has_goals(spec: EnvSpec) -> bool:
    """Return True if observations have the entries of goals."""
    return isinstance(spec.obs, Dict) and set(GOAL_ENTRIES) <= set(spec.obs.spaces)


def check_goals(owner: str, spec: EnvSpec) -> None:
    """Check that observations have goals, and that achieved and desired goals have one space.

    Raises:
        ValueError: an entry is missing, or the spaces differ.
    """
    if not isinstance(spec.obs, Dict) or not has_goals(spec):
        raise ValueError(
            f"{owner}: the environment must have goals, a Dict observation with the entries {', '.join(GOAL_ENTRIES)}; "
            f"{spec.id or 'its spec'} has {spec.obs}"
        )
    achieved, desired = spec.obs.spaces[ACHIEVED], spec.obs.spaces[DESIRED]
    if _form(achieved) != _form(desired):
        raise ValueError(f"{owner}: {ACHIEVED} and {DESIRED} must have one space, got {achieved} and {desired}")


def _form(space: Any) -> Any:
    """The parts of a space that goals must share: bounds of Boxes may differ."""
    return [(path, (leaf.shape, leaf.dtype) if isinstance(leaf, Box) else leaf) for path, leaf in leaf_spaces(space)]
