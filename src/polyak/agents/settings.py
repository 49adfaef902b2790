"""Groups of settings that agents share."""

from typing import Any, Literal, TypeAlias

import jax
import jax.numpy as jnp
import optax

from polyak.copies.follow import Follow
from polyak.core.checks import check_unset
from polyak.core.spaces import Dict, EnvSpec, check_env_spec
from polyak.core.struct import choice, integer, number, setting, static, struct
from polyak.core.suggestions import unknown_name
from polyak.core.types import Scalar
from polyak.ops.gradient_step import ADAM_SETTINGS, RMSPROP_SETTINGS, adam
from polyak.ops.schedules import Count, Schedule, check_schedule

Entries: TypeAlias = str | tuple[str, ...]
"""Names: of entries of a Dict observation, or of layers."""


@struct(kw_only=True)
class AdamSettings:
    """The optimizer of an agent's networks: Adam, or another one.

    Attributes:
        learning_rate: learning rate of Adam, a number or a schedule such as `Linear`.
        max_grad_norm: clip the gradient of each network to this global norm; None disables clipping.
        adam_b1: Adam's β₁, the decay of the mean of the gradients.
        adam_eps: Adam's ε, at least 10⁻²⁰, so that no step divides by 0.
        optimizer: any `optax.GradientTransformation`; replaces Adam and its settings above.
    """

    learning_rate: Schedule = setting(default=3e-4, check=check_schedule)
    max_grad_norm: Scalar | None = number(default=None, above=0, optional=True)
    adam_b1: float = number(default=0.9, at_least=0, at_most=0.9999, static=True)
    adam_eps: Scalar = number(default=1e-8, at_least=1e-20)
    optimizer: optax.GradientTransformation | None = static(default=None)

    def optimizer_at(self, env_steps: Count = 0, learning_rate: Schedule | None = None) -> optax.GradientTransformation:
        """Return `optimizer`, or Adam with the learning rate of this step.

        Args:
            learning_rate: the learning rate of one of the agent's networks; None takes the agent's `learning_rate`.
        """
        if self.optimizer is not None:
            return self.optimizer
        schedule = self.learning_rate if learning_rate is None else learning_rate
        return adam(schedule, env_steps, b1=self.adam_b1, eps=self.adam_eps, max_grad_norm=self.max_grad_norm)

    def check_optimizer(self) -> None:
        """Check the setting `optimizer`; with it, the settings of Adam have no effect and must be left out.

        Raises:
            TypeError: the value is no `optax.GradientTransformation`, or needs further arguments, such as the value of the
                loss.
            ValueError: a setting of Adam is set too.
        """
        optimizer: Any = self.optimizer
        if optimizer is None:
            return
        if not isinstance(optimizer, optax.GradientTransformation):
            kinds = "an optax.GradientTransformation (of MultiSteps, its gradient_transformation()) or None"
            raise TypeError(f"{type(self).__name__}: optimizer must be {kinds}, got {optimizer!r}")
        try:
            jax.eval_shape(lambda x: optimizer.update(x, optimizer.init(x), x), jax.ShapeDtypeStruct((1,), jnp.float32))
        except Exception as error:  # An optimizer for the parameters of one network may fail here.
            if any(text in str(error) for text in ("keyword-only argument", "no attribute fast")):
                wanted = "take gradients, state and params alone, unlike reduce_on_plateau, lbfgs or lookahead"
                raise TypeError(f"{type(self).__name__}: the update of optimizer must {wanted}: {error}") from error
        reason = "has no effect with optimizer=...; leave it out and set it in the optimizer"
        check_unset(self, (*ADAM_SETTINGS, *RMSPROP_SETTINGS), reason)


@struct(kw_only=True)
class TargetSettings:
    """The pace at which target networks follow the online networks.

    Attributes:
        tau: fraction by which targets move towards the online networks at each target update; 1 copies them.
        target_period: gradient steps between target updates.
    """

    tau: Scalar = number(default=0.005, above=0, at_most=1)
    target_period: int = integer(default=1)

    def follow(self) -> Follow:
        """The rule by which all targets follow; it replaces the rule that `init` stored in the state."""
        return Follow(tau=jnp.asarray(self.tau, jnp.float32), period=self.target_period, check_finite=False)


@struct(kw_only=True)
class ViewSettings:
    """The entries of a Dict observation that actor and critic see.

    Attributes:
        spec: the environment's spaces (`env.spec`).
        actor_obs: the entry, or entries, that the actor sees, and that `policy` needs; None: all. Each entry is normalized by
            its own statistics.
        critic_obs: the entry, or entries, that the critic sees; None: all.
    """

    spec: EnvSpec = static(kw_only=False)
    actor_obs: Entries | None = static(default=None)
    critic_obs: Entries | None = static(default=None)

    @property
    def views(self) -> dict[str, tuple[str, ...] | None]:
        """The entries that `"actor"` and `"critic"` see; None: all."""
        named = {"actor": self.actor_obs, "critic": self.critic_obs}
        return {name: (entries,) if isinstance(entries, str) else entries for name, entries in named.items()}

    def spec_of(self, name: Literal["actor", "critic"]) -> EnvSpec:
        """The spec as the actor, or the critic, sees it."""
        return self.spec.select_entries(self.views[name])

    def set_views(self) -> None:
        """Check the spec and the views, and convert views to tuples; called first by `set_defaults`.

        Raises:
            TypeError: the spec is no `EnvSpec`, or a view no names.
            ValueError: the observation has no such entry.
        """
        owner = type(self).__name__
        check_env_spec(owner, self.spec)
        obs = self.spec.obs
        for name, entries in (("actor_obs", self.actor_obs), ("critic_obs", self.critic_obs)):
            if entries is None:
                continue
            if not isinstance(obs, Dict):
                raise ValueError(
                    f"{owner}: {name} must be None unless the observation is a Dict, got {entries!r}, {self.spec.obs}"
                )
            names = (entries,) if isinstance(entries, str) else entries
            if not isinstance(names, tuple | list) or not all(isinstance(entry, str) for entry in names):
                raise TypeError(f"{owner}: {name} must be names of entries of the observation, or None, got {entries!r}")
            if not names or len(set(names)) < len(names):
                raise ValueError(f"{owner}: {name} must be names of entries of the observation, each once, got {entries!r}")
            for entry in names:
                if entry not in obs.spaces:
                    raise ValueError(f"{owner}: {name}: {unknown_name(entry, obs.spaces, 'observation entry')}")
            object.__setattr__(self, name, tuple(sorted(names)))


@struct(kw_only=True)
class NormalizationSettings:
    """Normalization of observations by their running statistics.

    Attributes:
        normalize_obs: normalize observations by their running mean and standard deviation (all Boxes but uint8).
        clip_obs: clip normalized observations to ± this value; None disables clipping.
    """

    normalize_obs: bool = choice(default=False, choices=(True, False))
    clip_obs: float | None = number(default=10.0, above=0, optional=True, static=True, used_if=("normalize_obs", True))
