"""The online, target and shared copies of one network: target updates, gradient steps and training."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, PRNGKeyArray, UInt32

from polyak.copies.accumulated import Accumulated
from polyak.copies.arguments import check_create, split_requests
from polyak.copies.follow import Follow, FollowState
from polyak.copies.loss_gradients import Loss, TrainStepResult, loss_gradients, predict_all
from polyak.core.checks import check_choice, check_integer, check_key, check_number
from polyak.core.spaces import EnvSpec
from polyak.core.struct import static, struct
from polyak.core.suggestions import unknown_name
from polyak.core.tree_check import check_same_tree
from polyak.core.types import Network, PyTree, Scalar, Variables, copy_buffers
from polyak.ops.gradient_step import (
    Guard,
    all_finite,
    apply_gradient,
    clip_to_norm,
    describe_skips,
    flag_quantities,
    global_norm,
    in_float32,
)
from polyak.ops.schedules import saturating_add
from polyak.ops.updates import Tau, soft_update, soft_update_if_valid


@struct
class Shared:
    """The copy that several workers train.

    Attributes:
        variables: the weights and statistics.
        optimizer_state: of the one optimizer, or `()` where each worker has its own.
        version: gradient steps applied.
        dropped: pushes dropped because they were too stale.
    """

    variables: Variables
    optimizer_state: PyTree
    version: UInt32[Array, ""]
    dropped: UInt32[Array, ""]

    @classmethod
    def init(cls, variables: Variables, optimizer_state: PyTree) -> "Shared":
        """Copy these into new buffers, with all counters 0."""
        return cls(copy_buffers(variables), optimizer_state, jnp.zeros((), jnp.uint32), jnp.zeros((), jnp.uint32))

    def with_stats(self, stats: PyTree) -> "Shared":
        """Replace the statistics by a copy of these."""
        variables = dataclasses.replace(self.variables, stats=jax.tree.map(lambda x: jnp.array(x, copy=True), stats))
        return dataclasses.replace(self, variables=variables)


@struct
class NetworkCopies:
    """The copies of one network; methods return a new object and leave this one unchanged.

    Attributes:
        network: the network.
        optimizer: an `optax.GradientTransformation`, or None if the caller applies gradients itself without
            the methods of this class. Its state is float32 whatever the network's dtype.
        online: the copy that learns and acts.
        target: the target copy, or None. With a soft update it is stored in at least float32.
        shared: the copy shared by several workers, or None.
        optimizer_state: this worker's own, or `()` where the optimizer is shared.
        gradients: the accumulated gradients; None without an optimizer.
        target_follow: how the target follows the online copy.
        target_count: the counters of `target_follow`.
        online_follow: how the online copy follows the shared one by `follow`, or None.
        online_count: the counters of `online_follow`.
        version: the shared copy's version when the online copy was last pulled from it.
        guard: counts of skipped gradient steps: NaN or infinity in the loss, gradient, statistics or result, or no gradient
            accumulated.
        shared_optimizer: True if the optimizer's state is stored with the shared copy.
        name: a label for errors and metrics.
    """

    network: Network = static()
    optimizer: Any = static()
    online: Variables
    target: Variables | None
    shared: Shared | None
    optimizer_state: PyTree
    gradients: Accumulated | None
    target_follow: Follow | None
    target_count: FollowState | None
    online_follow: Follow | None
    online_count: FollowState | None
    version: UInt32[Array, ""]
    guard: Guard
    shared_optimizer: bool = static(default=False)
    name: str = static(default="network")

    @classmethod
    def create(
        cls,
        network: Network,
        key: PRNGKeyArray,
        spec: EnvSpec,
        *,
        optimizer: Any,
        target: Follow | None = None,
        shared: bool = False,
        online: Follow | None = None,
        shared_optimizer: bool = True,
        name: str = "network",
    ) -> "NetworkCopies":
        """Create copies with equal weights, each in its own buffers.

        Args:
            optimizer: an `optax.GradientTransformation`; None if the caller applies gradients itself.
            target: create a target copy with this update rule.
            shared: create a copy shared by several workers.
            online: update the online copy towards the shared one by this rule. It has the network's dtype, so a soft update of
                a network narrower than float32 needs `follow(key=...)`, which rounds stochastically.
            shared_optimizer: where there is a shared copy: one optimizer state with it, or each worker's own.
            name: a label for errors and metrics; must be unique for `metrics_of`.

        Raises:
            TypeError: `key` is not a JAX key, or another argument is something else.
            ValueError: `online` is set without `shared=True`.
        """
        check_key("init", key)
        check_create(name, network, optimizer, target, online, shared)
        return _fresh(network, optimizer, network.init(key, spec), (target, online), shared, shared and shared_optimizer, name)

    def with_optimizer_state(self, optimizer: Any) -> "NetworkCopies":
        """The copies with a new state of an optimizer that the caller applies itself."""
        # A real copy: an optimizer may keep the first parameters, and the copies are donated.
        return dataclasses.replace(self, optimizer_state=optimizer.init(in_float32(copy_buffers(self.online).params)))

    def restart(self, variables: Variables) -> "NetworkCopies":
        """Set all copies to these weights and reset the optimizer and the counters.

        Raises:
            ValueError: the trees differ.
        """
        self._check_optimizer()
        check_same_tree(variables, self.online, "restart", sides=("weights", "online"))
        fresh, rules = soft_update(variables, self.online, 1.0), (self.target_follow, self.online_follow)
        copies = _fresh(self.network, self.optimizer, fresh, rules, self.shared is not None, self.shared_optimizer, self.name)
        if copies.target is None or self.target is None:
            return copies
        # A traced tau does not tell whether the target is soft; its dtypes do.
        return dataclasses.replace(copies, target=cast_like(copies.target, self.target))

    @property
    def skipped(self) -> UInt32[Array, ""]:
        """Gradient steps skipped so far."""
        return self.guard.skipped

    @property
    def target_total(self) -> UInt32[Array, ""]:
        """What `follow` has counted for the target so far: updates or environment steps; 0 without a target."""
        return jnp.zeros((), jnp.uint32) if self.target_count is None else self.target_count.total

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the existing copies."""
        return ("online", *(name for name in ("target", "shared") if getattr(self, name) is not None))

    def variables(self, name: str) -> Variables:
        """The variables of a copy, cast to the dtypes of the online copy.

        Raises:
            ValueError: there is no copy of this name; the message lists those that exist.
        """
        return self.online if name == "online" else cast_like(self._stored(name), self.online)

    def newest(self) -> Variables:
        """A copy of the most recently trained weights: the shared copy's if there is one, else the online copy's."""
        return copy_buffers(self.online if self.shared is None else self._shared.variables)

    def sync(self) -> "NetworkCopies":
        """Copy shared → online, then online → target, whichever exist, regardless of the `Follow` counters.

        Raises:
            ValueError: there is neither a shared copy nor a target.
        """
        if self.names == ("online",):
            raise ValueError(
                f"{self.name}: sync needs a shared copy or a target, the only copy is online; create with target= or shared="
            )
        copies = self if self.shared is None else self.update_online()
        return copies if self.target is None else copies.update_target()

    def update_target(self, tau: Tau = 1.0, *, stats_tau: Tau = None, key: PRNGKeyArray | None = None) -> "NetworkCopies":
        """Target ← target + τ · (online - target) now, regardless of the `Follow` counters; see `soft_update`.

        If a traced tau is outside [0, 1] or the online copy holds NaN or infinity, the target is unchanged, which
        `target_count.skipped` counts.

        Raises:
            ValueError: there is no target, or a tau is outside [0, 1].
        """
        self.variables("target")
        assert self.target_count is not None, "there is a target"
        target, valid = soft_update_if_valid(self.online, self.target, tau, stats_tau, key=key)
        count = dataclasses.replace(self.target_count, skipped=saturating_add(self.target_count.skipped, ~valid))
        return dataclasses.replace(self, target=target, target_count=count)

    def update_online(self, tau: Tau = 1.0, *, stats_tau: Tau = None, key: PRNGKeyArray | None = None) -> "NetworkCopies":
        """Online ← online + τ · (shared - online) now; see `soft_update`.

        Raises:
            ValueError: there is no shared copy, or a tau is outside [0, 1].
        """
        self.variables("shared")
        online = soft_update(self._shared.variables, self.online, tau, stats_tau=stats_tau, key=key)
        return dataclasses.replace(self, online=online, version=self._shared.version)

    def follow(self, *, updates: Any = 0, env_steps: Any = 0, key: PRNGKeyArray | None = None) -> "NetworkCopies":
        """Count updates and environment steps, and update shared → online, then online → target, where due.

        Args:
            updates: gradient updates since the last call.
            env_steps: environment steps since the last call.
            key: as for `soft_update`.

        Raises:
            ValueError: there is no target and no `online` rule, or a count is negative.
            TypeError: a count is not an integer.
        """
        if self.target is None and self.online_follow is None:
            raise ValueError(f"{self.name}: follow needs a target or an online rule, got the copies {', '.join(self.names)}")
        counts = {"updates": updates, "env_steps": env_steps}
        copies = self
        if self.online_follow is not None and self.online_count is not None:
            count, shared = counts[self.online_follow.unit], self._shared
            online_key = None if key is None else jax.random.fold_in(key, 1)
            online, counted = self.online_follow.step(self.online_count, shared.variables, self.online, count, key=online_key)
            version = jnp.where(counted.fired != self.online_count.fired, shared.version, self.version)
            copies = dataclasses.replace(self, online=online, online_count=counted, version=version)
        if copies.target_follow is not None and copies.target_count is not None:
            count = counts[copies.target_follow.unit]
            target, counted = copies.target_follow.step(copies.target_count, copies.online, copies.target, count, key=key)
            copies = dataclasses.replace(copies, target=target, target_count=counted)
        return copies

    def accumulate(
        self,
        gradients: PyTree,
        *,
        reduce: Literal["sum", "mean"] = "sum",
        clip: Scalar | None = None,
        clip_when: Literal["each", "total"] = "each",
    ) -> "NetworkCopies":
        """Add gradients to the accumulator; see `Accumulated.add`."""
        accumulated = self._accumulated.add(gradients, reduce=reduce, clip=clip, clip_when=clip_when)
        return dataclasses.replace(self, gradients=accumulated)

    def reset_gradients(self) -> "NetworkCopies":
        """Empty the gradient accumulator."""
        return dataclasses.replace(self, gradients=self._accumulated.reset())

    def apply_gradients(
        self,
        to: Literal["online", "shared"] = "online",
        gradients: PyTree = None,
        *,
        bad: Mapping[str, Bool[Array, ""]] | None = None,
        apply: Any = True,
    ) -> "NetworkCopies":
        """One optimizer step with these gradients, or with the accumulated ones, which stay accumulated.

        The step is skipped, and counted in `guard`, if a gradient or the result holds NaN or infinity, or if no gradient was
        accumulated.

        Args:
            to: the copy to update. The optimizer's state is the shared copy's if it is shared, else this worker's own.
            gradients: with the tree structure of the weights; None uses the accumulated ones.
            bad: for names in `polyak.ops.gradient_step.QUANTITIES`, True if not finite; any of them skips the step.
            apply: a bool, traced or not; False makes no step and counts none as skipped.

        Raises:
            ValueError: there is no such copy, the trees differ, or `to` is online while the optimizer is shared.
        """
        check_choice(self.name, "apply_gradients to", to, ("online", "shared"))
        copy = self.variables(to)
        self._check_optimizer()
        if to == "online" and self.shared_optimizer:
            raise ValueError(f"{self.name}: the optimizer is shared; apply to 'shared', or create with shared_optimizer=False")
        missing, flags = jnp.array(False), flag_quantities(bad or {})
        if gradients is None:
            accumulated = self._accumulated
            gradients, missing = accumulated.read(), accumulated.number == 0
            flags |= flag_quantities({"gradient": missing & accumulated.has_bad})
        check_same_tree(gradients, copy.params, "apply_gradients", sides=("gradients", "params"))
        state = self._shared.optimizer_state if self.shared_optimizer else self.optimizer_state
        due = jnp.asarray(apply)
        apply = due & ~missing & ~jnp.any(flags)
        gradients = in_float32(gradients)
        params, state, finite = apply_gradient(self.optimizer, copy.params, state, gradients, all_finite(gradients), apply)
        flags = (flags | flag_quantities({name: ~flag for name, flag in finite.items()})) & due
        guard, applied = guard_after_step(self.guard, apply, missing & due, flags)
        copies, variables = dataclasses.replace(self, guard=guard), dataclasses.replace(copy, params=params)
        if to == "online":
            return dataclasses.replace(copies, online=variables, optimizer_state=state)
        version = self._shared.version + applied.astype(jnp.uint32)
        shared = dataclasses.replace(self._shared, variables=variables, version=version)
        if not self.shared_optimizer:
            return dataclasses.replace(copies, shared=shared, optimizer_state=state)
        return dataclasses.replace(copies, shared=dataclasses.replace(shared, optimizer_state=state))

    def apply_and_sync(
        self,
        gradients: PyTree = None,
        *,
        reset: bool = True,
        bad: Mapping[str, Bool[Array, ""]] | None = None,
        apply: Any = True,
    ) -> "NetworkCopies":
        """Apply gradients to the shared copy and pull it, or to the online copy if none is shared; the target is unchanged.

        Args:
            gradients: as for `apply_gradients`.
            reset: empty the gradient accumulator afterwards.
            bad: as for `apply_gradients`.
            apply: as for `apply_gradients`.
        """
        if self.shared is None:
            copies = self.apply_gradients("online", gradients, bad=bad, apply=apply)
        else:
            copies = self.apply_gradients("shared", gradients, bad=bad, apply=apply).update_online()
        return copies.reset_gradients() if reset else copies

    def train_and_sync(
        self,
        loss_fn: Loss,
        inputs: PyTree,
        targets: PyTree,
        importance_weights: Float[Array, " B"] | None = None,
        *,
        clip: Scalar | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple["NetworkCopies", TrainStepResult]:
        """One training step on the loss of the online copy, applied as by `apply_and_sync`; the accumulator is unchanged.

            loss = Σ_parts mean_B(w · part)

        Args:
            loss_fn: `(outputs, targets)` to `(parts, extras)`; see `Loss`.
            inputs: the network's observations, `[B, ...]`.
            importance_weights: w; all 1 if None.
            clip: maximum global norm of the gradient; None disables clipping.
            key: for the network (dropout).

        Returns:
            The copies after the step, with updated statistics, and the loss and gradient norm.

        Raises:
            TypeError: `loss_fn` returns something else than parts and extras.
            ValueError: a part of the loss is not one value per sample, or `clip` is not positive.
        """
        check_number("train_and_sync", "clip", clip, above=0, optional=True)
        result, gradients, stats = loss_gradients(self.network, self.online, loss_fn, inputs, targets, importance_weights, key)
        if clip is not None:
            gradients = clip_to_norm(gradients, result.gradient_norm, clip)
        quantities = {"loss": result.loss, "gradient": result.gradient_norm, "statistics": stats}
        stepped = self.apply_and_sync(gradients, reset=False, bad={name: ~all_finite(x) for name, x in quantities.items()})
        applied = stepped.skipped == self.skipped
        stats = optax.tree.where(applied, stats, stepped.online.stats)
        return stepped._with_statistics(stats), dataclasses.replace(result, applied=applied)

    def predict(
        self, requests: Sequence[tuple[str, PyTree]], *, train: bool = False, key: PRNGKeyArray | None = None
    ) -> list[PyTree]:
        """The outputs for `(copy, inputs)` pairs, in order, from one compiled call; a copy may appear more than once.

        Args:
            train: training mode (dropout, batch statistics), except for a target; statistics are not updated.
            key: for the network (dropout), split over the requests.

        Raises:
            TypeError: `requests` are no pairs.
            ValueError: there is no copy of this name; the message lists those that exist.
        """
        names, inputs = split_requests(requests)
        copies = {name: self.variables(name) for name in dict.fromkeys(names)}
        return predict_all(self.network, names, train, copies, inputs, key)

    def distance(self, a: str, b: str) -> Float[Array, ""]:
        """Euclidean distance √Σ (aᵢ - bᵢ)² between the stored weights of two copies.

        Raises:
            ValueError: there is no copy of this name; the message lists those that exist.
        """
        return global_norm(jax.tree.map(jnp.subtract, *(in_float32(self._stored(name).params) for name in (a, b))))

    def diagnose(self, max_bad_steps: int = 10) -> str | None:
        """The first non-finite quantity, once `max_bad_steps` gradient steps in a row were skipped, or skipped target updates.

        Synchronizes with the device, so call it once per report, not per step.

        Raises:
            TypeError, ValueError: `max_bad_steps` is not a positive integer.
        """
        check_integer(self.name, "max_bad_steps", max_bad_steps)
        problem = describe_skips(self.guard.in_a_row, self.guard.first_bad, max_bad_steps, "gradient steps")
        for follow, count in ((self.online_follow, self.online_count), (self.target_follow, self.target_count)):
            if problem is None and follow is not None and count is not None:
                problem = follow.diagnose(count)
        return None if problem is None else f"{self.name}: {problem}"

    def __str__(self) -> str:
        lines = [f"{self.name}: {describe_variables(self.online)}; copies: {', '.join(self.names)}"]
        if self.target is not None:
            lines.append(f"  target {describe_variables(self.target)}, follows online: {self.target_follow}")
            lines.append(f"  distance online-target {self.distance('online', 'target')}")
        if self.shared is not None:
            optimizer = "one optimizer with it" if self.shared_optimizer else "own optimizer"
            lines.append(f"  shared {describe_variables(self.shared.variables)}, version {self.shared.version}, {optimizer}")
            if self.online_follow is not None:
                lines.append(f"  online follows shared: {self.online_follow}")
        return "\n".join(lines)

    def _stored(self, name: str) -> Variables:
        """The variables of a copy, in the dtypes that it has."""
        shared = None if self.shared is None else self.shared.variables
        stored = {"online": self.online, "target": self.target, "shared": shared}.get(name)
        if stored is None:
            raise ValueError(f"{self.name}: {unknown_name(name, self.names, 'copy').replace('copys', 'copies')}")
        return stored

    @property
    def _accumulated(self) -> Accumulated:
        self._check_optimizer()
        assert self.gradients is not None, "there is an optimizer"
        return self.gradients

    def _check_optimizer(self) -> None:
        if self.optimizer is None:
            raise ValueError(f"{self.name}: these copies have no optimizer; create them with optimizer=...")

    @property
    def _shared(self) -> Shared:
        assert self.shared is not None, "callers check the name with variables('shared')"
        return self.shared

    def _with_statistics(self, stats: PyTree) -> "NetworkCopies":
        copies = dataclasses.replace(self, online=dataclasses.replace(self.online, stats=stats))
        return copies if copies.shared is None else dataclasses.replace(copies, shared=copies.shared.with_stats(stats))


def follow_by(copies: PyTree, rule: Follow) -> PyTree:
    """A tree of `NetworkCopies` with another rule in place of each; the counts stay."""
    nodes, structure = jax.tree.flatten(copies, is_leaf=lambda node: isinstance(node, Follow))
    return jax.tree.unflatten(structure, [rule if isinstance(node, Follow) else node for node in nodes])


def _fresh(
    network: Network, optimizer: Any, online: Variables, rules: tuple[Follow | None, ...], shared: bool, one: bool, name: str
) -> NetworkCopies:
    """New copies; `rules` are those of target and online copy, and `one` puts the optimizer state into the shared copy."""
    state = () if optimizer is None else optimizer.init(in_float32(online.params))
    # Arrays of one dtype from the start: Python numbers would cause a second compilation when they come back as arrays.
    target_follow, online_follow = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), rules)
    return NetworkCopies(
        network=network,
        optimizer=optimizer,
        online=online,
        target=None if rules[0] is None else target_storage(online, rules[0]),
        shared=Shared.init(online, state if one else ()) if shared else None,
        optimizer_state=() if one else state,
        gradients=None if optimizer is None else Accumulated.zeros(online.params),
        target_follow=target_follow,
        target_count=None if target_follow is None else target_follow.init(),
        online_follow=online_follow,
        online_count=None if online_follow is None else online_follow.init(),
        version=jnp.zeros((), jnp.uint32),
        guard=Guard.init(),
        shared_optimizer=one,
        name=name,
    )


