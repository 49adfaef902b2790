"""A policy on the steps of a data set: the probabilities of recorded actions, and the policy's own actions."""

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jaxtyping import Array, Float, PRNGKeyArray

from polyak.core.policy_faults import ExceptionRelay
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, MultiDiscrete, in_action, leaf_spaces, map_space
from polyak.core.struct import struct
from polyak.core.types import Policy, PyTree, TimeStep
from polyak.data.content import check_spaces
from polyak.data.data_set import DataSet
from polyak.loops.agent_check import check_policy_methods
from polyak.networks.policy_head import range_of_means
from polyak.ops.distributions import Categorical, Deterministic, Joint, Normal
from polyak.ops.distributions.bounded import ClippedNormal
from polyak.ops.distributions.combinations import MAX_COMBINATIONS, Combinations, unravel_action
from polyak.ops.distributions.events import add
from polyak.ops.distributions.exploration import Select, select_rows
from polyak.policies.episode_head import EpisodeHead
from polyak.policies.mixture import Mixture
from polyak.policies.noise import ActionSmoothing, MixedNoise, OUNoise
from polyak.policies.parameter_noise import ParameterNoise
from polyak.policies.q_policy import FreshNoise
from polyak.policies.repeated_noise import RepeatedNoise
from polyak.policies.sde import StateDependentExploration

# Rows in one call of a policy or of action values.
CHUNK = 4096
# They act by draws or earlier actions of their own, which the data lack.
SELF_DEPENDENT = (
    ActionSmoothing, EpisodeHead, FreshNoise, MixedNoise, Mixture, OUNoise, ParameterNoise, RepeatedNoise,
    StateDependentExploration,
)  # fmt: skip

Outputs = Callable[[Any, PyTree, PRNGKeyArray], PyTree]


@dataclass(frozen=True)
class PolicySteps:
    """A policy, and the steps of a data set in its units: N + E rows of observations, N of which an action follows.

    Attributes:
        name: the function and its argument, for errors, such as `evaluate_offline: policy`.
        policy: the policy.
        data: the data set, with the spaces of the policy.
        spec: the policy's spec, with all entries of the data's observations.
        time_steps: leaves `[N + E, ...]`, episode by episode; the last row of an episode is its final observation.
        action: leaves `[N, ...]`.
        row: the row of each step's observation `[N]`; its next observation is in `row + 1`.
    """

    name: str
    policy: Policy
    data: DataSet
    spec: EnvSpec
    time_steps: TimeStep
    action: PyTree
    row: npt.NDArray[np.int64]

    @property
    def terminated(self) -> npt.NDArray[np.bool_]:
        """The step reached a terminal state `[N]`."""
        return np.asarray(self.time_steps.terminated)[self.row + 1]

    @property
    def episode(self) -> npt.NDArray[np.int64]:
        """The number of each step's episode `[N]`."""
        return np.repeat(np.arange(self.data.num_episodes), self.data.lengths)

    def describe_first(self, is_bad: npt.NDArray[np.bool_]) -> str:
        """The first step that is bad `[N]`, for errors: `step 3 of episode 0`."""
        first = int(np.flatnonzero(is_bad)[0])
        episode = int(self.episode[first])
        return f"step {first - int(self.data.starts[episode])} of episode {episode}"


@struct
class Choices:
    """Actions of a policy in each row, and their probabilities: all actions of a finite space, or K samples.

    Attributes:
        action: leaves `[rows, K, ...]`.
        probability: `[rows, K]`.
    """

    action: PyTree
    probability: Float[Any, "rows K"]


