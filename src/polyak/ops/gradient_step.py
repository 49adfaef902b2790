"""Gradients of a loss, the step along them, skipped where anything is NaN or infinite, and the optimizers of the agents."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from jaxtyping import Array, Bool, Float, UInt32

from polyak.core.printing import text_of
from polyak.core.struct import struct
from polyak.core.types import Metrics, PyTree, Scalar, Terms, Variables
from polyak.ops.losses import sum_over_devices
from polyak.ops.schedules import Count, Schedule, value_at


@struct
class Aux:
    """Terms and statistics that a loss returns with its value.

    Attributes:
        terms: terms of the loss by name: numbers, which add up over the parts of a batch, or one value per sample, `[N]`.
        stats: the network's new statistics (batch normalization, counters), in the tree of `Variables.stats`; None: unchanged.
    """

    terms: Terms
    stats: PyTree = None


LossFn: TypeAlias = Callable[[PyTree, PyTree], tuple[Float[Array, ""], Aux]]
"""`(params, batch)` to the loss, and its terms and new statistics."""

QUANTITIES = ("obs", "reward", "value", "log_prob", "loss", "gradient", "statistics", "step", "action")
"""Quantities that are checked for NaN and infinity, in the order in which one causes the next: the data, the loss and its
gradient, a network's statistics, the parameters and optimizer state after the step; finally the actions in a replay's data.
Saved states store a quantity's number, so append new quantities."""

ADAM_SETTINGS = ("learning_rate", "actor_learning_rate", "alpha_learning_rate", "adam_b1", "adam_eps", "max_grad_norm")
"""Settings of Adam, which have no effect with an `optimizer`."""

RMSPROP_SETTINGS = ("optimizer_name", "rms_decay", "rms_eps")
"""Settings of RMSProp, which have no effect with an `optimizer`."""

# XLA's CPU back end vectorizes elementwise code on two threads only where they divide the length: with an odd length, Adam on
# 142,605 parameters takes 5 times as long.
VECTOR_MULTIPLE = 1024
# Above this size memory bandwidth is the limit: one vector gains nothing, and costs a copy of the gradient.
LARGEST_VECTOR = 1_000_000

# With this many samples the gradient of a (64, 64) network is twice as fast as with activations that exceed the cache.
SAMPLES_IN_CACHE = 4096
# A device of one core has only the cache of that core; a single device uses several cores for large products.
SAMPLES_IN_CORE_CACHE = 512
# The gradient of `NatureCNN` for 256 images of 84x84 takes 0.22 s by 32 at a time, 0.26 by 64, and 0.35 at once.
IMAGES_IN_CACHE = 32


@struct
class Guard:
    """Counts of skipped gradient steps; part of an agent's state.

    Attributes:
        skipped: gradient steps skipped so far.
        consecutive_skipped_updates: consecutive updates, up to now, in which a network took no gradient step because of NaN
            or infinity. An update in which no step of a network was scheduled leaves the count unchanged.
        nonfinite_source: the first of `QUANTITIES` that was NaN or infinite in the latest such update, counted from 1; 0: none.
    """

    skipped: UInt32[Array, ""]
    consecutive_skipped_updates: UInt32[Array, ""]
    nonfinite_source: UInt32[Array, ""]

    @classmethod
    def init(cls) -> "Guard":
        """All counts are 0."""
        return cls(*(jnp.zeros((), jnp.uint32) for _ in range(3)))

    def after_update(
        self, skipped: UInt32[Array, "*networks"], applied: UInt32[Array, "*networks"], bad: Bool[Array, " quantities"]
    ) -> "Guard":
        """The counts after an update, from its numbers of skipped and applied gradient steps; `bad` as by `flag_quantities`."""
        any_bad, first = jnp.any(bad), jnp.argmax(bad).astype(jnp.uint32) + jnp.uint32(1)
        has_failed = any_bad & jnp.any((skipped > 0) & (applied == 0))
        consecutive = jnp.where(jnp.all(applied > 0), jnp.uint32(0), self.consecutive_skipped_updates)
        return Guard(
            skipped=self.skipped + skipped.sum(dtype=jnp.uint32),
            consecutive_skipped_updates=jnp.where(has_failed, self.consecutive_skipped_updates + jnp.uint32(1), consecutive),
            nonfinite_source=jnp.where(any_bad, first, self.nonfinite_source),
        )

    def metrics(self) -> Metrics:
        """The counts by tag, as `diagnose_skips` reads them."""
        return {
            "train/skipped_steps": self.skipped,
            "train/consecutive_skipped_updates": self.consecutive_skipped_updates,
            "train/nonfinite_source": self.nonfinite_source,
        }