def target_storage(online: Variables, follow: Follow) -> Variables:
    """The initial target: a copy in new buffers, in at least float32 for a soft update."""
    target = copy_buffers(online)
    params = in_float32(target.params) if follow.is_soft else target.params
    stats = in_float32(target.stats) if follow.is_soft_on_stats else target.stats
    return Variables(params, stats, target.graph)


def cast_like(variables: Variables, like: Variables) -> Variables:
    """Cast the variables to the dtypes of `like`."""
    cast: Variables = jax.tree.map(lambda x, y: x if x.dtype == y.dtype else x.astype(y.dtype), variables, like)
    return cast


def guard_after_step(
    guard: Guard, apply: Bool[Array, ""], missing: Bool[Array, ""], bad: Bool[Array, " quantities"]
) -> tuple[Guard, Bool[Array, ""]]:
    """The counters after a step, and whether it was applied. A step that was not due does not reset `in_a_row`.

    Args:
        apply: the step was due and had a gradient.
        missing: the step was due but had no gradient.
        bad: which of `QUANTITIES` held NaN or infinity.
    """
    any_bad = jnp.any(bad)
    applied = apply & ~any_bad
    return guard.after_update((any_bad | missing).astype(jnp.uint32), applied.astype(jnp.uint32), bad), applied


def describe_variables(variables: Variables) -> str:
    """A summary such as `72 parameters (float32), 4 statistics`."""
    params = jax.tree.leaves(variables.params)
    dtypes = "/".join(sorted({str(leaf.dtype) for leaf in params})) or "none"
    stats = sum(leaf.size for leaf in jax.tree.leaves(variables.stats))
    return f"{sum(leaf.size for leaf in params)} parameters ({dtypes}), {stats} statistics"
