"""Batches of policy-gradient losses: the samples or sequences of a rollout, with quantities that are fixed over the epochs."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Literal, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Shaped

from polyak.core.spaces import Space
from polyak.core.struct import static, struct
from polyak.core.types import Network, PyTree, RecurrentNetwork, Rollout, Variables
from polyak.learning.check_rollout import check_carry, check_returns
from polyak.networks.unroll import unroll
from polyak.ops.distributions import Distribution, broadcast_params, for_space
from polyak.ops.gradient_step import samples_in_cache
from polyak.ops.losses import (
    finite_rows,
    flatten_steps,
    mask_invalid,
    masked_mean_and_variance,
    sum_over_devices,
    swap_leading_axes,
)
from polyak.ops.normalize import ObsNormalizer

Weights: TypeAlias = Float[Array, "T B"] | Float[Array, " B"] | None
"""Weights of the transitions, or of the environments, of a rollout; None weighs all alike."""


@struct
class Batch:
    """Transitions to learn from: samples `[N]`, or for recurrent networks sequences `[N, T]`, one of each environment.

    Attributes:
        old_params: the parameters of the action distribution when the rollout was collected.
        log_prob: log-probability of the action when the rollout was collected.
        value: value of the observation when the rollout was collected.
        weight: weight of a transition in the loss; 0 for a row that only reset the environment.
        first: the row begins an episode; None for samples.
        carry: the network's carry at the first row of each sequence, `[N, ...]`; `()` for samples.
    """

    obs: PyTree
    action: PyTree
    action_mask: PyTree
    old_params: PyTree
    log_prob: Shaped[Array, "*N"]
    value: Shaped[Array, "*N"]
    advantage: Shaped[Array, "*N"]
    value_target: Shaped[Array, "*N"]
    weight: Shaped[Array, "*N"]
    first: Bool[Array, "*N"] | None
    carry: PyTree

    def at(self, index: Int32[Array, " M"]) -> "Batch":
        """The samples, or sequences, with these indices."""
        return jax.tree.map(lambda x: x[index], self)

    def with_advantages(
        self, advantage: Float[Array, "T B"], value_target: Float[Array, "T B"], intrinsic_advantage: Array | None = None
    ) -> "Batch":
        """This batch with new advantages, the sum of one or two parts, and value targets, zeroed where masked."""
        advantage = advantage if intrinsic_advantage is None else advantage + intrinsic_advantage
        to_rows = flatten_steps if self.first is None else swap_leading_axes
        advantage, value_target = (jnp.where(self.weight > 0, to_rows(x), 0.0) for x in (advantage, value_target))
        return dataclasses.replace(self, advantage=advantage, value_target=value_target)


@struct
class ActorCriticModel:
    """An actor-critic network, with the space of its actions.

    Attributes:
        squash: Box actions through tanh.
        has_images: observations pass through convolutions.
    """

    network: Network = static()
    action: Space = static()
    squash: bool = static(default=False)
    has_images: bool = static(default=False)

    @property
    def is_recurrent(self) -> bool:
        """The network has a carry, so it learns from sequences."""
        return isinstance(self.network, RecurrentNetwork)

    def distribution(self, params: PyTree, mask: PyTree) -> Distribution:
        """The action distribution with these parameters."""
        return for_space(self.action, params, mask, squash=self.squash)

    def forward(self, variables: Variables, batch: Batch) -> tuple[Distribution, Float[Array, "*N"]]:
        """The action distribution and the value of each sample."""
        if isinstance(self.network, RecurrentNetwork):
            assert batch.first is not None, "recurrent networks learn from sequences"
            time_major = jax.tree.map(swap_leading_axes, (batch.obs, batch.first))
            obs, first = time_major
            outputs = self._unroll(self.network, variables, obs, first, batch.carry)
            params, value = jax.tree.map(swap_leading_axes, outputs)
        else:
            (params, value), _, _ = self.network.apply(variables, batch.obs)
        return self.distribution(params, batch.action_mask), value

    def evaluate(
        self,
        variables: Variables,
        obs: PyTree,
        first: Bool[Array, "times B"],
        carry: PyTree,
        microbatch_size: int | None = None,
    ) -> tuple[PyTree, Float[Array, "times B"]]:
        """`(action_params, value)` of all observations of a rollout; feed-forward networks take some steps at a time."""
        if isinstance(self.network, RecurrentNetwork):
            check_carry(carry, self.network, first.shape[1])
            return self._unroll(self.network, variables, obs, first, carry)

        def apply(obs: PyTree) -> tuple[PyTree, Float[Array, " N"]]:
            (params, value), _, _ = self.network.apply(variables, obs)
            return broadcast_params(self.action, params), value

        params, value = map_steps(apply, obs, microbatch_size, has_images=self.has_images)
        return params, value

    def _unroll(
        self, network: RecurrentNetwork, variables: Variables, obs: PyTree, first: Bool[Array, "times B"], carry: PyTree
    ) -> tuple[PyTree, Float[Array, "times B"]]:
        (params, value), _ = unroll(network, variables, obs, first, carry)
        return broadcast_params(self.action, params, sequences=True), value


def make_batch(
    model: ActorCriticModel,
    rollout: Rollout,
    obs: PyTree,
    weight: Float[Array, "T B"],
    carry: PyTree,
    params: PyTree,
    value: Float[Array, "times B"],
    axis_name: str | None = None,
) -> tuple[Batch, dict[str, Bool[Array, ""]]]:
    """The rollout's samples or sequences, still without advantages, and which of obs, reward, value, log_prob are not finite.

    Rows that cannot reach the loss are zeroed, so that NaN there changes no bit. A weight of 0 is not enough: the gradient of a
    masked sample's loss is 0 times the network's gradient, and 0 times NaN is NaN.

    Args:
        obs: all observations `[T+1, B]` as the network sees them.
        weight: see `sample_weights`.
        carry: the network's carry at the first row.
        params: the parameters of the action distributions, `[T, B, ...]`.
        value: values of all observations.
        axis_name: the mesh axis that environments are split over.
    """
    mask = _mask_of_valid(rollout)
    log_prob = model.distribution(params, mask).log_prob(rollout.actions)
    used = weight > 0
    if model.is_recurrent:
        used = rollout.valid & _reaches_weight(used, rollout.first)
    next_used = used & ~rollout.terminated
    bad = {
        "obs": (used & ~finite_rows(rollout.obs, 2)) | (next_used & ~finite_rows(rollout.next_obs, 2)),
        "reward": used & ~jnp.isfinite(rollout.reward),
        "value": (used & ~jnp.isfinite(value[:-1])) | (next_used & ~jnp.isfinite(value[1:])),
        "log_prob": used & ~jnp.isfinite(log_prob),
    }
    found = any_over_devices(jnp.stack([flags.any() for flags in bad.values()]), axis_name)
    obs, action, params, log_prob, value = mask_invalid(
        (jax.tree.map(lambda x: x[:-1], obs), rollout.actions, params, log_prob, value[:-1]), used
    )
    zeros = jnp.zeros_like(weight)
    mask = jax.tree.map(lambda allowed: allowed | ~used[..., None], mask)
    first = rollout.first if model.is_recurrent else None
    batch = Batch(obs, action, mask, params, log_prob, value, zeros, zeros, weight, first, ())
    batch = jax.tree.map(swap_leading_axes if model.is_recurrent else flatten_steps, batch)
    # The carry of an environment whose first row is not used, or starts an episode, reaches no loss either.
    carry = mask_invalid(carry, (used & ~rollout.first)[0]) if model.is_recurrent else ()
    batch = dataclasses.replace(batch, carry=carry)
    return batch, dict(zip(bad, found, strict=True))


def log_probs(model: ActorCriticModel, rollout: Rollout, params: PyTree) -> Float[Array, "T B"]:
    """The log-probability of each action of a rollout, where `params` are the parameters of the distributions."""
    return model.distribution(params, _mask_of_valid(rollout)).log_prob(rollout.actions)


def network_inputs(
    rollout: Rollout, normalizer: ObsNormalizer | None, normalize_reward: Literal["return", "reward"] | None
) -> tuple[PyTree, PyTree]:
    """All observations, normalized, and the network's carry at the first observation.

    Args:
        normalize_reward: with `"return"`, the rollout's carry must be a carry of `DiscountedReturn`.

    Raises:
        ValueError: the carry is another one.
    """
    obs, carry = rollout.time_steps.obs, rollout.carry
    if normalize_reward == "return":
        check_returns(rollout)
        carry, _ = carry
    return obs if normalizer is None else normalizer.normalize(obs), carry


def outputs_in_info(rollout: Rollout, value: Float[Array, "any B"], setting: str) -> tuple[PyTree, Float[Array, "times B"]]:
    """`(action_params, value)` that `collect_policy` stored in `rollout.info`, with the last row of `value` appended.

    Args:
        setting: the setting, or the agent, that needs `rollout.info`, for the error.

    Raises:
        ValueError: `rollout.info` has none.
    """
    info = rollout.info
    if not (isinstance(info, Mapping) and {"params", "value"} <= set(info)):
        raise ValueError(f"update: {setting} needs rollouts of collect_policy(state), got info {info!r}")
    return jax.tree.map(jnp.asarray, info["params"]), jnp.concatenate([info["value"], value[-1:]])


def sample_weights(valid: Bool[Array, "T B"], weights: Weights) -> Float[Array, "T B"]:
    """Weights of the transitions; 0 for rows without a transition, and for weights that are not finite numbers above 0.

    Raises:
        TypeError: the weights are not real numbers.
        ValueError: the weights are neither `[T, B]` nor `[B]`.
    """
    if weights is None:
        return valid.astype(jnp.float32)
    dtype = weights.dtype if isinstance(weights, jax.Array) else np.asarray(weights).dtype
    if not any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, jnp.bool_)):
        raise TypeError(f"update: weights must be real numbers, got {dtype}")
    weights = jnp.asarray(weights, jnp.float32)
    if weights.shape not in (valid.shape, valid.shape[1:]):
        raise ValueError(f"update: weights must have the shape {valid.shape} or {valid.shape[1:]}, got {weights.shape}")
    weights = jnp.broadcast_to(weights if weights.ndim == 2 else weights[None], valid.shape)
    return jnp.where(valid & (weights > 0) & jnp.isfinite(weights), weights, 0.0)


def normalize_minibatches(
    batch: Batch,
    index: Int32[Array, "K M"],
    over: Literal["minibatch", "batch"] | None,
    axis_name: str | None,
) -> tuple[Batch, Float[Array, " K"]]:
    """The batch with normalized advantages and, in each minibatch, weights that sum to 1; and the sums of the weights before.

        A ← (A - mean) / (std + 10⁻⁸),   w ← w / Σ w

    Args:
        index: the minibatches; every sample is in one of them.
        over: entries of the weighted mean and standard deviation: the sample's `"minibatch"` or the `"batch"`; None leaves
            advantages unchanged.
        axis_name: the mesh axis that the batch is split over.
    """
    advantage, weight = (x[index] for x in (batch.advantage, batch.weight))
    axes = tuple(range(1, weight.ndim))
    total = sum_over_devices(weight.sum(axis=axes), axis_name)

    def normalize(advantage: Array, weight: Array) -> Array:
        mean, variance = masked_mean_and_variance(advantage, weight, axis_name)
        # A single sample has no standard deviation: it keeps its advantage.
        several = sum_over_devices(jnp.sum(weight > 0, dtype=jnp.int32), axis_name) > 1
        return jnp.where(several, (advantage - mean) / (jnp.sqrt(variance) + 1e-8), advantage)

    if over == "minibatch":
        advantage = jax.vmap(normalize)(advantage, weight)
    elif over == "batch":
        advantage = normalize(batch.advantage, batch.weight)[index]
    weight = weight / jnp.where(total > 0, total, 1.0).reshape(-1, *(1,) * len(axes))
    advantage, weight = (old.at[index].set(new) for old, new in ((batch.advantage, advantage), (batch.weight, weight)))
    return dataclasses.replace(batch, advantage=advantage, weight=weight), total


def map_steps(
    function: Callable[[PyTree], PyTree], tree: PyTree, microbatch_size: int | None = None, *, has_images: bool = False
) -> PyTree:
    """Apply `function`, which maps leaves `[N, ...]` per sample, to leaves `[T, B, ...]` in chunks of time steps.

    Args:
        microbatch_size: maximum samples per chunk, but at least one time step; None: as many as fit the cache.
        has_images: observations pass through convolutions.
    """
    num_steps, num_envs = jax.tree.leaves(tree)[0].shape[:2]
    limit = samples_in_cache(has_images) if microbatch_size is None else microbatch_size
    steps = min(num_steps, max(1, limit // num_envs))

    def apply(chunk: PyTree) -> PyTree:
        leading = jax.tree.leaves(chunk)[0].shape[:2]
        out = function(jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), chunk))
        return jax.tree.map(lambda x: x.reshape(*leading, *x.shape[1:]), out)

    chunks, rest = num_steps // steps, num_steps % steps
    if chunks == 1:
        return apply(tree)
    mapped = jax.lax.map(apply, jax.tree.map(lambda x: x[: chunks * steps].reshape(chunks, steps, *x.shape[1:]), tree))
    mapped = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), mapped)
    if rest == 0:
        return mapped
    last = apply(jax.tree.map(lambda x: x[-rest:], tree))
    return jax.tree.map(lambda a, b: jnp.concatenate([a, b]), mapped, last)


def any_over_devices(x: Bool[Array, "*S"], axis_name: str | None) -> Bool[Array, "*S"]:
    """True where `x` is True on at least one device."""
    return sum_over_devices(x.astype(jnp.int32), axis_name) > 0


def _mask_of_valid(rollout: Rollout) -> PyTree:
    """The allowed actions; all of them after the end of an episode, where the environment may allow none."""
    return jax.tree.map(lambda allowed: allowed | ~rollout.valid[..., None], rollout.action_mask)


def _reaches_weight(has_weight: Bool[Array, "T B"], first: Bool[Array, "T B"]) -> Bool[Array, "T B"]:
    """True for rows that have a weight, or come before a row with weight in the same episode, which depends on their carry."""

    def back(later: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        has_weight, first = row
        return (has_weight | later) & ~first, has_weight | later

    _, reaches = jax.lax.scan(back, jnp.zeros_like(has_weight[0]), (has_weight, first), reverse=True)
    return reaches
