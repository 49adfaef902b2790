"""The online, target and shared copies of one network: target updates, gradient steps and training."""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool, Float, Int32, PRNGKeyArray, UInt32

from polyak.copies.accumulated import Accumulated
from polyak.copies.follow import Follow, FollowState
from polyak.copies.outputs import OutputLoss, loss_of_outputs, predict_all
from polyak.copies.shared import Shared
from polyak.core.checks import check_choice, check_integer, check_key, check_number
from polyak.core.printing import text_of
from polyak.core.spaces import EnvSpec
from polyak.core.struct import static, struct
from polyak.core.suggestions import unknown_name
from polyak.core.tree_check import check_same_tree
from polyak.core.types import Network, PyTree, Scalar, Terms, Variables, copy_buffers
from polyak.ops.gradient_step import (
    Aux,
    Guard,
    LossFn,
    StepLog,
    all_finite,
    apply_gradient,
    clip_to_norm,
    compute_gradient,
    describe_skips,
    evaluated_params,
    global_norm,
    in_float32,
    non_finite,
)
from polyak.ops.schedules import saturating_add
from polyak.ops.updates import Tau, is_valid_tau, soft_update, soft_update_if_valid

NO_OPTIMIZER = "these copies have no optimizer; create them with optimizer=..."

Rules: TypeAlias = tuple[Follow | None, Follow | None]
"""The rules of the target and of the online copy."""


