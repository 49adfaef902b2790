"""The copies of one network: online, target and shared, how they follow each other, and how they are trained."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, PRNGKeyArray, UInt32

from polyak.copies.accumulated import Accumulated
from polyak.copies.follow import Follow, FollowState
from polyak.copies.loss_gradients import Loss, Trained, loss_gradients, predict_all
from polyak.core.checks import check_choice, check_integer, check_number
from polyak.core.names import unknown_name
from polyak.core.spaces import EnvSpec
from polyak.core.struct import static, struct
from polyak.core.types import Network, PyTree, Scalar, Variables
from polyak.ops.gradient_step import (
    Guard,
    apply_gradient,
    clip_to_norm,
    describe_skips,
    flag_quantities,
    global_norm,
)
from polyak.ops.trees import all_finite, check_same_tree, in_float32
from polyak.ops.updates import Tau, soft_update


@struct
class Shared:
    """The copy that several workers train.

    Attributes:
        variables: the weights and statistics.
        optimizer_state: of the one optimiser, or `()` where each worker keeps its own.
        version: gradient steps taken.
        dropped: pushes dropped because they were too stale.
    """

    variables: Variables
    optimizer_state: PyTree
    version: UInt32[Array, ""]
    dropped: UInt32[Array, ""]

    @classmethod
    def init(cls, variables: Variables, optimizer_state: PyTree) -> "Shared":
        """A real copy of these, with all counts 0."""
        return cls(copied(variables), optimizer_state, jnp.zeros((), jnp.uint32), jnp.zeros((), jnp.uint32))

    def with_stats(self, stats: PyTree) -> "Shared":
        """With a real copy of these statistics."""
        variables = dataclasses.replace(self.variables, stats=jax.tree.map(lambda x: jnp.array(x, copy=True), stats))
        return dataclasses.replace(self, variables=variables)


@struct
class NetworkCopies:
    """The copies of one network; every verb returns new ones and leaves these as they are.

    Attributes:
        network: whose copies they are.
        optimizer: an `optax.GradientTransformation`, or None where the owner of the copies trains them with one of its own and
            the verbs that apply gradients are not used. Its state is float32 whatever the network's dtype.
        online: the copy that learns and acts.
        target: the copy that trails it, or None. Where it follows softly it is stored in at least float32.
        shared: the copy that workers share, or None.
        optimizer_state: this worker's own, or `()` where the optimiser is shared.
        gradients: the accumulated ones; None without an optimizer.
        target_follow: how the target follows the online copy.
        target_count: what it has counted.
        online_follow: how the online copy follows the shared one by `follow`, or None where only the other verbs pull it.
        online_count: what it has counted.
        version: the shared copy's version when the online copy was last pulled from it.
        guard: counts of gradient steps skipped, because loss, gradient, statistics or result were not finite, or because there
            was no gradient.
        shared_optimizer: the optimiser's state stands with the shared copy.
        name: a label, for people.
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
        """Fresh copies, all equal, each in buffers of its own.

        Args:
            optimizer: an `optax.GradientTransformation`; None if the caller applies gradients itself.
            target: keep a target copy that follows the online one in this way.
            shared: keep a copy that workers share.
            online: have the online copy follow the shared one in this way too. It keeps the network's dtype, so a soft one of a
                network narrower than float32 wants `follow(key=...)`, which rounds stochastically.
            shared_optimizer: where there is a shared copy: one optimiser state with it, or each worker's own.
            name: a label for people, in errors and metrics; `metrics_of` wants different ones.

        Raises:
            ValueError: `online` follows a shared copy that is not there.
        """
        if online is not None and not shared:
            raise ValueError(f"{name}: online can only follow a shared copy; pass shared=True")
        one_optimizer = shared and shared_optimizer
        return _fresh(network, optimizer, network.init(key, spec), (target, online), shared, one_optimizer, name)

    def restart(self, variables: Variables) -> "NetworkCopies":
        """All copies equal to these weights, as at the beginning: fresh optimiser and counters.

        Raises:
            ValueError: the trees differ.
        """
        check_same_tree(variables, self.online, "restart", sides=("weights", "online"))
        fresh, follows = soft_update(variables, self.online, 1.0), (self.target_follow, self.online_follow)
        shared = self.shared is not None
        return _fresh(self.network, self.optimizer, fresh, follows, shared, self.shared_optimizer, self.name)

    @property
    def skipped(self) -> UInt32[Array, ""]:
        """Gradient steps skipped so far."""
        return self.guard.skipped

    @property
    def names(self) -> tuple[str, ...]:
        """The copies that there are."""
        return ("online", *(name for name in ("target", "shared") if getattr(self, name) is not None))

    def variables(self, name: str) -> Variables:
        """A copy as the network takes it: in the online copy's dtypes.

        Raises:
            ValueError: there is no such copy; those that there are.
        """
        if name not in self.names:
            raise ValueError(f"{self.name}: {unknown_name(name, self.names, 'copy').replace('copys', 'copies')}")
        if name == "online":
            return self.online
        if name == "target":
            assert self.target is not None, "it is among the names"
            return cast_like(self.target, self.online)
        return cast_like(self._shared.variables, self.online)

    def newest(self) -> Variables:
        """The weights that were trained last, in buffers of their own: the shared copy's, or else the online one's."""
        return copied(self.online if self.shared is None else self._shared.variables)

    def sync(self) -> "NetworkCopies":
        """Shared → online, then online → target, at once; what there is of it.

        Raises:
            ValueError: there is neither a shared copy nor a target.
        """
        if self.names == ("online",):
            raise ValueError(f"{self.name}: sync needs a shared copy or a target; the only copy is online")
        copies = self if self.shared is None else self.update_online()
        return copies if self.target is None else copies.update_target()

    def update_target(self, tau: Tau = 1.0, *, stats_tau: Tau = None, key: PRNGKeyArray | None = None) -> "NetworkCopies":
        """The target takes the share `tau` of the online copy now, whatever its `Follow` has counted; see `soft_update`.

        Raises:
            ValueError: there is no target, or a share is none.
        """
        self.variables("target")
        return dataclasses.replace(self, target=soft_update(self.online, self.target, tau, stats_tau=stats_tau, key=key))

    def update_online(self, tau: Tau = 1.0, *, stats_tau: Tau = None, key: PRNGKeyArray | None = None) -> "NetworkCopies":
        """The online copy takes the share `tau` of the shared one; see `soft_update`.

        Raises:
            ValueError: there is no shared copy, or a share is none.
        """
        self.variables("shared")
        online = soft_update(self._shared.variables, self.online, tau, stats_tau=stats_tau, key=key)
        return dataclasses.replace(self, online=online, version=self._shared.version)

    def follow(self, *, updates: Any = 0, env_steps: Any = 0, key: PRNGKeyArray | None = None) -> "NetworkCopies":
        """Shared → online, then online → target, each if its `Follow` finds it due after so many *more* updates and steps.

        Args:
            updates: gradient updates since the last call.
            env_steps: environment steps since the last call.
            key: as for `soft_update`.

        Raises:
            ValueError: nothing follows (no target, and no `online` was given), or a count is negative.
            TypeError: a count is no integer.
        """
        if self.target is None and self.online_follow is None:
            raise ValueError(f"{self.name}: there is no target, and online follows nothing; copies: {', '.join(self.names)}")
        counts = {"updates": updates, "env_steps": env_steps}
        copies = self
        if self.online_follow is not None and self.online_count is not None:
            count, shared = counts[self.online_follow.unit], self._shared
            own = None if key is None else jax.random.fold_in(key, 1)
            online, counted = self.online_follow.step(self.online_count, shared.variables, self.online, count, key=own)
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
        """With these gradients added to those accumulated; see `Accumulated.add`."""
        added = self._accumulated.add(gradients, reduce=reduce, clip=clip, clip_when=clip_when)
        return dataclasses.replace(self, gradients=added)

    def reset_gradients(self) -> "NetworkCopies":
        """With none accumulated: zeros, even where there was infinity."""
        return dataclasses.replace(self, gradients=self._accumulated.reset())

    def apply_gradients(
        self,
        to: Literal["online", "shared"] = "online",
        gradients: PyTree = None,
        *,
        bad: Mapping[str, Bool[Array, ""]] | None = None,
        apply: Any = True,
    ) -> "NetworkCopies":
        """One step of the optimiser along the gradients (those accumulated, if none are given), which stay accumulated.

        Nothing changes but the counts of `guard` where a gradient or the step's result is not finite, or none was accumulated.

        Args:
            to: whose weights. The optimiser's state is the shared copy's where it is shared, else this worker's own.
            gradients: in the tree of the weights.
            bad: which of `polyak.ops.gradient_step.QUANTITIES` the caller found not finite; any of them skips the step.
            apply: a bool, traced or not; False takes no step, and counts none as skipped.

        Raises:
            ValueError: no such copy, another tree, or the online copy has no optimiser of its own.
        """
        check_choice(self.name, "apply_gradients to", to, ("online", "shared"))
        copy = self.variables(to)
        if to == "online" and self.shared_optimizer:
            raise ValueError(f"{self.name}: the optimiser is shared; apply to 'shared', or create with shared_optimizer=False")
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
        copies, moved = dataclasses.replace(self, guard=guard), dataclasses.replace(copy, params=params)
        if to == "online":
            return dataclasses.replace(copies, online=moved, optimizer_state=state)
        version = self._shared.version + applied.astype(jnp.uint32)
        shared = dataclasses.replace(self._shared, variables=moved, version=version)
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
        """Apply to the shared copy, if there is one, and pull it; else to the online one. The target stays as it is.

        Args:
            gradients: as for `apply_gradients`.
            reset: with none accumulated any more.
            bad: as for `apply_gradients`.
            apply: likewise.
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
    ) -> tuple["NetworkCopies", Trained]:
        """One training step on the online copy's loss, applied as by `apply_and_sync`; accumulated gradients are left alone.

            loss = Σ_parts mean_B(w · part)

        Args:
            loss_fn: `(outputs, targets)` to `(parts, extras)`; see `Loss`.
            inputs: the network's observations, `[B, ...]`.
            importance_weights: w; all 1 if None.
            clip: the largest global norm of the gradient.
            key: for the network (dropout).

        Returns:
            The copies after the step, in which the statistics have advanced too, and what it found.

        Raises:
            ValueError: a part of the loss is not one number a row, or `clip` is not positive.
        """
        check_number("train_and_sync", "clip", clip, above=0, optional=True)

        found, gradients, stats = loss_gradients(self.network, self.online, loss_fn, inputs, targets, importance_weights, key)
        if clip is not None:
            gradients = clip_to_norm(gradients, found.gradient_norm, clip)
        finite = {"loss": found.loss, "gradient": found.gradient_norm, "statistics": stats}
        stepped = self.apply_and_sync(gradients, reset=False, bad={name: ~all_finite(x) for name, x in finite.items()})
        taken = stepped.skipped == self.skipped
        stats = jax.tree.map(lambda new, old: jnp.where(taken, new, old), stats, stepped.online.stats)
        return stepped._with_statistics(stats), dataclasses.replace(found, applied=taken)

    def predict(
        self, requests: Sequence[tuple[str, PyTree]], *, train: bool = False, key: PRNGKeyArray | None = None
    ) -> list[PyTree]:
        """The outputs for `(copy, inputs)` pairs, in their order, from one compiled call; a copy may be asked more than once.

        Args:
            train: in training phase (dropout, batch statistics), except a target; statistics do not advance.
            key: for the network (dropout), split over the requests.

        Raises:
            ValueError: there is no such copy; those that there are.
        """
        names = tuple(name for name, _ in requests)
        copies = {name: self.variables(name) for name in dict.fromkeys(names)}
        return predict_all(self.network, names, train, copies, [inputs for _, inputs in requests], key)

    def distance(self, a: str, b: str) -> Float[Array, ""]:
        """√Σ (aᵢ - bᵢ)² over the weights of two copies as they are stored; a metric.

        Raises:
            ValueError: there is no such copy; those that there are.
        """
        stored = {
            "online": self.online,
            "target": self.target,
            "shared": None if self.shared is None else self.shared.variables,
        }
        for name in (a, b):
            self.variables(name)
        sides = [in_float32(stored[name].params) for name in (a, b)]  # type: ignore[union-attr]
        return global_norm(jax.tree.map(jnp.subtract, *sides))

    def diagnose(self, max_bad_steps: int = 10) -> str | None:
        """The first non-finite quantity, once `max_bad_steps` consecutive gradient steps were skipped, or a tau outside [0, 1].

        Reads numbers back from the device: once per report, not per step.

        Raises:
            TypeError, ValueError: `max_bad_steps` is no positive integer.
        """
        check_integer(self.name, "max_bad_steps", max_bad_steps)
        problem = describe_skips(self.guard.in_a_row, self.guard.first_bad, max_bad_steps, "gradient steps")
        for follow, count in ((self.online_follow, self.online_count), (self.target_follow, self.target_count)):
            if problem is None and follow is not None and count is not None:
                problem = follow.diagnose(count)
        return None if problem is None else f"{self.name}: {problem}"

    def __str__(self) -> str:
        lines = [f"{self.name}: {described(self.online)}; copies: {', '.join(self.names)}"]
        if self.target is not None:
            lines.append(f"  target {described(self.target)}, follows online: {self.target_follow}")
            lines.append(f"  distance online-target {self.distance('online', 'target')}")
        if self.shared is not None:
            optimizer = "one optimiser with it" if self.shared_optimizer else "own optimiser"
            lines.append(f"  shared {described(self.shared.variables)}, version {self.shared.version}, {optimizer}")
            if self.online_follow is not None:
                lines.append(f"  online follows shared: {self.online_follow}")
        return "\n".join(lines)

    @property
    def _accumulated(self) -> Accumulated:
        if self.gradients is None:
            raise ValueError(f"{self.name}: these copies have no optimizer; create them with optimizer=...")
        return self.gradients

    @property
    def _shared(self) -> Shared:
        assert self.shared is not None, "asked for after variables('shared')"
        return self.shared

    def _with_statistics(self, stats: PyTree) -> "NetworkCopies":
        copies = dataclasses.replace(self, online=dataclasses.replace(self.online, stats=stats))
        return copies if copies.shared is None else dataclasses.replace(copies, shared=copies.shared.with_stats(stats))


def _fresh(
    network: Network, optimizer: Any, online: Variables, follows: tuple[Follow | None, ...], shared: bool, one: bool, name: str
) -> NetworkCopies:
    state = () if optimizer is None else optimizer.init(in_float32(online.params))
    # As arrays of one dtype from the start: as Python numbers they would compile once more when they come back as arrays.
    target, online_follow = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), follows)
    return NetworkCopies(
        network=network,
        optimizer=optimizer,
        online=online,
        target=None if follows[0] is None else target_storage(online, follows[0]),
        shared=Shared.init(online, state if one else ()) if shared else None,
        optimizer_state=() if one else state,
        gradients=None if optimizer is None else Accumulated.zeros(online.params),
        target_follow=target,
        target_count=None if target is None else target.init(),
        online_follow=online_follow,
        online_count=None if online_follow is None else online_follow.init(),
        version=jnp.zeros((), jnp.uint32),
        guard=Guard.init(),
        shared_optimizer=one,
        name=name,
    )


def copied(tree: Variables) -> Variables:
    """The same in new buffers."""
    real: Variables = jax.tree.map(lambda x: jnp.array(x, copy=True), tree)
    return real


def target_storage(online: Variables, follow: Follow) -> Variables:
    """The first value of a target: a real copy, in at least float32 where it moves by a fraction."""
    target = copied(online)
    params = in_float32(target.params) if follow.is_soft else target.params
    stats = in_float32(target.stats) if follow.is_soft_on_stats else target.stats
    return Variables(params, stats, target.graph)


def cast_like(variables: Variables, like: Variables) -> Variables:
    """The variables in the dtypes of `like`."""
    cast: Variables = jax.tree.map(lambda x, y: x if x.dtype == y.dtype else x.astype(y.dtype), variables, like)
    return cast


def guard_after_step(
    guard: Guard, apply: Bool[Array, ""], missing: Bool[Array, ""], bad: Bool[Array, " quantities"]
) -> tuple[Guard, Bool[Array, ""]]:
    """The counts after a step, and whether it was applied. A step that was not due ends no row of bad ones.

    Args:
        apply: the step was due and had a gradient.
        missing: it was due, and there was no gradient.
        bad: which of `QUANTITIES` were not finite.
    """
    any_bad = jnp.any(bad)
    applied = apply & ~any_bad
    after = guard.after_update((any_bad | missing).astype(jnp.uint32), 1, bad)
    return dataclasses.replace(after, in_a_row=jnp.where(applied | any_bad, after.in_a_row, guard.in_a_row)), applied


def described(variables: Variables) -> str:
    """How large they are: `72 parameters (float32), 4 statistics`."""
    params = jax.tree.leaves(variables.params)
    dtypes = "/".join(sorted({str(leaf.dtype) for leaf in params})) or "none"
    stats = sum(leaf.size for leaf in jax.tree.leaves(variables.stats))
    return f"{sum(leaf.size for leaf in params)} parameters ({dtypes}), {stats} statistics"