def flag_quantities(flags: Mapping[str, Bool[Array, ""]]) -> Bool[Array, " quantities"]:
    """One flag for each of `QUANTITIES`, False for missing flags.

    >>> flag_quantities({"gradient": jnp.array(True)}).tolist()
    [False, False, False, False, False, True, False, False, False]
    """
    return jnp.stack([jnp.asarray(flags.get(name, False)) for name in QUANTITIES])


@struct
class StepLog:
    """The record of a gradient step; a scan stacks the records. If a step trains several networks, each has its own flags.

    Attributes:
        terms: terms of the loss, and `grad_norm`, the norm of the gradient before clipping. Terms with one value per sample
            cover this device's samples.
        bad: a flag for each of `QUANTITIES`: it held NaN or infinity.
        applied: the step was applied.
        skipped: the step was enabled and not applied, because of NaN or infinity.
    """

    terms: Terms
    bad: Bool[Array, "*steps quantities"]
    applied: Bool[Array, "*steps"]
    skipped: Bool[Array, "*steps"]


def compute_gradient(
    loss_fn: LossFn, params: PyTree, batch: PyTree, *, num_microbatches: int = 1, axis_name: str | None = None
) -> tuple[PyTree, Aux]:
    """The float32 gradient of `loss_fn(params, batch)`; its terms, with `loss` and `grad_norm`; and the new statistics.

    Over microbatches and devices the loss and the terms that are numbers are summed, and statistics are averaged; integers and
    keys among the statistics are taken from the first part. Terms with one value per sample cover this device's samples.

    Args:
        num_microbatches: equal parts of the batch whose gradients are computed one after the other.
        axis_name: inside `shard_map`, the mesh axis that the batch is split over.

    Raises:
        TypeError: the loss returns something other than `(loss, aux)`.
    """

    def gradient_of(part: PyTree) -> tuple[tuple[PyTree, Terms], tuple[Terms, PyTree]]:
        def loss(params: PyTree) -> tuple[Float[Array, ""], Aux]:
            match result := loss_fn(params, part):
                case (value, Aux() as aux):
                    return value, dataclasses.replace(aux, terms=aux.terms | {"loss": value})
            wanted = "(loss, aux), aux a polyak.ops.gradient_step.Aux such as Aux({'error': error})"
            raise TypeError(f"loss_fn must return {wanted}, got {text_of(result)}")

        gradient, aux = jax.grad(loss, has_aux=True)(params)
        samples = {name: term for name, term in aux.terms.items() if jnp.ndim(term) > 0}
        # Not the difference of two sets, whose order, and so the program that caches go by, differs between processes.
        numbers = {name: term for name, term in aux.terms.items() if name not in samples}
        return (in_float32(gradient), numbers), (samples, aux.stats)

    (gradient, terms), (samples, stats) = accumulate(gradient_of, batch, num_microbatches, axis_name)
    samples = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), samples)
    stats = jax.tree.map(partial(_mean_over_parts, axis_name=axis_name), stats)
    return gradient, Aux(terms | samples | {"grad_norm": global_norm(gradient)}, stats)


def non_finite(aux: Aux) -> dict[str, Bool[Array, ""]]:
    """Flag a loss and a gradient that are NaN or infinite, by the terms that `compute_gradient` returned."""
    return {"loss": ~jnp.isfinite(aux.terms["loss"]), "gradient": ~jnp.isfinite(aux.terms["grad_norm"])}