@struct
class NetworkCopies:
    """The copies of one network; methods return a new object and leave this one unchanged.

    Attributes:
        network: the network.
        optimizer: an `optax.GradientTransformation`, or None if the caller passes one to `train` and `step`, as agents do. Its
            state is float32 whatever the network's dtype.
        online: the copy that learns and acts.
        target: the target copy, or None. With a soft update it is stored in at least float32.
        shared: the copy shared by several workers, or None.
        optimizer_state: the state of this worker's optimizer, or `()` if the optimizer is shared.
        gradients: the accumulated gradients; None without an optimizer.
        target_follow: update rule of the target.
        target_count: the counters of `target_follow`.
        online_follow: rule by which `follow` updates the online copy from the shared copy, or None.
        online_count: the counters of `online_follow`.
        version: the shared copy's version when the online copy was last pulled from it.
        steps: gradient steps applied.
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
    steps: UInt32[Array, ""]
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
            optimizer: an `optax.GradientTransformation`; None if the caller passes one to `train` and `step`.
            target: create a target copy with this update rule.
            shared: create a copy shared by several workers.
            online: update the online copy towards the shared one by this rule. It has the network's dtype, so a soft update of
                a network narrower than float32 needs `follow(key=...)`, which rounds stochastically.
            shared_optimizer: with a shared copy: True stores one optimizer state with it, False one with each worker.
            name: a label for errors and metrics; must be unique for `metrics_of`.

        Raises:
            TypeError: `key` is no key, or a rule is no `Follow`.
            ValueError: `shared` is something else than True or False, or `online` is set without `shared=True`.
        """
        check_key(name, key)
        check_choice(name, "shared", shared, (True, False))
        if wrong := [rule for rule in (target, online) if rule is not None and not isinstance(rule, Follow)]:
            raise TypeError(f"{name}: a copy follows by a rule, such as Follow(tau=0.005), got {wrong[0]!r:.80}")
        if online is not None and not shared:
            raise ValueError(f"{name}: online can only follow a shared copy; pass shared=True")
        return _fresh(network, optimizer, network.init(key, spec), (target, online), shared, shared and shared_optimizer, name)

    def with_optimizer_state(self, optimizer: Any) -> "NetworkCopies":
        """The copies with a new state of an optimizer that the caller passes to `train` and `step`."""
        # A real copy: an optimizer may keep the first parameters, and the copies are donated.
        return dataclasses.replace(self, optimizer_state=optimizer.init(in_float32(copy_buffers(self.online).params)))

    def restart(self, variables: Variables) -> "NetworkCopies":
        """Set all copies to these weights and reset the optimizer and the counters.

        Raises:
            ValueError: the trees differ.
        """
        check_same_tree(variables, self.online, "restart", sides=("weights", "online"))
        fresh, rules = soft_update(variables, self.online, 1.0), (self.target_follow, self.online_follow)
        copies = _fresh(self.network, self._optimizer, fresh, rules, self.shared is not None, self.shared_optimizer, self.name)
        # A traced tau does not tell whether the target is soft; its dtypes do.
        target = None if self.target is None else cast_like(copies._stored("target"), self.target)
        return dataclasses.replace(copies, target=target)

    @property
    def skipped(self) -> UInt32[Array, ""]:
        """Gradient steps skipped so far."""
        return self.guard.skipped

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the existing copies."""
        return ("online", *(name for name in ("target", "shared") if getattr(self, name) is not None))

    def variables(self, name: str) -> Variables:
        """The variables of a copy, cast to the dtypes of the online copy.

        Raises:
            ValueError: no copy has this name; the message lists the existing names.
        """
        return self.online if name == "online" else cast_like(self._stored(name), self.online)

    def evaluated(self, name: str = "online") -> Variables:
        """The variables of a copy for evaluation: with the optimizer `schedule_free`, the average of the weights."""
        variables, shared = self.variables(name), self.shared
        state = {"online": self.optimizer_state, "shared": shared and shared.optimizer_state}.get(name)
        params = evaluated_params(state, in_float32(variables.params))
        return cast_like(dataclasses.replace(variables, params=params), variables)

    def newest(self) -> Variables:
        """A copy of the most recently trained weights: the shared copy's if there is one, else the online copy's."""
        return copy_buffers(self.online if self.shared is None else self._shared.variables)

    def train(
        self,
        loss_fn: LossFn,
        optimizer: optax.GradientTransformation,
        batch: PyTree,
        *,
        enabled: Bool[Array, ""] | bool = True,
        data_is_finite: Bool[Array, ""] | bool = True,
        early_stop: Callable[[Terms], Bool[Array, ""]] | None = None,
        num_microbatches: int = 1,
        axis_name: str | None = None,
    ) -> tuple["NetworkCopies", StepLog]:
        """Take one gradient step of the online copy on the loss of a batch; the other copies are unchanged.

            θ ← θ + optimizer(∇_θ loss_fn(θ, batch)),    statistics ← aux.stats

        The step is skipped, changes no bit, and is counted in `guard`, if the loss, its gradient, the statistics or the result
        holds NaN or infinity.

        Args:
            loss_fn: `(params, batch)` to `(loss, aux)`; see `Aux`.
            optimizer: its state is `optimizer_state`; see `with_optimizer_state`.
            batch: leaves `[N, ...]`.
            enabled: False takes no step, and counts none as skipped.
            data_is_finite: False skips the step.
            early_stop: function of the terms of the loss; True disables the step.
            num_microbatches: equal parts of the batch whose gradients are computed one after the other, and summed.
            axis_name: inside `shard_map`, the mesh axis that the batch is split over; gradients are summed.

        Raises:
            TypeError: the loss returns something other than `(loss, aux)`.
            ValueError: the optimizer's state is the shared copy's.
        """
        gradient, aux = compute_gradient(
            loss_fn, self.online.params, batch, num_microbatches=num_microbatches, axis_name=axis_name
        )
        if aux.stats is not None:
            check_same_tree(aux.stats, self.online.stats, f"{self.name}.train", sides=("statistics", "online"))
        enabled = jnp.asarray(enabled) if early_stop is None else enabled & ~early_stop(aux.terms)
        return self.step(optimizer, gradient, aux, non_finite(aux), enabled, data_is_finite)

    def step(
        self,
        optimizer: optax.GradientTransformation,
        gradients: PyTree,
        aux: Aux,
        bad: Mapping[str, Bool[Array, ""]],
        enabled: Bool[Array, ""] | bool = True,
        data_is_finite: Bool[Array, ""] | bool = True,
        *,
        to: Literal["online", "shared"] = "online",
    ) -> tuple["NetworkCopies", StepLog]:
        """The second half of `train`: one step of a copy along these gradients, and its log.

        Args:
            optimizer: see `train`; with `shared_optimizer`, its state is the shared copy's.
            gradients: with the tree structure of the weights, float32.
            aux: its terms go into the log; its statistics replace the copy's.
            bad: for names in `polyak.ops.gradient_step.QUANTITIES`, True if not finite; any of them skips the step.
            enabled: see `train`.
            data_is_finite: see `train`.
            to: the copy to update.

        Raises:
            ValueError: there is no such copy, or `to` is online and the optimizer's state is the shared copy's.
        """
        check_choice(f"{self.name}: step", "to", to, ("online", "shared"))
        if to == "online" and self.shared_optimizer:
            raise ValueError(f"{self.name}: the optimizer is shared; apply to 'shared', or create with shared_optimizer=False")
        state = self._shared.optimizer_state if self.shared_optimizer else self.optimizer_state
        copy, state, log = apply_gradient(optimizer, self._stored(to), state, gradients, aux, bad, enabled, data_is_finite)
        if to == "online":
            copies = dataclasses.replace(self, online=copy, optimizer_state=state)
        else:
            states = (state, self.optimizer_state) if self.shared_optimizer else (self._shared.optimizer_state, state)
            copies = dataclasses.replace(self, shared=self._shared.after_step(copy, states[0], log), optimizer_state=states[1])
        guard = self.guard.after_update(log.skipped.astype(jnp.uint32), log.applied.astype(jnp.uint32), log.bad)
        return dataclasses.replace(copies, steps=saturating_add(self.steps, log.applied), guard=guard), log

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
        self._stored("target")
        assert self.target_count is not None, "there is a target"
        target, valid = soft_update_if_valid(self.online, self.target, tau, stats_tau, key=key)
        count = dataclasses.replace(self.target_count, skipped=saturating_add(self.target_count.skipped, ~valid))
        return dataclasses.replace(self, target=target, target_count=count)

    def update_online(self, tau: Tau = 1.0, *, stats_tau: Tau = None, key: PRNGKeyArray | None = None) -> "NetworkCopies":
        """Online ← online + τ · (shared - online) now; see `soft_update`.

        If a traced tau is outside [0, 1], the parameters and the `version` are unchanged.

        Raises:
            ValueError: there is no shared copy, the trees differ, or a tau is outside [0, 1].
        """
        online = soft_update(self._stored("shared"), self.online, tau, stats_tau=stats_tau, key=key)
        version = self._shared.version
        if isinstance(tau, jax.Array):
            version = jnp.where(is_valid_tau(tau), version, self.version)
        return dataclasses.replace(self, online=online, version=version)

    def follow(self, *, updates: Any = None, env_steps: Any = None, key: PRNGKeyArray | None = None) -> "NetworkCopies":
        """Count updates and environment steps, and update shared → online, then online → target, if their periods have elapsed.

        A rule whose unit is not counted stays as it is.

        Args:
            updates: gradient updates since the last call; None counts none.
            env_steps: environment steps since the last call; None counts none.
            key: see `soft_update`.

        Raises:
            ValueError: there is no target and no `online` rule, no count is in the unit of a rule, or a count is negative.
            TypeError: a count is not an integer.
        """
        copies, units = self, {rule.unit: None for rule in (self.online_follow, self.target_follow) if rule is not None}
        counts = {unit: n for unit, n in (("updates", updates), ("env_steps", env_steps)) if n is not None}
        if not counts.keys() & units.keys():
            needs = f"a count of {' or '.join(units)}" if units else "a target or an online rule"
            raise ValueError(f"{self.name}: follow needs {needs}, got the copies {', '.join(self.names)} and {list(counts)}")
        if self.online_follow is not None and self.online_count is not None:
            count, shared = counts.get(self.online_follow.unit, 0), self._shared
            online_key = None if key is None else jax.random.fold_in(key, 1)
            online, counted = self.online_follow.step(self.online_count, shared.variables, self.online, count, key=online_key)
            version = jnp.where(counted.fired != self.online_count.fired, shared.version, self.version)
            copies = dataclasses.replace(self, online=online, online_count=counted, version=version)
        if copies.target_follow is not None and copies.target_count is not None:
            count = counts.get(copies.target_follow.unit, 0)
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
        stats: PyTree = None,
        enabled: Bool[Array, ""] | bool = True,
    ) -> "NetworkCopies":
        """Take one gradient step with these gradients, or with the accumulated ones, which stay accumulated.

        The step is skipped, and counted in `guard`, if a gradient or the result holds NaN or infinity, or if no gradient was
        accumulated.

        Args:
            to: the copy to update. The optimizer's state is the shared copy's if it is shared, else this worker's own.
            gradients: with the tree structure of the weights; None uses the accumulated ones.
            stats: the statistics after the step; None leaves the copy's.
            enabled: False takes no step, and counts none as skipped.

        Raises:
            ValueError: there is no such copy, the trees differ, or `to` is online while the optimizer is shared.
        """
        check_choice(self.name, "apply_gradients to", to, ("online", "shared"))
        copy, has_gradient, lost = self.variables(to), jnp.array(True), jnp.array(False)
        if gradients is None:
            accumulated = self._accumulated
            gradients, has_gradient = accumulated.read(), accumulated.number > 0
            lost = ~has_gradient & accumulated.has_bad
        check_same_tree(gradients, copy.params, "apply_gradients", sides=("gradients", "params"))
        if stats is not None:
            check_same_tree(stats, copy.stats, "apply_gradients", sides=("statistics", to))
        gradients = in_float32(gradients)
        bad = {"gradient": lost | ~all_finite(gradients)}
        return self.step(self._optimizer, gradients, Aux({}, stats), bad, enabled, has_gradient, to=to)[0]

    def apply_and_sync(self, gradients: PyTree = None, *, reset: bool = True) -> "NetworkCopies":
        """Apply gradients to the shared copy and pull it, or to the online copy if none is shared; the target is unchanged.

        Args:
            gradients: see `apply_gradients`.
            reset: empty the gradient accumulator afterwards.
        """
        if self.shared is None:
            copies = self.apply_gradients("online", gradients)
        else:
            copies = self.apply_gradients("shared", gradients).update_online()
        return copies.reset_gradients() if reset else copies

    def staleness(self, shared: Shared) -> Int32[Array, ""]:
        """Gradient steps applied to the shared copy since this worker pulled it."""
        return (shared.version - self.version).astype(jnp.int32)

    def pull(self, shared: Shared) -> "NetworkCopies":
        """Copy the weights that this worker shares with others into its online copy.

        Raises:
            ValueError: the trees differ.
        """
        return dataclasses.replace(self, shared=shared).update_online()

    def push(
        self, shared: Shared, gradients: PyTree = None, *, stats: PyTree = None, max_staleness: int | None = None
    ) -> tuple["NetworkCopies", Shared]:
        """Apply this worker's gradients to the copy that it shares with others; its online copy is unchanged until it pulls.

        For workers in one program; `polyak.copies.receive` is for workers that send messages, which can be lost or repeated.

        Args:
            gradients: see `apply_gradients`.
            stats: see `apply_gradients`.
            max_staleness: gradients of weights more than this many steps old are dropped and counted; None accepts gradients of
                any earlier version.

        Raises:
            ValueError: the trees differ, or `max_staleness` is negative.
            TypeError: `max_staleness` is not an integer.
        """
        check_integer("push", "max_staleness", max_staleness, at_least=0, optional=True)
        is_fresh = shared.is_fresh(self.version, max_staleness)
        pushed = dataclasses.replace(self, shared=shared).apply_gradients("shared", gradients, stats=stats, enabled=is_fresh)
        dropped = shared.dropped + (~is_fresh).astype(jnp.uint32)
        shared = dataclasses.replace(pushed._shared, dropped=dropped)
        return dataclasses.replace(pushed, shared=shared), shared

    def compute_gradients(
        self,
        loss_fn: OutputLoss,
        inputs: PyTree,
        targets: PyTree,
        importance_weights: Float[Array, " B"] | None = None,
        *,
        key: PRNGKeyArray | None = None,
    ) -> tuple[PyTree, Aux]:
        """The gradients of a loss of the online copy's outputs in training mode; its terms, and the statistics after it.

        Nothing is applied. `train_and_sync` describes the arguments and the errors.
        """
        loss = loss_of_outputs(loss_fn, self.network, self.online, key)
        return compute_gradient(loss, self.online.params, (inputs, targets, importance_weights))

    def train_and_sync(
        self,
        loss_fn: OutputLoss,
        inputs: PyTree,
        targets: PyTree,
        importance_weights: Float[Array, " B"] | None = None,
        *,
        clip: Scalar | None = None,
        key: PRNGKeyArray | None = None,
    ) -> tuple["NetworkCopies", StepLog]:
        """One training step on the loss of the online copy, applied as by `apply_and_sync`; the accumulator is unchanged.

            loss = Σ_parts mean_B(w · part)

        Args:
            loss_fn: `(outputs, targets)` to `(parts, others)`; see `OutputLoss`.
            inputs: the network's observations, `[B, ...]`.
            importance_weights: w; all 1 if None.
            clip: maximum global norm of the gradient; None disables clipping.
            key: for the network (dropout).

        Returns:
            The copies after the step, with updated statistics, and its log, whose terms are `loss`, the mean of each part, the
            loss function's other arrays, and `grad_norm`, the norm of the gradient before clipping.

        Raises:
            TypeError: the loss returns something other than two dicts, or a first dict without entries.
            ValueError: a part of the loss is not one value per sample, `clip` is not positive, or the network cannot take the
                inputs.
        """
        check_number("train_and_sync", "clip", clip, above=0, optional=True)
        gradients, aux = self.compute_gradients(loss_fn, inputs, targets, importance_weights, key=key)
        bad = non_finite(aux)
        if clip is not None:
            gradients = clip_to_norm(gradients, aux.terms["grad_norm"], clip)
        if self.shared is None:
            return self.step(self._optimizer, gradients, aux, bad)
        copies, log = self.step(self._optimizer, gradients, aux, bad, to="shared")
        return copies.update_online(), log

    def predict(
        self, requests: Iterable[tuple[str, PyTree]], *, train: bool = False, key: PRNGKeyArray | None = None
    ) -> list[PyTree]:
        """The outputs for `(copy, inputs)` pairs, in order, from one compiled call; a copy may appear more than once.

        Args:
            train: training mode (dropout, batch statistics), except for a target; statistics are not updated.
            key: for the network (dropout), split over the requests.

        Raises:
            TypeError: a request is no pair.
            ValueError: no copy has this name; the message lists the existing names. The network cannot take the inputs.
        """
        pairs = list(requests) if isinstance(requests, Iterable) else [requests]
        if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
            raise TypeError(f"{self.name}: predict: requests must be (copy, inputs) pairs, got {text_of(requests)}")
        names, inputs = tuple(name for name, _ in pairs), [inputs for _, inputs in pairs]
        copies = {name: self.variables(name) for name in dict.fromkeys(names)}
        return predict_all(self.network, names, train, copies, inputs, key)

    def distance(self, a: str, b: str) -> Float[Array, ""]:
        """Euclidean distance √Σ (aᵢ - bᵢ)² between the stored weights of two copies.

        Raises:
            ValueError: no copy has this name; the message lists the existing names.
        """
        return global_norm(jax.tree.map(jnp.subtract, *(in_float32(self._stored(name).params) for name in (a, b))))

    def diagnose(self, max_skipped_steps: int = 10) -> str | None:
        """The first non-finite quantity after `max_skipped_steps` consecutive skipped steps, or skipped updates of the target.

        Synchronizes with the device, so call it once per report, not per step.

        Raises:
            TypeError, ValueError: `max_skipped_steps` is not a positive integer.
        """
        check_integer(self.name, "max_skipped_steps", max_skipped_steps)
        skips = self.guard.consecutive_skipped_updates, self.guard.nonfinite_source
        problem = describe_skips(*skips, max_skipped_steps, "gradient steps")
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
            raise ValueError(f"{self.name}: {unknown_name(name, self.names, 'copy')}")
        return stored

    @property
    def _accumulated(self) -> Accumulated:
        if self.gradients is None:
            raise ValueError(f"{self.name}: {NO_OPTIMIZER}")
        return self.gradients

    @property
    def _optimizer(self) -> optax.GradientTransformation:
        if self.optimizer is None:
            raise ValueError(f"{self.name}: {NO_OPTIMIZER}")
        optimizer: optax.GradientTransformation = self.optimizer
        return optimizer

    @property
    def _shared(self) -> Shared:
        assert self.shared is not None, "callers check the name with variables('shared')"
        return self.shared


def follow_by(copies: PyTree, rule: Follow | None) -> PyTree:
    """A tree of `NetworkCopies` with new `Follow` rules and unchanged counters; None leaves the rules."""
    nodes, structure = jax.tree.flatten(copies, is_leaf=lambda node: isinstance(node, Follow))
    return jax.tree.unflatten(structure, [node if rule is None or not isinstance(node, Follow) else rule for node in nodes])


def _fresh(
    network: Network, optimizer: Any, online: Variables, rules: Rules, shared: bool, shared_optimizer: bool, name: str
) -> NetworkCopies:
    """New copies, the online copy with these variables."""
    state = () if optimizer is None else optimizer.init(in_float32(online.params))
    # Arrays of one dtype from the start: Python numbers would cause a second compilation when they come back as arrays.
    target_follow, online_follow = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), rules)
    return NetworkCopies(
        network=network,
        optimizer=optimizer,
        online=online,
        target=None if rules[0] is None else target_storage(online, rules[0]),
        shared=Shared.init(online, state if shared_optimizer else ()) if shared else None,
        optimizer_state=() if shared_optimizer else state,
        gradients=None if optimizer is None else Accumulated.zeros(online.params),
        target_follow=target_follow,
        target_count=None if target_follow is None else target_follow.init(),
        online_follow=online_follow,
        online_count=None if online_follow is None else online_follow.init(),
        version=jnp.zeros((), jnp.uint32),
        steps=jnp.zeros((), jnp.uint32),
        guard=Guard.init(),
        shared_optimizer=shared_optimizer,
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
    return jax.tree.map(lambda x, y: x if x.dtype == y.dtype else x.astype(y.dtype), variables, like)


def describe_variables(variables: Variables) -> str:
    """A summary such as `72 parameters (float32), 4 statistics`."""
    params = jax.tree.leaves(variables.params)
    dtypes = "/".join(sorted({str(leaf.dtype) for leaf in params})) or "none"
    stats = sum(leaf.size for leaf in jax.tree.leaves(variables.stats))
    return f"{sum(leaf.size for leaf in params)} parameters ({dtypes}), {stats} statistics"
