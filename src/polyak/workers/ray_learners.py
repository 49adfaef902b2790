"""Learners on the machines of a Ray cluster: the first learner on this machine, each other learner on a separate machine.

Ray starts the learners and detects lost machines; `jax.distributed` transfers arrays.
"""

import contextlib
import pickle
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import cloudpickle

from polyak.workers.learner_group import (
    POLL_SECONDS,
    Learner,
    LearnerFunction,
    LearnerLost,
    Learners,
    LocalLearner,
    free_port,
)
from polyak.workers.learner_process import LearnerEnd, LearnerStart
from polyak.workers.ray_workers import connect, first_line
from polyak.workers.rollout_worker import installed_versions
from polyak.workers.supervise import StoppedBeforeStart
from polyak.workers.worker_group import check_versions


class RayLearners:
    """Starts groups of learners on a Ray cluster; a context manager that disconnects from the cluster.

    Args:
        address: address of the cluster, as for `ray.init`; this machine must belong to the cluster.
        should_stop: True ends the wait for machines.

    Raises:
        ImportError: Ray is not installed.
        RuntimeError: the cluster cannot be reached, or this process is already connected to Ray.
    """

    def __init__(self, address: str, should_stop: Callable[[], bool] = lambda: False) -> None:
        self._address, self._should_stop, self._ray = address, should_stop, connect(address)

    def __enter__(self) -> "RayLearners":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        self._ray.shutdown()

    def start(self, function: LearnerFunction, devices: int, learners: Learners) -> Sequence[Learner]:
        """Start a group; see `start_here`.

        Raises:
            RuntimeError: the cluster has too few machines after `start_timeout`, or a machine has other package versions.
            StoppedBeforeStart: a stop was requested.
        """
        nodes = self._wait_for_nodes(learners)
        host = self._ray.util.get_node_ip_address()
        coordinator, pickled = f"{host}:{free_port(host)}", cloudpickle.dumps(function)
        limits, share = (learners.heartbeat, learners.start_timeout), devices // learners.number
        starts = [
            LearnerStart(rank, learners.number, coordinator, share, *limits, list(sys.path), pickled)
            for rank in range(learners.number)
        ]
        group: list[Learner] = []
        try:
            for start, node in zip(starts[1:], nodes, strict=True):
                group.append(_RemoteLearner(self._ray, start, node, self._should_stop))
            return [LocalLearner(starts[0]), *group]
        except BaseException:
            for learner in group:
                learner.kill()
            raise

    def _wait_for_nodes(self, learners: Learners) -> list[Any]:
        """Wait for the machines of all learners except the first, which runs on this machine."""
        own, needed = self._ray.get_runtime_context().get_node_id(), learners.number - 1
        deadline = time.monotonic() + learners.start_timeout
        while True:
            nodes = [node for node in self._ray.nodes() if node["Alive"] and node["NodeID"] != own]
            if len(nodes) >= needed:
                return nodes[:needed]
            if time.monotonic() >= deadline:
                raise RuntimeError(
                    f"train: learners={learners.number} needs {needed} machines in addition to this one, the Ray cluster at "
                    f"{self._address} has {len(nodes)}"
                )
            _check_stop(self._should_stop)
            time.sleep(POLL_SECONDS)


def _check_stop(should_stop: Callable[[], bool]) -> None:
    if should_stop():
        raise StoppedBeforeStart("train: stopped while waiting for the machines of the Ray cluster")


class _RemoteLearner:
    """A learner on another machine.

    Raises:
        LearnerLost: the machine does not start the learner.
        RuntimeError: the machine has other package versions.
        StoppedBeforeStart: a stop was requested.
    """

    has_joined, messages = False, 0
    """Only the first learner, which is never remote, sends messages."""

    def __init__(self, ray: Any, start: LearnerStart, node: Any, should_stop: Callable[[], bool]) -> None:
        self._ray = ray
        strategy = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        # Ray hides GPUs that are not requested.
        gpus = node["Resources"].get("GPU", 0)
        options = {"num_cpus": 1, "num_gpus": gpus, "max_restarts": 0, "scheduling_strategy": strategy}
        self._actor = ray.remote(**options)(_LearnerActor).remote()
        try:
            call, deadline = self._actor.versions.remote(), time.monotonic() + start.start_timeout
            while not ray.wait([call], timeout=POLL_SECONDS)[0]:
                _check_stop(should_stop)
                if time.monotonic() >= deadline:
                    raise LearnerLost(start.rank, _describe_timeout(node, start.start_timeout), has_joined=False)
            check_versions(f"learner {start.rank} on {node['NodeManagerHostname']}", ray.get(call, timeout=0))
        except BaseException as error:
            self.kill()
            if isinstance(error, ray.exceptions.RayError):
                raise LearnerLost(start.rank, f"did not start: {first_line(error)}", has_joined=False) from error
            raise
        self._call = self._actor.learn.remote(pickle.dumps(start))

    def poll(self) -> LearnerEnd | str | None:
        """Return the end of the learner, or a clause that says how it died; None while it runs."""
        if not self._ray.wait([self._call], timeout=0)[0]:
            return None
        try:
            end: LearnerEnd | str = self._ray.get(self._call)
            return end
        except self._ray.exceptions.RayError as error:
            return f"died: {first_line(error)}"

    def ask_to_stop(self) -> None:
        """Do nothing: the first learner, which is never remote, decides."""

    def notes(self) -> Sequence[Any]:
        """Return no notes: only the first learner sends notes."""
        return ()

    def kill(self) -> None:
        """Kill the learner; a second call does nothing."""
        with contextlib.suppress(Exception):
            self._ray.kill(self._actor, no_restart=True)


def _describe_timeout(node: Any, seconds: int) -> str:
    return (
        f"did not start on {node['NodeManagerHostname']} within start_timeout={seconds} s; is a CPU of the machine free, with "
        "all its GPUs, and does a firewall let Ray's ports through?"
    )


class _LearnerActor:
    """Starts a learner on the actor's machine; the learner ends with the actor."""

    def versions(self) -> dict[str, str]:
        """Return the versions of Python and of the packages on this machine."""
        return installed_versions()

    def learn(self, start: bytes) -> LearnerEnd | str:
        """Run a learner until it ends."""
        # Trusted bytes: from the process that started this actor.
        learner = LocalLearner(pickle.loads(start))
        try:
            while (end := learner.poll()) is None:
                time.sleep(POLL_SECONDS)
            if isinstance(end, LearnerEnd) and end.failure is None:
                # The other learners may still need this process.
                while True:
                    time.sleep(POLL_SECONDS)
            return end
        finally:
            learner.kill()