def _mean_over_parts(x: Array, axis_name: str | None) -> Array:
    """The mean of one leaf of statistics, `[parts, ...]`, over the parts of all devices; of integers and keys the first."""
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x[0]
    mean = jnp.mean(in_float32(x), axis=0)
    return (mean if axis_name is None else jax.lax.pmean(mean, axis_name)).astype(x.dtype)


def apply_gradient(
    optimizer: optax.GradientTransformation,
    variables: Variables,
    optimizer_state: PyTree,
    gradient: PyTree,
    aux: Aux,
    bad: Mapping[str, Bool[Array, ""]],
    enabled: Bool[Array, ""] | bool = True,
    data_is_finite: Bool[Array, ""] | bool = True,
) -> tuple[Variables, PyTree, StepLog]:
    """Variables and optimizer state after one step along a gradient of `compute_gradient`, and the log of the step.

    No bit of variables and state changes if the step is not enabled, or if anything is NaN or infinite.

    Args:
        gradient: float32.
        aux: terms for the log, and statistics that replace the variables' statistics.
        bad: for names in `QUANTITIES`, True if not finite, such as `non_finite(aux)`; any of them skips the step.
        enabled: False takes no step, and counts none as skipped.
        data_is_finite: False skips the step.
    """

    def step(params: PyTree, stats: PyTree, state: PyTree) -> PyTree:
        # Optax mixes floats and integer counts, and floats of two widths, which strict promotion rejects.
        with jax.numpy_dtype_promotion("standard"):
            updates, state = optimizer.update(gradient, state, in_float32(params))
            return optax.apply_updates(params, updates), stats if aux.stats is None else aux.stats, state

    old = variables.params, variables.stats, optimizer_state
    if isinstance(optimizer, BoundedOptimizer):
        new, step_is_finite = step, optimizer.stays_finite(global_norm(gradient))
    else:
        result = step(*old)
        new, step_is_finite = lambda *_: result, all_finite((result[0], result[2]))
    found = {"statistics": ~all_finite(aux.stats), "step": ~step_is_finite}
    is_finite = data_is_finite & ~functools.reduce(jnp.logical_or, (*bad.values(), *found.values()))
    applied = enabled & is_finite
    # A choice between old and new parameters reads and writes them once more, which takes 8 % of PPO's update on a CPU.
    on_cpu = jax.default_backend() == "cpu"
    after = jax.lax.cond(applied, new, lambda *old: old, *old) if on_cpu else optax.tree.where(applied, new(*old), old)
    flags = flag_quantities(bad) | flag_quantities(found)
    log = StepLog(aux.terms, flags & enabled, applied, enabled & ~is_finite)
    return dataclasses.replace(variables, params=after[0], stats=after[1]), after[2], log


def accumulate(
    function: Callable[[PyTree], tuple[PyTree, PyTree]], batch: PyTree, num_microbatches: int = 1, axis_name: str | None = None
) -> tuple[PyTree, PyTree]:
    """Σ of the first result of `function(part)`, over equal parts of a batch and over devices; and the second results.

    With weights that sum to 1 over the batch, the sum is the weighted mean over the batch.

    Args:
        function: second results, of this device, are stacked: leaves `[num_microbatches, ...]`.
        batch: leaves `[N, ...]`, N a multiple of `num_microbatches`.
    """
    if num_microbatches == 1:
        total, each = function(batch)
        each = jax.tree.map(lambda x: x[None], each)
    else:
        parts = jax.tree.map(lambda x: x.reshape(num_microbatches, -1, *x.shape[1:]), batch)
        shapes, _ = jax.eval_shape(function, jax.tree.map(lambda x: x[0], parts))

        def add(sums: PyTree, part: PyTree) -> tuple[PyTree, PyTree]:
            terms, each = function(part)
            return jax.tree.map(jnp.add, sums, terms), each

        total, each = jax.lax.scan(add, jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes), parts)
    if axis_name is None:
        return total, each
    # As one vector where that is not large: leaf by leaf a reduction costs ten times as much.
    vector, unravel = ravel(total)
    return unravel(sum_over_devices(vector, axis_name)), each


