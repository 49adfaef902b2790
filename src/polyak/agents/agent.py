"""The base of all agents, with the optional half of their contract."""

import abc
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

from jax.sharding import PartitionSpec
from jaxtyping import PRNGKeyArray

from polyak.core.spaces import EnvSpec
from polyak.core.struct import check_settings
from polyak.core.types import Metrics, Policy, PyTree, Rollout


class BaseAgent(abc.ABC):
    """A frozen object of settings, whose state is one pytree with everything that training changes; see `polyak.Agent`.

    An agent of your own has `spec` and `num_steps` as fields (or properties, where it wraps another agent), and defines `init`,
    `policy`, `collect_policy` and `update`. All else has a default. When an agent is created, each setting is checked, then
    `set_defaults` and `check_together` run; a `__post_init__` of your own must call `super().__post_init__()`.

    Attributes:
        spec: the environment's spaces.
        num_steps: rollout length of one update, in steps of each environment.
        action_scaling: default scaling of Box actions by environments: from [-1, 1] to their bounds (`"rescale"`), or only
            clipped to them (`"clip"`).
    """

    spec: EnvSpec
    num_steps: int
    action_scaling: ClassVar[Literal["clip", "rescale"]] = "clip"

    def __post_init__(self) -> None:
        """Check each setting, set the defaults, then check settings that depend on each other."""
        check_settings(self)
        self.set_defaults()
        self.check_together()

    def set_defaults(self) -> None:  # noqa: B027 (a default)
        """Check the spec, and set the settings whose defaults depend on it, such as networks.

        Raises:
            TypeError, ValueError: the agent does not take the spec, or such a setting.
        """

    def check_together(self) -> None:  # noqa: B027 (a default)
        """Check settings that depend on each other.

        Raises:
            TypeError, ValueError: the settings do not go together; the message names them.
        """

    @property
    def max_lag(self) -> int | None:
        """Largest number of updates between collecting a rollout and learning from it; None for any number."""
        return 0

    @abc.abstractmethod
    def init(self, key: PRNGKeyArray) -> Any:
        """A new state."""

    @abc.abstractmethod
    def policy(self, state: Any) -> Policy:
        """The greedy policy, for evaluation and export."""

    @abc.abstractmethod
    def collect_policy(self, state: Any) -> Policy:
        """The exploring policy, for collecting rollouts."""

    @abc.abstractmethod
    def update(self, state: Any, rollout: Rollout, key: PRNGKeyArray, *, axis_name: str | None = None) -> tuple[Any, Metrics]:
        """The state after learning from one rollout, and metrics by tag.

        Args:
            axis_name: inside `shard_map`, the mesh axis that environments are split over.
        """

    def check(self, num_envs: int, devices: int = 1) -> None:  # noqa: B027 (a default)
        """Check, before anything runs, that the settings work with this number of environments on each device.

        Raises:
            ValueError: a setting does not work with them.
        """

    def diagnose(self, metrics: Mapping[str, Any]) -> str | None:
        """Return why training cannot continue, or None."""
        return None

    def partition(self, axis_name: str) -> PyTree:
        """Return the `PartitionSpec` of the state over devices: by default the whole state is replicated."""
        return PartitionSpec()

    def prefers_single_thread(self, num_envs: int, devices: int) -> bool:
        """Return True if the matrix products of an update are so small that one CPU thread per device is fastest."""
        return False
