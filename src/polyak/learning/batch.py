"""A rollout as a policy-gradient loss sees it: its rows, with what stays fixed while the epochs run."""

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32, Shaped

from polyak.core.spaces import Space
from polyak.core.struct import static, struct
from polyak.core.types import Network, PyTree, RecurrentNetwork, Rollout, Variables
from polyak.learning.check_rollout import check_memory
from polyak.learning.minibatches import map_rows
from polyak.networks.recurrent import unroll
from polyak.ops import losses
from polyak.ops.devices import any_over_devices, sum_over_devices
from polyak.ops.distributions import Distribution, broadcast_params, for_space
from polyak.ops.guard import finite_rows

# What can be not finite in a rollout, in the order in which one causes the next.
QUANTITIES = ("obs", "reward", "value", "log_prob")


@struct
class Rows:
    """The rows of a rollout; `N` for each transition, or `[T, B]` where a recurrent network needs whole sequences.

    Attributes:
        old_params: the parameters of the action's distribution when the rollout was collected.
        log_prob: of the action, likewise.
        value: likewise.
        weight: how much a row counts; 0 for one that only reset the environment.
        first: the row begins an episode; None unless sequences.
        carry: the network's memory at the first row of each sequence, `[B, ...]`; `()` unless sequences.
        sequences: rows stand in sequences.
        bare: rows without weight are hidden when they are taken.
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
    first: Bool[Array, "T B"] | None
    carry: PyTree
    sequences: bool = static(default=False)
    bare: bool = static(default=False)

    def at(self, index: Int32[Array, " M"]) -> "Rows":
        """The rows of these numbers, or the sequences of these environments."""
        leaves, tree = jax.tree.flatten(dataclasses.replace(self, carry=()))
        # The numbers of a row are taken at once, out of one table that XLA makes before the loop.
        single = [i for i, x in enumerate(leaves) if (x.shape, x.dtype) == (self.weight.shape, self.weight.dtype)]
        numbers = self.take(jnp.stack([leaves[i] for i in single], axis=-1), index)
        leaves = [numbers[..., single.index(i)] if i in single else self.take(x, index) for i, x in enumerate(leaves)]
        rows: Rows = jax.tree.unflatten(tree, leaves)
        if self.bare:
            return _zeroed(rows, rows.weight > 0)
        return dataclasses.replace(rows, carry=jax.tree.map(lambda x: x[index], self.carry))

    def take(self, x: Shaped[Array, "..."], index: Int32[Array, " M"]) -> Shaped[Array, "..."]:
        """The same for one array."""
        return x[:, index] if self.sequences else x[index]

    def scaled(self, centre: Float[Array, ""], scale: Float[Array, ""]) -> "Rows":
        """With advantages normalised by these."""
        return dataclasses.replace(self, advantage=(self.advantage - centre) * scale)

    def with_advantages(self, advantage: Float[Array, "T B"], value_target: Float[Array, "T B"]) -> "Rows":
        """The same rows with others of these, hidden where they have no weight."""
        lay = (lambda x: x) if self.sequences else flat
        shown = self.weight > 0
        hide = lambda x: jnp.where(shown, lay(x), 0.0)  # noqa: E731
        return dataclasses.replace(self, advantage=hide(advantage), value_target=hide(value_target))


@struct
class ActorCriticModel:
    """An actor-critic network, with the space that its actions are of.

    Attributes:
        squash: Box actions through tanh.
        microbatch_size: rows (with a memory: sequences) whose gradient is computed at a time; None: as many as are fast.
    """

    network: Network = static()
    action: Space = static()
    squash: bool = static(default=False)
    microbatch_size: int | None = static(default=None)

    @property
    def remembers(self) -> bool:
        """The network has a memory, so that it learns from sequences."""
        return isinstance(self.network, RecurrentNetwork)

    def distribution(self, params: PyTree, mask: PyTree) -> Distribution:
        """Of the actions, by the network's action parameters."""
        return for_space(self.action, params, mask, squash=self.squash)

    def forward(self, variables: Variables, rows: Rows) -> tuple[Distribution, Float[Array, "..."]]:
        """The distribution of actions and the value for these rows."""
        if isinstance(self.network, RecurrentNetwork):
            assert rows.first is not None, "it learns from sequences"
            params, value = self._through_time(self.network, variables, rows.obs, rows.first, rows.carry)
        else:
            (params, value), _, _ = self.network.apply(variables, rows.obs)
        return self.distribution(params, rows.action_mask), value

    def evaluate(
        self, variables: Variables, obs: PyTree, first: Bool[Array, "times B"], carry: PyTree
    ) -> tuple[PyTree, Float[Array, "times B"]]:
        """`(action_params, value)` of all observations of a rollout; without a memory in parts of whole steps."""
        if isinstance(self.network, RecurrentNetwork):
            check_memory(carry, self.network, first.shape[1])
            params, value = self._through_time(self.network, variables, obs, first, carry)
        else:
            params, value = map_rows(lambda part: self._answer(variables, part), obs, self.microbatch_size)
        return params, value

    def _through_time(
        self, network: RecurrentNetwork, variables: Variables, obs: PyTree, first: Bool[Array, "times B"], carry: PyTree
    ) -> tuple[PyTree, Float[Array, "times B"]]:
        (params, value), _ = unroll(network, variables, obs, first, carry)
        return broadcast_params(self.action, params, sequences=True), value

    def _answer(self, variables: Variables, obs: PyTree) -> tuple[PyTree, Float[Array, " N"]]:
        (params, value), _, _ = self.network.apply(variables, obs)
        return broadcast_params(self.action, params), value


