"""The copies of one network: online, target and shared, how they follow each other, and how they are trained."""

import dataclasses
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, PRNGKeyArray, UInt32

from polyak.core.checks import check_choice, check_number
from polyak.core.spaces import EnvSpec
from polyak.core.struct import static, struct, unknown_name
from polyak.core.types import Network, PyTree, Scalar, Variables
from polyak.ops.follow import Follow, FollowState
from polyak.ops.trees import check_same_tree
from polyak.ops.updates import Tau, soft_update
from polyak.parts.gradients import Accumulated, clipped, in_float32, step_along, tree_norm
from polyak.parts.training import Loss, Trained, loss_gradients, predict_all


@struct
class Shared:
    """The copy that several workers train.

    Attributes:
        variables: the weights and statistics.
        optimizer_state: of the one optimiser, or `()` where each worker keeps its own.
        version: gradient steps taken.
        dropped: pushes refused because they were too stale.
    """

    variables: Variables
    optimizer_state: PyTree
    version: UInt32[Array, ""]
    dropped: UInt32[Array, ""]


@struct
class NetworkCopies:
    """The copies of one network; every verb returns new ones and leaves these as they are.

    Attributes:
        network: whose copies they are.
        optimizer: an `optax.GradientTransformation`; its state is float32 whatever the network's dtype.
        online: the copy that learns and acts.
        target: the copy that trails it, or None. Where it follows softly it is held in at least float32.
        shared: the copy that workers share, or None.
        optimizer_state: this worker's own, or `()` where the optimiser is shared.
        gradients: those accumulated.
        target_follow: how the target follows the online copy.
        target_count: what it has counted.
        version: the shared copy's version when the online copy was last pulled from it.
        skipped: gradient steps refused, because something was not finite or there was no gradient.
        shared_optimizer: the optimiser's state stands with the shared copy.
        name: a label, for people.
    """

    network: Network = static()
    optimizer: Any = static()
    online: Variables
    target: Variables | None
    shared: Shared | None
    optimizer_state: PyTree
    gradients: Accumulated
    target_follow: Follow | None
    target_count: FollowState | None
    version: UInt32[Array, ""]
    skipped: UInt32[Array, ""]
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
        shared_optimizer: bool = True,
        name: str = "network",
    ) -> "NetworkCopies":
        """Fresh copies, all equal, each in buffers of its own.

        Args:
            optimizer: an `optax.GradientTransformation`.
            target: keep a target copy that follows the online one in this way.
            shared: keep a copy that workers share.
            shared_optimizer: where there is a shared copy: one optimiser state with it, or each worker's own.
        """
        return _fresh(network, optimizer, network.init(key, spec), target, shared, shared and shared_optimizer, name)

    def restart(self, variables: Variables) -> "NetworkCopies":
        """All copies equal to these weights, as at the beginning: fresh optimiser and counters.

        Raises:
            ValueError: the trees differ.
        """
        check_same_tree(variables, self.online, "restart", sides=("weights", "online"))
        online, shared = soft_update(variables, self.online, 1.0), self.shared is not None
        return _fresh(self.network, self.optimizer, online, self.target_follow, shared, self.shared_optimizer, self.name)

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
        held = self.target if name == "target" else self._shared.variables
        return jax.tree.map(lambda x, like: x if x.dtype == like.dtype else x.astype(like.dtype), held, self.online)

    def newest(self) -> Variables:
        """The weights that were trained last, in buffers of their own: the shared copy's, or else the online one's."""
        return _copied(self.online if self.shared is None else self._shared.variables)

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

    def update_online(self, tau: Tau = 1.0, *, stats_tau: Tau = None) -> "NetworkCopies":
        """The online copy takes the share `tau` of the shared one; see `soft_update`.

        Raises:
            ValueError: there is no shared copy, or a share is none.
        """
        self.variables("shared")
        online = soft_update(self._shared.variables, self.online, tau, stats_tau=stats_tau)
        return dataclasses.replace(self, online=online, version=self._shared.version)

    def follow(self, *, updates: Any = 0, env_steps: Any = 0, key: PRNGKeyArray | None = None) -> "NetworkCopies":
        """The target follows if that is due after so many *more* updates and environment steps.

        Raises:
            ValueError: there is no target, or a count is negative.
            TypeError: a count is no integer.
        """
        self.variables("target")
        assert self.target_follow is not None and self.target_count is not None, "a target has both"
        count = updates if self.target_follow.unit == "updates" else env_steps
        target, counted = self.target_follow.step(self.target_count, self.online, self.target, count, key=key)
        return dataclasses.replace(self, target=target, target_count=counted)

    def accumulate(
        self,
        gradients: PyTree,
        *,
        reduce: Literal["sum", "mean"] = "sum",
        clip: Scalar | None = None,
        clip_when: Literal["each", "total"] = "each",
    ) -> "NetworkCopies":
        """With these gradients added to those accumulated; see `Accumulated.add`."""
        added = self.gradients.add(gradients, reduce=reduce, clip=clip, clip_when=clip_when)
        return dataclasses.replace(self, gradients=added)

    def reset_gradients(self) -> "NetworkCopies":
        """With none accumulated: zeros, even where there was infinity."""
        return dataclasses.replace(self, gradients=self.gradients.reset())

    def apply_gradients(
        self, to: Literal["online", "shared"] = "online", gradients: PyTree = None, *, keep: Any = True
    ) -> "NetworkCopies":
        """One step of the optimiser along the gradients (those accumulated, if none are given), which stay accumulated.

        Nothing changes but the count of `skipped` where a gradient or the step's result is not finite, or none was accumulated.

        Args:
            to: whose weights. The optimiser's state is the shared copy's where it is shared, else this worker's own.
            gradients: in the tree of the weights.
            keep: a bool, traced or not; False takes no step.

        Raises:
            ValueError: no such copy, another tree, or the online copy has no optimiser of its own.
        """
        check_choice(self.name, "apply_gradients to", to, ("online", "shared"))
        copy = self.variables(to)
        if to == "online" and self.shared_optimizer:
            raise ValueError(f"{self.name}: the optimiser is shared; apply to 'shared', or create with shared_optimizer=False")
        keep = jnp.asarray(keep)
        if gradients is None:
            gradients, keep = self.gradients.read(), keep & (self.gradients.number > 0)
        check_same_tree(gradients, copy.params, "apply_gradients", sides=("gradients", "params"))
        state = self._shared.optimizer_state if self.shared_optimizer else self.optimizer_state
        params, state, taken = step_along(self.optimizer, copy.params, state, in_float32(gradients), keep)
        copies = dataclasses.replace(self, skipped=self.skipped + (~taken).astype(jnp.uint32))
        moved = dataclasses.replace(copy, params=params)
        if to == "online":
            return dataclasses.replace(copies, online=moved, optimizer_state=state)
        version = self._shared.version + taken.astype(jnp.uint32)
        shared = dataclasses.replace(self._shared, variables=moved, version=version)
        if not self.shared_optimizer:
            return dataclasses.replace(copies, shared=shared, optimizer_state=state)
        return dataclasses.replace(copies, shared=dataclasses.replace(shared, optimizer_state=state))

    def apply_and_sync(self, gradients: PyTree = None, *, reset: bool = True, keep: Any = True) -> "NetworkCopies":
        """Apply to the shared copy, if there is one, and pull it; else to the online one. The target stays as it is.

        Args:
            gradients: as for `apply_gradients`.
            reset: with none accumulated any more.
            keep: as for `apply_gradients`.
        """
        if self.shared is None:
            copies = self.apply_gradients("online", gradients, keep=keep)
        else:
            copies = self.apply_gradients("shared", gradients, keep=keep).update_online()
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
            gradients = clipped(gradients, found.gradient_norm, clip)
        stepped = self.apply_and_sync(gradients, reset=False, keep=found.applied)
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
        """√Σ (aᵢ - bᵢ)² over the weights of two copies as they are held; a metric.

        Raises:
            ValueError: there is no such copy; those that there are.
        """
        held = {"online": self.online, "target": self.target, "shared": None if self.shared is None else self.shared.variables}
        for name in (a, b):
            self.variables(name)
        sides = [in_float32(held[name].params) for name in (a, b)]  # type: ignore[union-attr]
        return tree_norm(jax.tree.map(jnp.subtract, *sides))

    def __str__(self) -> str:
        lines = [f"{self.name}: {_described(self.online)}; copies: {', '.join(self.names)}"]
        if self.target is not None:
            lines.append(f"  target {_described(self.target)}, follows online: {self.target_follow}")
            lines.append(f"  distance online-target {self.distance('online', 'target')}")
        if self.shared is not None:
            optimizer = "one optimiser with it" if self.shared_optimizer else "own optimiser"
            lines.append(f"  shared {_described(self.shared.variables)}, version {self.shared.version}, {optimizer}")
        return "\n".join(lines)

    @property
    def _shared(self) -> Shared:
        assert self.shared is not None, "asked for after variables('shared')"
        return self.shared

    def _with_statistics(self, stats: PyTree) -> "NetworkCopies":
        copies = dataclasses.replace(self, online=dataclasses.replace(self.online, stats=stats))
        if self.shared is None:
            return copies
        variables = dataclasses.replace(self.shared.variables, stats=jax.tree.map(lambda x: jnp.array(x, copy=True), stats))
        return dataclasses.replace(copies, shared=dataclasses.replace(self.shared, variables=variables))


