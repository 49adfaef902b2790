"""`polyak.train.Workers`: number and options of workers, and their fields in a run's config."""

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
"""The field of a run's config, and of the flags of a command, for each field of `WorkerOptions`."""


@dataclass(frozen=True)
class Workers:
    """Number and options of the worker processes that step the environments.

    An option that is None has its default, or the run's value if a run is resumed.

    Attributes:
        number: number of workers; the environments are split equally over the workers.
        lag: maximum age, in updates, of a rollout's policy at the update that uses the rollout; at 0, the default, workers wait
            for each update.
        timeout: maximum seconds of a rollout, after which its worker is replaced; 60.
        start_timeout: maximum seconds of the start of a worker; 300.
        restarts: maximum number of restarts of all workers in a training run; 100.
        on_env_error: effect of an exception in an environment: `"raise"`, the default, ends training; `"restart"` restarts the
            worker in new episodes, which counts as a restart.
        min_workers: number of workers that training needs; by default all. While at least this many other workers are left, a
            worker that fails five times in a row is lost, and rollouts do not wait for a worker that waits for its restart; the
            environments of both have weight 0.
        shared_optimizer: for workers that send gradients: True, the default, keeps one optimizer state in the shared copy;
            False keeps one per worker.
        max_staleness: for workers that send gradients: gradients for weights older than this many steps are dropped and
            counted; by default any age is accepted.
        max_bad: for workers that send gradients: consecutive gradients with NaN or infinity after which a worker is replaced;
            10.
        address: address of a Ray cluster, such as `"auto"`; None starts a private Ray on this machine.
        make_engine: creates the engine that runs the workers; None is Ray. `InProcessWorkers` is for tests and debuggers.
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
        if self.address == "":
            raise ValueError("train: ray_address must be HOST:PORT or auto, got an empty one")
        if isinstance(self.min_workers, int) and self.min_workers > self.number:
            raise ValueError(f"train: min_workers={self.min_workers} must be at most workers={self.number}")
        self.options()

    def options(self, default: WorkerOptions | None = None) -> WorkerOptions:
        """Return all options, with the values of `default` for options that are None.

        Raises:
            TypeError, ValueError: an option is out of range.
        """
        values = {name: value for name in CONFIG_FIELDS if (value := getattr(self, name)) is not None}
        return dataclasses.replace(default or WorkerOptions(), **values)


def options_in(settings: Any) -> dict[str, Any]:
    """Return the options of workers in a run's config, or in the flags of a command, by their names in `WorkerOptions`."""
    fields = vars(settings)
    return {name: fields[field] for name, field in CONFIG_FIELDS.items() if field in fields}


def options_of(config: RunConfig) -> WorkerOptions:
    """Return the options of workers in a run's config."""
    return WorkerOptions(**options_in(config))


def config_fields(options: WorkerOptions) -> dict[str, Any]:
    """Return the fields of a run's config for the options of workers."""
    return {field: getattr(options, name) for name, field in CONFIG_FIELDS.items()}


def as_workers(owner: str, workers: "Workers | int") -> Workers:
    """Convert a number to `Workers`.

    Raises:
        TypeError, ValueError: `workers` is neither `Workers` nor a positive integer.
    """
    if isinstance(workers, Workers):
        return workers
    check_integer(owner, "workers", workers)
    return Workers(workers)
