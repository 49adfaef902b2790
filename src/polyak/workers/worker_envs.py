"""Environments that are split over workers, with the interface of a `HostEnv`."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import numpy.typing as npt

from polyak.core.printing import short_repr
from polyak.core.types import Agent, PyTree, TimeStep
from polyak.loops.loop import LoopState
from polyak.loops.rollouts import Rollouts
from polyak.workers.rollout_worker import WorkerState, pack_snapshot, slice_rows, unpack_snapshot
from polyak.workers.worker_group import WorkerGroup, join, without_weight
from polyak.workers.worker_rollouts import WorkerRollouts


@short_repr("spec", "num_envs", "num_workers")
class WorkerEnvs:
    """A batch of environments that is split equally over the workers of a group.

    Args:
        group: the workers.
        source: creates equal environments for evaluation.
    """

    def __init__(self, group: WorkerGroup, source: Any = None) -> None:
        self.group, self.source = group, source
        self.spec, self.num_envs, self.num_workers = group.spec, group.num_envs, group.num_workers
        self.info: Mapping[str, npt.NDArray[np.float64]] = {}
        self.nondeterminism = ("workers are several rollouts ahead",) if group.options.lag > 1 else ()

    def rollouts(self, agent: Agent, state: LoopState, settings: list[Any], should_stop: Callable[[], bool]) -> Rollouts:
        """Create the rollouts of a training run; see `WorkerRollouts`."""
        return WorkerRollouts(self.group, agent, state, settings, should_stop)

    def reset(self, seed: int) -> TimeStep:
        """Start a new episode in every environment; equal seeds give equal episodes, for any number of workers."""
        self.group.under_way = None
        return join(self.group.begin([WorkerState(seed)] * self.num_workers))

    def restore(self, snapshot: dict[str, Any]) -> None:
        """Restore a snapshot of these environments, or of equal environments in one process.

        Raises:
            ValueError: the snapshot is of other environments, or cannot be split.
        """
        if snapshot.get("num_envs") != self.num_envs or not isinstance(snapshot.get("batch"), list):
            raise ValueError(f"{self.spec.id}: the snapshot must be of num_envs={self.num_envs} environments")
        if snapshot.get("form") == "vector":
            raise ValueError(
                f"{self.spec.id}: the snapshot is of a vector environment, which has no parts; resume with workers=0"
            )
        self.group.under_way = snapshot.get("under_way")
        parts = [_split_snapshot(snapshot, self.group.rows(worker)) for worker in range(self.num_workers)]
        self.group.begin([WorkerState(int(snapshot["seed"]), pack_snapshot(part)) for part in parts])

    def step(self, action: PyTree) -> TimeStep:
        """Step every environment."""
        time_steps = []
        for worker in range(self.num_workers):
            self.group.supervisor.request(worker, "step", slice_rows(action, self.group.rows(worker)))
        results = self.group.gather("step")
        empty = without_weight(jax.tree.map(np.zeros_like, next(iter(results.values()))[0]))
        for worker in range(self.num_workers):
            time_step, snapshot = results.get(worker, (empty, None))
            time_steps.append(time_step)
            self.group.snapshots[worker] = snapshot
            self.group.states[worker] = WorkerState(self.group.states[worker].seed, snapshot, time_step)
        return join(time_steps)

    def snapshot(self) -> dict[str, Any] | None:
        """Return the state of all environments after the last rollout used in an update, as if in one process; or None."""
        snapshots = [unpack_snapshot(packed) for packed in self.group.snapshots if packed is not None]
        if len(snapshots) < self.num_workers:
            return None
        joined = _join_snapshots(snapshots, self.num_envs)
        return joined if self.group.under_way is None else {**joined, "under_way": self.group.under_way}

    def close(self) -> None:
        """End the workers; a second call does nothing."""
        self.group.close()


def _split_snapshot(snapshot: dict[str, Any], rows: slice) -> dict[str, Any]:
    size = rows.stop - rows.start
    batch = snapshot["batch"][rows] if len(snapshot["batch"]) == snapshot["num_envs"] else snapshot["batch"]
    return {**snapshot, "num_envs": size, "last": np.asarray(snapshot["last"])[rows], "batch": batch}


def _join_snapshots(snapshots: Sequence[dict[str, Any]], num_envs: int) -> dict[str, Any]:
    batch = [one for snapshot in snapshots for one in snapshot["batch"]]
    last = np.concatenate([snapshot["last"] for snapshot in snapshots])
    return {**snapshots[0], "num_envs": num_envs, "last": last, "batch": batch}