def _fresh(
    network: Network, optimizer: Any, online: Variables, target: Follow | None, shared: bool, one_optimizer: bool, name: str
) -> NetworkCopies:
    state = optimizer.init(in_float32(online.params))
    return NetworkCopies(
        network=network,
        optimizer=optimizer,
        online=online,
        target=None if target is None else _held(online, target),
        shared=Shared(_copied(online), state if one_optimizer else (), _zero(), _zero()) if shared else None,
        optimizer_state=() if one_optimizer else state,
        gradients=Accumulated.zeros(online.params),
        # As arrays of one dtype from the start: as Python numbers they would compile once more when they come back as arrays.
        target_follow=jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), target),
        target_count=None if target is None else target.init(),
        version=_zero(),
        skipped=_zero(),
        shared_optimizer=one_optimizer,
        name=name,
    )


def _held(online: Variables, follow: Follow) -> Variables:
    """A target's first value: a real copy, float32 at least where it moves by small shares."""
    held = _copied(online)
    params = in_float32(held.params) if follow.is_soft else held.params
    stats = in_float32(held.stats) if follow.is_soft_on_stats else held.stats
    return Variables(params, stats, held.graph)


def _copied(tree: Variables) -> Variables:
    copied: Variables = jax.tree.map(lambda x: jnp.array(x, copy=True), tree)
    return copied


def _described(variables: Variables) -> str:
    params = jax.tree.leaves(variables.params)
    dtypes = "/".join(sorted({str(leaf.dtype) for leaf in params})) or "none"
    stats = sum(leaf.size for leaf in jax.tree.leaves(variables.stats))
    return f"{sum(leaf.size for leaf in params)} parameters ({dtypes}), {stats} statistics"


def _zero() -> UInt32[Array, ""]:
    return jnp.zeros((), jnp.uint32)
