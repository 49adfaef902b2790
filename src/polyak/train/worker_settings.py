"""`polyak.train.Workers`: how many workers there are and how they work, and what of it a run stores."""

import dataclasses
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any, Literal

from polyak.core.checks import check_integer
from polyak.runs import RunConfig
from polyak.workers.supervise import Engine
from polyak.workers.worker_group import WorkerOptions

CONFIG_FIELDS = {
    "lag": "lag",
    "timeout": "worker_timeout",
    "start_timeout": "worker_start_timeout",
    "restarts": "worker_restarts",
    "on_env_error": "on_env_error",
    "min_workers": "min_workers",
    "shared_optimizer": "shared_optimizer",
    "max_staleness": "max_staleness",
    "max_bad": "max_bad",
}
"""The field of a run's config for each of `WorkerOptions`."""


@dataclass(frozen=True)
class Workers:
    """Worker processes that step the environments, and how they are watched.

    An option that is None is the run's where a run is resumed, else its default.

    Attributes:
        number: how many; they share the environments equally.
        lag: how many updates old the policy of a rollout may be when it is learned from; 0, the default: workers wait for each
            update.
        timeout: seconds that a rollout may take before its worker is replaced; 60.
        start_timeout: seconds that the start of a worker may take; 300.
        restarts: how many times workers may be replaced in a training; 100.
        on_env_error: what an exception of an environment does: it ends the training (`"raise"`, the default), or its worker
            starts new episodes (`"restart"`), which counts as a restart.
        min_workers: how many workers training needs; by default all. While at least as many others are left, a worker that
            fails five times in a row is given up, and nobody waits for one that waits to be started again; its environments
            have weight 0.
        shared_optimizer: where workers send gradients: the shared copy has the only optimizer state (the default), or each
            worker its own.
        max_staleness: where workers send gradients: those of weights more than this many steps old are dropped and counted; by
            default any is accepted.
        max_bad: where workers send gradients: those with NaN or infinity in a row after which a worker is replaced; 10.
        address: of a Ray cluster, such as `"auto"`; None starts a private Ray on this machine.
        make_engine: starts what runs the workers; None is Ray. `InProcessWorkers` steps them in this process, for tests.
    """

    number: int = 1
    _: KW_ONLY
    lag: int | None = None
    timeout: float | None = None
    start_timeout: float | None = None
    restarts: int | None = None
    on_env_error: Literal["raise", "restart"] | None = None
    min_workers: int | None = None
    shared_optimizer: bool | None = None
    max_staleness: int | None = None
    max_bad: int | None = None
    address: str | None = None
    make_engine: Callable[[], Engine] | None = None

    def __post_init__(self) -> None:
        check_integer("train", "workers", self.number)
        if not (self.address is None or isinstance(self.address, str)):
            raise TypeError(f"train: ray_address must be a str, got {self.address!r:.80}")
        if self.address == "":
            raise ValueError("train: ray_address must be HOST:PORT or auto, got an empty one")
        if isinstance(self.min_workers, int) and self.min_workers > self.number:
            raise ValueError(f"train: min_workers={self.min_workers} must be at most workers={self.number}")
        self.options()

    def options(self, default: WorkerOptions | None = None) -> WorkerOptions:
        """All options; those that are None are taken from `default`.

        Raises:
            TypeError, ValueError: an option is out of range.
        """
        values = {name: value for name in CONFIG_FIELDS if (value := getattr(self, name)) is not None}
        return dataclasses.replace(default or WorkerOptions(), **values)


def options_of(config: RunConfig) -> WorkerOptions:
    """The options of workers that a run stores."""
    return WorkerOptions(**{name: getattr(config, field) for name, field in CONFIG_FIELDS.items()})


def config_fields(options: WorkerOptions) -> dict[str, Any]:
    """The fields of a run's config that store the options of workers."""
    return {field: getattr(options, name) for name, field in CONFIG_FIELDS.items()}


def as_workers(owner: str, workers: "Workers | int") -> Workers:
    """Workers, of which only the number may be given.

    Raises:
        TypeError, ValueError: it is neither, or not positive.
    """
    if isinstance(workers, Workers):
        return workers
    check_integer(owner, "workers", workers)
    return Workers(workers)