def count_microbatches(
    size: int, microbatch_size: int | None, axis_name: str | None = None, *, samples_each: int = 1, has_images: bool = False
) -> int:
    """The number of equal microbatches of a minibatch of `size` samples (or sequences).

    Args:
        microbatch_size: samples (or sequences) per microbatch. None: the fewest microbatches that fit the cache, up to 4 times
            as many, whose number divides the size; one if there is no such number, or the backend is not a CPU.
        samples_each: 1, or the number of time steps of a sequence.
        has_images: observations pass through convolutions.
    """
    if microbatch_size is not None:
        return size // microbatch_size
    limit = samples_in_cache(has_images, axis_name)
    minimum = min(size, -(-size * samples_each // limit)) if jax.default_backend() == "cpu" else 1
    return next((parts for parts in range(minimum, 4 * minimum) if size % parts == 0), 1)


def samples_in_cache(has_images: bool, axis_name: str | None = None) -> int:
    """The number of samples whose activations fit the cache of one device; of images on a CPU, fewer."""
    if has_images and jax.default_backend() == "cpu":
        return IMAGES_IN_CACHE
    return SAMPLES_IN_CACHE if axis_name is None else SAMPLES_IN_CORE_CACHE


def check_optimizer_state(optimizer: optax.GradientTransformation, params: PyTree, state: PyTree) -> None:
    """Check that a state was created by this optimizer.

    Raises:
        ValueError: another optimizer created the state, or its averages are not found; see `evaluated_params`.
    """
    expected: Any = jax.tree.structure(jax.eval_shape(optimizer.init, in_float32(params)))
    if str(expected) != str(jax.tree.structure(state)):
        raise ValueError("update: this state was created with another optimizer; create it with agent.init(key)")
    evaluated_params(state, in_float32(params))


def evaluated_params(optimizer_state: PyTree, params: PyTree) -> PyTree:
    """The parameters to evaluate: the average of `optax.contrib.schedule_free`, if the state has one, else `params`.

    With `optax.partition`, the averages of the parts that `schedule_free` trains, and the other parts of `params`.

    Raises:
        ValueError: `optax.flatten` around `schedule_free` has a part of the parameters, and its state does not tell which.

    Source: Defazio et al. 2024, arXiv:2405.15682, eq. 5.
    """

    def is_leaf(node: Any) -> bool:
        return isinstance(node, optax.contrib.ScheduleFreeState | optax.MaskedNode)

    def average(state: Any, z: PyTree, part: PyTree) -> PyTree:
        if z is state.z and not isinstance(z, optax.MaskedNode):  # One vector, by optax.flatten.
            vector, unravel = ravel_pytree(part)
            if z.size != vector.size:
                raise ValueError("optimizer: optax.flatten around schedule_free must take all parameters, not one part of them")
            z = unravel(in_float32(z).ravel())
        return part if isinstance(z, optax.MaskedNode) else optax.contrib.schedule_free_eval_params(state._replace(z=z), part)

    for state in jax.tree.leaves(optimizer_state, is_leaf=is_leaf):
        if isinstance(state, optax.contrib.ScheduleFreeState):
            params = jax.tree.map(partial(average, state), state.z, params, is_leaf=is_leaf)
    return params


class BoundedOptimizer(optax.GradientTransformation):
    """Adam or RMSProp, on the parameters as one vector: its steps are finite where the gradient is not too large.

    So the result of a step is not looked through for NaN and infinity.

    Attributes:
        stays_finite: True for the norm of a gradient along which finite parameters and a finite state stay finite.
    """

    stays_finite: Callable[[Float[Array, ""]], Bool[Array, ""]]


def clip_and_descend(
    scale: optax.GradientTransformation, learning_rate: Schedule, env_steps: Count, max_grad_norm: Scalar | None
) -> BoundedOptimizer:
    """Clip the gradient to a norm, scale it by Adam's or RMSProp's rule, and descend."""
    clip = optax.stateless(lambda g, _: g if max_grad_norm is None else clip_to_norm(g, global_norm(g), max_grad_norm))
    # The schedule is evaluated by `update`, not when the optimizer is made: eagerly, that compiles eight programs in 0.3 s.
    descend = optax.stateless(lambda updates, _: optax.tree.scale(-value_at(learning_rate, env_steps), updates))
    optimizer = BoundedOptimizer(*on_vector(optax.chain(clip, scale, descend)))
    largest = jnp.inf if max_grad_norm is None else max_grad_norm
    # Where the squares are finite so are both moments; and steps with such a rate do not add up to infinity.
    optimizer.stays_finite = lambda norm: (
        jnp.isfinite(norm * jnp.minimum(norm, largest)) & (jnp.abs(value_at(learning_rate, env_steps)) < 1e15)
    )
    return optimizer


def adam(
    learning_rate: Schedule, env_steps: Count = 0, *, b1: float = 0.9, eps: Scalar, max_grad_norm: Scalar | None
) -> BoundedOptimizer:
    """Adam after clipping by the global norm, on the parameters as one vector.

        m ← β₁ m + (1-β₁) g,   v ← β₂ v + (1-β₂) g²,   p ← p - lr · m̂ / (√v̂ + ε)

    One vector needs one fused kernel, a tree one for each leaf: an update with 32 minibatches takes 14 % less time.

    Args:
        learning_rate: lr; the state does not hold it.
        env_steps: the argument of a schedule; it may be traced.
        b1: β₁, the decay of the mean of the gradients; β₂ is 0.999.
        eps: ε, added after the bias correction (1e-5 is PPO's custom, 1e-8 Optax's default).
        max_grad_norm: the gradient is scaled down to this Euclidean norm; None leaves it as it is.

    Source: Kingma and Ba 2015, arXiv:1412.6980, algorithm 1.
    """
    return clip_and_descend(optax.scale_by_adam(b1=b1, eps=eps), learning_rate, env_steps, max_grad_norm)


def clip_to_norm(gradient: PyTree, norm: Float[Array, ""], max_norm: Scalar) -> PyTree:
    """The gradient, scaled down to the norm `max_norm` where its `norm` is larger."""
    scale = jnp.where(norm > max_norm, max_norm / norm, 1.0)
    return jax.tree.map(lambda g: g * scale, gradient)


def global_norm(tree: PyTree) -> Float[Array, ""]:
    """√Σ xᵢ² over all leaves, without the overflow of squaring 1e30; NaN or infinity where an entry is.

    >>> float(global_norm([jnp.array([3.0, 4.0]), jnp.array([12.0])]))
    13.0
    """
    tree = in_float32(tree)
    norm = jnp.asarray(optax.tree.norm(tree), jnp.float32)
    return jax.lax.cond(jnp.isfinite(norm), lambda _: norm, _norm_of_large, tree)


def _norm_of_large(tree: PyTree) -> Float[Array, ""]:
    # As a constant, XLA would square it in a leaf of one entry, and the square underflows.
    scale = jax.lax.optimization_barrier(jnp.float32(2.0**-66))
    return jnp.asarray(optax.tree.norm(jax.tree.map(lambda x: x * scale, tree)), jnp.float32) / scale


def all_finite(tree: PyTree) -> Bool[Array, ""]:
    """True if no float in the tree is NaN or infinite, and no leaf so large that its sum overflows (above 10³⁴)."""
    # On a CPU, XLA vectorizes a sum but not a reduction of flags, which takes 8 % of an update with 32 minibatches.
    floats = [leaf for leaf in jax.tree.leaves(in_float32(tree)) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    return functools.reduce(jnp.logical_and, [jnp.isfinite(leaf.sum()) for leaf in floats], jnp.array(True))


def in_float32(tree: PyTree) -> PyTree:
    """Cast floats narrower than float32 to float32."""

    def widen(leaf: Any) -> Array:
        leaf = jnp.asarray(leaf)
        is_narrow = jnp.issubdtype(leaf.dtype, jnp.floating) and jnp.finfo(leaf.dtype).bits < 32
        return leaf.astype(jnp.float32) if is_narrow else leaf

    return jax.tree.map(widen, tree)


def ravel(tree: PyTree) -> tuple[PyTree, Callable[[PyTree], PyTree]]:
    """All leaves as one float32 vector, padded with zeros, and the function that converts such a vector to the tree.

    Trees above `LARGEST_VECTOR` entries are returned unchanged. Leaves narrower than float32 are rounded when the vector is
    converted to the tree, so a step that is small compared with a narrow number is lost then.
    """
    leaves, structure = jax.tree.flatten(tree)
    ends = np.cumsum([jnp.size(leaf) for leaf in leaves])
    if not leaves or ends[-1] > LARGEST_VECTOR:
        return tree, lambda tree: tree

    def unravel(vector: Float[Array, " P"]) -> PyTree:
        *rows, _ = jnp.split(vector[None], ends, axis=1)
        return jax.tree.map(lambda x, row: row.reshape(x.shape).astype(x.dtype), tree, jax.tree.unflatten(structure, rows))

    # Rows, as XLA fuses what joins vectors into a loop that on two threads takes 300 times as long as copying them. Zeros are
    # one more row: padding the vector would copy the gradient, 6 % of an update with 32 minibatches.
    rows = [in_float32(leaf).reshape(1, -1) for leaf in leaves]
    return jnp.concatenate([*rows, jnp.zeros((1, -ends[-1] % VECTOR_MULTIPLE), jnp.float32)], axis=1)[0], unravel


# Outside of compiled code one program, in place of one for each shape of a leaf; in compiled code it leaves no trace.
_ravel_at_once = jax.jit(lambda tree: ravel(tree)[0], inline=True)


def on_vector(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The optimizer, applied to parameters as one vector (see `ravel`); for optimizers that treat every entry alike.

    The state is the same whether parameters come as a tree or raveled, so that a loop can hold the vector.
    """

    def update(gradient: PyTree, state: PyTree, params: PyTree = None) -> tuple[PyTree, PyTree]:
        vector, unravel = ravel(gradient)
        updates, state = optimizer.update(vector, state, None if params is None else ravel(params)[0])
        return unravel(updates), state

    return optax.GradientTransformation(lambda params: optimizer.init(_ravel_at_once(params)), update)


def diagnose_skips(settings: Any, metrics: Mapping[str, Any], by: str = "") -> str | None:
    """The first non-finite quantity, once an agent's `max_skipped_updates` consecutive updates were skipped; else None.

    `metrics` has the metrics of the `Guard`; `by` is the argument of `describe_skips`.
    """
    counts = metrics["train/consecutive_skipped_updates"], metrics["train/nonfinite_source"]
    skips = describe_skips(*counts, settings.max_skipped_updates, "updates", by)
    return None if skips is None else f"{type(settings).__name__}: {skips}"


def describe_skips(count: Any, nonfinite_source: Any, limit: int, unit: str, by: str = "") -> str | None:
    """The first non-finite quantity, once `limit` consecutive updates or gradient steps were skipped; else None.

    Args:
        count: `Guard.consecutive_skipped_updates`.
        nonfinite_source: `Guard.nonfinite_source`.
        unit: `"updates"` or `"gradient steps"`.
        by: `" by a network"` for agents with several networks, each with its own gradient steps.
    """
    if int(count) < limit:
        return None
    return (
        f"{int(count)} consecutive {unit} were skipped{by} (max_skipped_{unit.split()[-1]}={limit}); the first quantity that "
        f"is NaN or infinite is {QUANTITIES[int(nonfinite_source) - 1]!r}. All parameters are finite."
    )