def read_steps(owner: str, policy: Policy, data: Any, name: str = "policy") -> PolicySteps:
    """The steps of a data set in the units of a policy.

    Args:
        owner: the function with the arguments, for errors.
        name: the policy's argument.

    Raises:
        TypeError: `policy` is no policy, or `data` no data set.
        ValueError: the data are of another environment, or the policy acts by draws or earlier actions of its own, or has Box
            actions without a spec.
    """
    check_policy_methods(owner, policy, name)
    if not isinstance(data, DataSet):
        raise TypeError(f"{owner}: data must be a data set of polyak.data.load or collect, got {type(data).__name__}")
    nodes = jax.tree.leaves(policy, is_leaf=lambda node: isinstance(node, SELF_DEPENDENT))
    if others := [type(node).__name__ for node in nodes if isinstance(node, SELF_DEPENDENT)]:
        raise ValueError(
            f"{owner}: {name} must not act by draws or earlier actions of its own, which the data lack, got {others[0]}; "
            "evaluate the policies inside"
        )
    spec: EnvSpec | None = getattr(policy, "spec", None)
    if spec is None and any(isinstance(leaf, Box) for _, leaf in leaf_spaces(data.spec.action)):
        raise ValueError(
            f"{owner}: {name} must have a spec, which has the units of its Box actions, got {type(policy).__name__} without one"
        )
    spec = data.spec if spec is None else spec
    obs, data_obs = spec.obs, data.spec.obs
    if isinstance(obs, Dict) and isinstance(data_obs, Dict) and set(obs.spaces) < set(data_obs.spaces):
        spec = dataclasses.replace(spec, obs=data_obs)
    data = check_spaces(owner, data, spec)
    rollout = data.rollout(spec, pad=True)
    time_steps = jax.tree.map(lambda x: np.asarray(x)[:, 0], rollout.time_steps)
    row = np.flatnonzero(~time_steps.last)
    action = jax.tree.map(lambda x: np.asarray(x)[row, 0], rollout.actions)
    return PolicySteps(f"{owner}: {name}", policy, data, spec, time_steps, action, row)


def action_log_probs(policy: Policy, data: DataSet) -> npt.NDArray[np.float32]:
    """The log-probabilities of the recorded actions under a policy, `[N]`.

    `dataclasses.replace(data, log_prob=action_log_probs(policy, data))` stores them for the policy that has collected the data.

    For each number of a Box action it is the log-density per unit of the environment's actions; but where the action is on a
    bound, the logarithm of the probability that the policy's action lies on the bound or beyond, as actions are clipped. Only a
    Gaussian policy has that one.

    Raises:
        TypeError, ValueError: `policy` or `data` is invalid, or the policy is deterministic with Box actions, or has no
            probabilities, as for Boxes of integers; or an action is on a bound, and the policy is not Gaussian.
    """
    return compute_log_probs(read_steps("action_log_probs", policy, data))


def compute_log_probs(steps: PolicySteps) -> npt.NDArray[np.float32]:
    """See `action_log_probs`."""
    wanted = f"{steps.name} must have probabilities of actions"
    for path, leaf in leaf_spaces(steps.spec.action):
        if isinstance(leaf, Box) and leaf.dtype.kind != "f":
            raise ValueError(f"{wanted}, got integers of {leaf}{in_action(path)}, which have none; use method='fqe' or 'dm'")

    def outputs(distribution: Any, action: PyTree, key: PRNGKeyArray) -> PyTree:
        log_prob, size = _log_prob(wanted, steps.spec, steps.spec.action, distribution, action), len(jax.tree.leaves(action)[0])
        if log_prob.shape != (size,):
            raise ValueError(f"{wanted}, log_prob of shape ({size},) for as many observations, got shape {log_prob.shape}")
        return log_prob

    source = np.zeros(len(steps.time_steps.first), np.int64)
    source[steps.row] = np.arange(len(steps.row))
    actions = jax.tree.map(lambda x: x[source], steps.action)
    try:
        log_prob: npt.NDArray[np.float32] = _map_rows(steps, actions, outputs, jax.random.key(0))[steps.row]
    except NotImplementedError as error:
        raise ValueError(f"{wanted}, got {type(steps.policy).__name__}: {error}; use method='fqe' or 'dm'") from None
    if (is_bad := np.isnan(log_prob)).any():
        got = f"{type(steps.policy).__name__} for the action of {steps.describe_first(is_bad)}"
        for (path, leaf), x in zip(leaf_spaces(steps.spec.action), jax.tree.leaves(steps.action), strict=True):
            if isinstance(leaf, Box) and _is_on_bound(steps.spec, leaf, x[is_bad])[0]:
                raise ValueError(
                    f"{wanted}, got only a density of {got}, which is on a bound of {leaf}{in_action(path)}; use method='fqe' "
                    "or 'dm'"
                )
        raise ValueError(f"{wanted}, got NaN of {got}")
    return log_prob - _log_units(steps)