def collected(
    model: ActorCriticModel,
    variables: Variables,
    obs: PyTree,
    rollout: Rollout,
    weight: Float[Array, "T B"],
    carry: PyTree,
    *,
    kept: bool,
) -> tuple[Rows, Float[Array, "times B"]]:
    """The rollout's `[T, B]` rows, still without advantages, and the values `[T+1, B]` of all its observations.

    Args:
        obs: all observations as the network shall see them.
        weight: see `row_weights`.
        carry: the network's memory at the first row.
        kept: values and action parameters are those that the policy kept in `rollout.info`.
    """
    params, value = model.evaluate(variables, obs, rollout.time_steps.first, carry)
    params = jax.tree.map(lambda x: x[:-1], params)
    if kept:
        if not (isinstance(rollout.info, Mapping) and {"params", "value"} <= set(rollout.info)):
            raise ValueError(
                f"update: values_when='collect' needs rollouts of collect_policy(state), got info {rollout.info!r}"
            )
        params = jax.tree.map(jnp.asarray, rollout.info["params"])
        value = jnp.concatenate([rollout.info["value"], value[-1:]])
    # After the end of an episode nothing may be allowed.
    mask = jax.tree.map(lambda allowed: allowed | ~rollout.valid[..., None], rollout.action_mask)
    rows = Rows(
        # Flat rows may go on to the last time step, which no row's number reaches: as they are, they need no copy.
        obs=jax.tree.map(lambda x: x[:-1], obs) if model.remembers else obs,
        action=rollout.actions,
        action_mask=mask,
        old_params=params,
        log_prob=model.distribution(params, mask).log_prob(rollout.actions),
        value=value[:-1],
        advantage=jnp.zeros_like(weight),
        value_target=jnp.zeros_like(weight),
        weight=weight,
        first=rollout.first if model.remembers else None,
        carry=carry if model.remembers else (),
        sequences=model.remembers,
    )
    return rows, value


