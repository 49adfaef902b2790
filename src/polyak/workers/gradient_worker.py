"""A worker that computes gradients of its own rollouts (A3C)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import PRNGKeyArray

from polyak.core.types import HostEnv, PolicyStep, PyTree, Rollout, TimeStep
from polyak.loops.episodes import EpisodeTotals, InfoSums, measure
from polyak.loops.rollouts import collect_on_host
from polyak.workers.packing import Packing


@dataclass(frozen=True)
class GradientTask:
    """The agent and the array layouts with which a worker computes gradients.

    Attributes:
        agent: an agent with `collect_policy(state)` and `gradients(state, rollout, key)`.
        state: a template of the pulled state; each request replaces its leaves.
        packing: layout of the leaves in the vectors of a request.
        result: layout of the gradients and their summary in the vectors that the worker returns.
        key_impl: implementation of the random keys.
    """

    agent: Any
    state: Any
    packing: Packing
    result: Packing
    key_impl: str


@dataclass(frozen=True)
class WorkerGradients:
    """The gradients of one rollout.

    Attributes:
        number: number of the rollout, counted from 1 for each worker.
        version: version of the weights for which the gradients were computed.
        halves: the gradients and their summary, as vectors by dtype.
        finished: totals of the episodes that ended.
        info_sums: sums of the values that the environments reported in `info`.
        snapshot: the environments' state after the rollout, by `pack_snapshot`, or None.
        time_step: the last time step of the rollout.
        carry: the policy's carry, and the running returns of episodes.
        seconds: duration of the rollout and its gradients.
    """

    number: int
    version: int
    halves: Mapping[str, npt.NDArray[Any]]
    finished: EpisodeTotals
    info_sums: InfoSums
    snapshot: bytes | None
    time_step: TimeStep
    carry: PyTree
    seconds: float


class GradientPrograms:
    """The compiled programs of a task: acting, and gradients of a rollout."""

    def __init__(self, task: GradientTask) -> None:
        self.task = task
        self._structure: Any = jax.tree.structure(task.state)
        self._act, self._gradients, self._measure = jax.jit(self._act_step), jax.jit(self._compute), jax.jit(measure)

    def run(
        self, vectors: Mapping[str, npt.NDArray[Any]], bits: npt.NDArray[Any], env: HostEnv, time_step: TimeStep, carry: PyTree
    ) -> tuple[Mapping[str, npt.NDArray[Any]], EpisodeTotals, InfoSums, TimeStep, PyTree]:
        """Pull the weights, collect a rollout, and compute the gradients of its loss.

        Args:
            vectors: the state that the worker pulls, packed.
            bits: bits of the random key.
            env: the environments.
            time_step: the last time step of the environments.
            carry: the policy's carry, and the running returns of episodes.

        Returns:
            Gradients and summary as vectors, totals of finished episodes, sums of `info`, last time step, and carry.
        """
        state = jax.device_put(jax.tree.unflatten(self._structure, self.task.packing.unpack(vectors)))
        key = jax.random.wrap_key_data(jnp.asarray(bits), impl=self.task.key_impl)
        act_key, update_key = jax.random.split(key)
        policy_carry, episodes = carry
        sums = InfoSums()

        def actor(t: int, time_step: TimeStep, carry: PyTree) -> PolicyStep:
            return self._act(state, act_key, np.uint32(t), time_step, carry)

        arrays = collect_on_host(actor, policy_carry, env, time_step, self.task.agent.num_steps, sums)
        assert arrays is not None, "a rollout without a deadline is always complete"
        time_steps, actions, info, next_carry = arrays
        halves = self._gradients(state, Rollout(time_steps, actions, info, policy_carry), update_key)
        episodes, finished = self._measure(episodes, time_steps)
        last: TimeStep = jax.tree.map(lambda x: x[-1], time_steps)
        halves, finished, episodes = jax.tree.map(np.asarray, (halves, finished, episodes))
        return halves, finished, sums, last, (next_carry, episodes)

    def _act_step(self, state: PyTree, key: PRNGKeyArray, t: Any, time_step: TimeStep, carry: PyTree) -> PolicyStep:
        step: PolicyStep = self.task.agent.collect_policy(state).action(time_step, carry, jax.random.fold_in(key, t))
        return step

    def _compute(self, state: PyTree, rollout: Rollout, key: PRNGKeyArray) -> Mapping[str, Any]:
        return self.task.result.pack(self.task.agent.gradients(state, rollout, key))