def compute_choices(steps: PolicySteps, key: PRNGKeyArray, num_samples: int) -> Choices:
    """All actions with their probabilities where they are Discrete or MultiDiscrete, else samples, for all N + E rows."""
    space = steps.spec.action
    every = _all_actions(space)

    def outputs(distribution: Any, action: PyTree, key: PRNGKeyArray) -> PyTree:
        if every is not None:
            return _probabilities(distribution, every, len(action))
        keys = jax.random.split(key, 1 if _is_deterministic(distribution) else num_samples)
        samples = jax.vmap(lambda key: distribution.sample(seed=key), out_axes=1)(keys)
        return map_space(lambda leaf, x: _clip(steps.spec, leaf, x), space, samples)

    rows = len(steps.time_steps.first)
    any_action = jax.tree.map(lambda x: np.zeros((rows, *x.shape[1:]), x.dtype), steps.action)
    result = _map_rows(steps, any_action, outputs, key)
    if every is not None:
        if result.shape[1] != len(every):
            raise ValueError(f"{steps.name} must have the {len(every)} actions of the data, got {result.shape[1]}")
        return Choices(np.broadcast_to(every, (rows, *every.shape)), result)
    count = jax.tree.leaves(result)[0].shape[1]
    return Choices(result, np.full((rows, count), 1 / count, np.float32))


def take_rows(tree: Any, index: npt.NDArray[np.int64]) -> Any:
    """Some rows of all arrays of a tree."""
    return jax.tree.map(lambda x: x[index], tree)


def _log_prob(wanted: str, spec: EnvSpec, space: Any, distribution: Any, action: PyTree) -> Array:
    """The log-probability of the action that the environment executes: a Normal is clipped to the bounds of the action.

    NaN where an action is on a bound and the distribution has only a density there.

    Raises:
        ValueError: actions of a Box are deterministic.
    """
    log_prob = partial(_log_prob, wanted, spec)
    boxes = [f"{leaf}{in_action(path)}" for path, leaf in leaf_spaces(space) if isinstance(leaf, Box)]
    match distribution:
        case Select():
            each = [log_prob(space, part, action) for part in distribution.parts]
            return cast(Array, select_rows(distribution.choice, each))
        case Joint():
            return add(jax.tree.leaves(map_space(log_prob, space, distribution.parts, action)))
        case Deterministic() if boxes:
            raise ValueError(
                f"{wanted}, got a deterministic policy of {boxes[0]}, whose actions the data never have exactly; use "
                "method='fqe' or 'dm', which need none"
            )
        case Normal() if boxes:
            low, high = (jnp.broadcast_to(bound, distribution.loc.shape) for bound in spec.action_bounds(space))
            distribution = ClippedNormal(distribution.loc, distribution.scale, low, high, distribution.event_ndims)
    result: Array = distribution.log_prob(action)
    has_density = isinstance(space, Box) and not isinstance(distribution, ClippedNormal)
    return jnp.where(_is_on_bound(spec, space, action), jnp.nan, result) if has_density else result


def _is_on_bound(spec: EnvSpec, box: Box, action: Any) -> Any:
    """A number of the policy's action is on a bound `[B]`."""
    low, high = (np.broadcast_to(bound, action.shape) for bound in spec.action_bounds(box))
    return ((action <= low) | (action >= high)).reshape(len(action), -1).any(axis=1)