def row_weights(valid: Bool[Array, "T B"], weights: Float[Array, "T B"] | Float[Array, " B"] | None) -> Float[Array, "T B"]:
    """How much each row counts: 0 where it is no transition or its weight is not a finite number above 0.

    Raises:
        TypeError: the weights are no real numbers.
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
    rows = jnp.broadcast_to(weights if weights.ndim == 2 else weights[None], valid.shape)
    return jnp.where(valid & (rows > 0) & jnp.isfinite(rows), rows, 0.0)


def not_finite(rows: Rows, value: Float[Array, "times B"], rollout: Rollout, axis_name: str | None) -> Bool[Array, " 4"]:
    """Which of the `QUANTITIES` of `[T, B]` rows are not all finite, where they count."""
    counts = counted(rows, rollout)
    next_counts = counts & ~rollout.terminated
    bad = jnp.stack([
        (counts & ~finite_rows(rollout.obs, 2)) | (next_counts & ~finite_rows(rollout.next_obs, 2)),
        counts & ~jnp.isfinite(rollout.reward),
        (counts & ~jnp.isfinite(value[:-1])) | (next_counts & ~jnp.isfinite(value[1:])),
        counts & ~jnp.isfinite(rows.log_prob),
    ])  # fmt: skip
    return any_over_devices(bad.any(axis=(1, 2)), axis_name)


def counted(rows: Rows, rollout: Rollout) -> Bool[Array, "T B"]:
    """The `[T, B]` rows that can reach a loss: those with weight, and in a sequence those that one of them remembers."""
    weighs = rows.weight > 0
    if not rows.sequences:
        return weighs

    def back(later: Array, row: tuple[Array, Array]) -> tuple[Array, Array]:
        weighs, first = row
        return (weighs | later) & ~first, weighs | later

    _, remembered = jax.lax.scan(back, jnp.zeros_like(weighs[0]), (weighs, rollout.first), reverse=True)
    return rollout.valid & remembered


def hidden(rows: Rows, rollout: Rollout, *, at_once: bool) -> Rows:
    """`[T, B]` rows as a loss takes them: flat, or in sequences, and zero where they cannot reach it.

    Args:
        at_once: else flat rows are hidden where they are taken, which saves a copy of the rollout, and costs every time.
    """
    if rows.sequences:
        shown = _zeroed(dataclasses.replace(rows, carry=()), counted(rows, rollout))
        return dataclasses.replace(shown, first=rows.first, carry=rows.carry)
    if not at_once:
        return dataclasses.replace(jax.tree.map(flat, rows), bare=True)
    rows = dataclasses.replace(rows, obs=jax.tree.map(lambda x: x[: rows.weight.shape[0]], rows.obs))
    return jax.tree.map(flat, _zeroed(rows, counted(rows, rollout)))


def _zeroed(rows: Rows, shown: Bool[Array, "..."]) -> Rows:
    """Rows with zeros (for masks: all allowed) in those not shown.

    A weight of 0 alone would not do: the gradient of a hidden row's loss is 0 times what the network made of it, and 0 times
    NaN is NaN.
    """

    def beside(x: Array) -> Array:
        return shown.reshape(*shown.shape, *(1,) * (x.ndim - shown.ndim))

    bare = dataclasses.replace(rows, action_mask=None, first=None)
    zeroed: Rows = jax.tree.map(lambda x: jnp.where(beside(x), x, jnp.zeros((), x.dtype)), bare)
    masks = jax.tree.map(lambda mask: mask | ~beside(mask), rows.action_mask)
    return dataclasses.replace(zeroed, action_mask=masks)


def flat(x: Shaped[Array, "..."]) -> Shaped[Array, "..."]:
    """`[T * B, ...]` of `[T, B, ...]`."""
    return x.reshape(-1, *x.shape[2:])


def advantage_scaling(
    rows: Rows, index: Int32[Array, "K M"], over: Literal["minibatch", "batch"] | None, axis_name: str | None
) -> tuple[Float[Array, " K"], Float[Array, " K"], Float[Array, " K"]]:
    """For every minibatch of an epoch: the mean of its advantages, one over their deviation, and its total weight.

    Args:
        over: what mean and deviation are taken over, always its entries that count; None: they are 0 and 1.
    """
    weight = jax.vmap(partial(rows.take, rows.weight))(index)
    total = sum_over_devices(weight.sum(axis=tuple(range(1, weight.ndim))), axis_name)
    if over is None:
        return jnp.zeros_like(total), jnp.ones_like(total), total

    def moments(advantage: Array, weight: Array) -> tuple[Array, Array]:
        mean, variance = losses.masked_mean_and_variance(advantage, weight, axis_name)
        several = sum_over_devices(jnp.sum(weight > 0, dtype=jnp.int32), axis_name) > 1
        # One entry has no deviation: it keeps its advantage.
        return jnp.where(several, mean, 0.0), jnp.where(several, 1.0 / (jnp.sqrt(variance) + 1e-8), 1.0)

    if over == "minibatch":
        centre, scale = jax.vmap(moments)(jax.vmap(partial(rows.take, rows.advantage))(index), weight)
    else:
        centre, scale = (jnp.full(total.shape, x) for x in moments(rows.advantage, rows.weight))
    return centre, scale, total