def _map_rows(steps: PolicySteps, actions: PyTree, outputs: Outputs, key: PRNGKeyArray) -> Any:
    """`outputs(distribution, action, key)` for all rows, as NumPy arrays; a recurrent policy sees them one after another."""
    policy, rows = steps.policy, len(steps.time_steps.first)
    size = min(CHUNK, rows)
    is_recurrent = bool(jax.tree.leaves(policy.initial_state(1)))

    def run_batch(policy: Any, carry: PyTree, batch: PyTree, key: PRNGKeyArray) -> tuple[PyTree, PyTree]:
        distribution, _ = policy.distribution(batch[0], carry)
        return carry, outputs(distribution, batch[1], key)

    def run_sequence(policy: Any, carry: PyTree, batch: PyTree, key: PRNGKeyArray) -> tuple[PyTree, PyTree]:
        def step(carry: PyTree, row: PyTree) -> tuple[PyTree, PyTree]:
            (time_step, action), key = row
            time_step, action = jax.tree.map(lambda x: x[None], (time_step, action))
            distribution, carry = policy.distribution(time_step, carry)
            return carry, jax.tree.map(lambda x: x[0], outputs(distribution, action, key))

        carry, results = jax.lax.scan(step, carry, (batch, jax.random.split(key, size)))
        return carry, results

    program, relay = jax.jit(run_sequence if is_recurrent else run_batch), ExceptionRelay(policy)
    carry, results = policy.initial_state(1 if is_recurrent else size), []
    for start in range(0, rows, size):
        # The last chunk is filled up with the last row, in which an episode has ended.
        index = np.minimum(np.arange(start, start + size), rows - 1)
        batch = jax.tree.map(jnp.asarray, take_rows((steps.time_steps, actions), index))
        carry, result = relay.run(program, policy, carry, batch, jax.random.fold_in(key, start))
        results.append(jax.device_get(result))
    return jax.tree.map(lambda *x: np.concatenate(x)[:rows], *results)


def _probabilities(distribution: Any, actions: Array, rows: int) -> Float[Array, "rows n"]:
    match distribution:
        case Categorical():
            return distribution.probs()
        case Combinations():
            return distribution.numbers.probs()

    def log_prob(action: Array) -> Array:
        return distribution.log_prob(jnp.broadcast_to(action, (rows, *action.shape)))

    return jnp.exp(jax.vmap(log_prob, out_axes=-1)(actions))


def _all_actions(space: Any) -> Array | None:
    """All actions of a Discrete or a not too large MultiDiscrete space, in the order of `ravel_action`; else None."""
    match space:
        case Discrete():
            return jnp.arange(space.n, dtype=jnp.int32)
        case MultiDiscrete() if np.prod(space.nvec, dtype=np.float64) <= MAX_COMBINATIONS:
            return unravel_action(space.nvec, jnp.arange(int(np.prod(space.nvec)), dtype=jnp.int32))
    return None


def _clip(spec: EnvSpec, leaf: Any, x: Array) -> Array:
    if not isinstance(leaf, Box):
        return x
    low, high = (jnp.broadcast_to(bound, x.shape) for bound in spec.action_bounds(leaf))
    return jnp.clip(x, low, high)


def _log_units(steps: PolicySteps) -> npt.NDArray[np.float32]:
    """The excess of a log-density per unit of the policy's actions over one per unit of the environment's `[N]`.

    On a bound there is a probability, which has no unit.
    """
    total = np.zeros(len(steps.row), np.float32)
    if steps.spec.action_scaling == "clip":
        return total
    boxes = [leaf for _, leaf in leaf_spaces(steps.spec.action)]
    for box, x in zip(boxes, jax.tree.leaves(steps.action), strict=True):
        if isinstance(box, Box):
            _, half_range = range_of_means(steps.data.spec, box)
            is_inside = (np.abs(x) < 1) & (half_range > 0)
            total += np.where(is_inside, np.log(np.where(half_range > 0, half_range, 1)), 0).reshape(len(x), -1).sum(axis=1)
    return total


def _is_deterministic(distribution: Any) -> bool:
    """All parts of the action are deterministic."""
    nodes = jax.tree.leaves(distribution, is_leaf=lambda node: isinstance(node, Deterministic))
    return all(isinstance(node, Deterministic) for node in nodes)
