"""The loss of PPO: a surrogate of the policy's improvement, the value's error, an entropy bonus, and penalties."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from polyak.core.types import PyTree, Scalar, Terms, Variables
from polyak.learning.batch import ActorCriticModel, Rows
from polyak.learning.minibatches import accumulate
from polyak.networks.roles import Role
from polyak.ops import losses
from polyak.ops.devices import sum_over_devices
from polyak.ops.distributions import Distribution
from polyak.ops.kl_penalty import kl_cutoff, kl_cutoff_slope


@runtime_checkable
class SurrogateSettings(Protocol):
    """What the loss reads of an agent's settings; see `PPO`."""

    @property
    def clip_range_vf(self) -> Scalar | None:
        """How far a value may move, or None."""
        ...

    @property
    def clip_log_prob(self) -> Scalar | None:
        """Bound of log-probabilities, or None."""
        ...

    @property
    def ent_coef(self) -> Scalar:
        """c_e."""
        ...

    @property
    def vf_coef(self) -> Scalar:
        """c_v."""
        ...

    @property
    def kl_target(self) -> Scalar | None:
        """d, or None."""
        ...

    @property
    def kl_cutoff_coef(self) -> Scalar | None:
        """κ, or None."""
        ...

    @property
    def kl_cutoff_factor(self) -> Scalar | None:
        """f, or None."""
        ...

    @property
    def target_kl(self) -> Scalar | None:
        """Where an update ends, or None."""
        ...


@dataclasses.dataclass(frozen=True)
class Surrogate:
    """PPO's loss in one update, as a function of the raveled parameters.

        L(θ) = E[ -min(ρ A, clip(ρ, 1-ε, 1+ε) A) + c_v (V - V̂)² - c_e H ] + β KL + κ max(KL - f d, 0)² + Σ c_i θ_i²

    with ρ = π_θ(a|s) / π_old(a|s) and KL = E[KL(π_old ‖ π_θ)]; E is over the rows that count.

    Attributes:
        settings: the coefficients.
        model: network and action space.
        start: the variables before the update.
        unravel: the parameters' tree of their vector.
        rows_at: what an epoch learns from that begins with these variables.
        clip_range: ε, or None.
        kl_beta: β, or None.
        squares: by role, c_i for each parameter; or None.
        axis_name: the mesh axis that rows are spread over.
    """

    settings: SurrogateSettings
    model: ActorCriticModel
    start: Variables
    unravel: Callable[[Array], PyTree]
    rows_at: Callable[[Variables], Rows]
    clip_range: Float[Array, ""] | None
    kl_beta: Float[Array, ""] | None
    squares: Mapping[Role, Float[Array, " n"]] | None
    axis_name: str | None

    @property
    def microbatch_size(self) -> int | None:
        """Rows whose gradient is computed at a time."""
        return self.model.microbatch_size

    def variables(self, params: Float[Array, " n"]) -> Variables:
        """The network's variables with these parameters."""
        return dataclasses.replace(self.start, params=self.unravel(params))

    def rows(self, params: Float[Array, " n"]) -> Rows:
        """What an epoch that begins with these parameters learns from."""
        return self.rows_at(self.variables(params))

    def share(self, params: Float[Array, " n"], part: Rows, total: Scalar, known: PyTree) -> tuple[Float[Array, ""], Terms]:
        """The share that some rows have in the minibatch's loss and its terms; `total` is the weight of the whole minibatch."""
        settings, old = self.settings, part.log_prob
        # Not in training mode: a ratio compares two policies, and dropout or a minibatch's own statistics would be in it.
        distribution, value = self.model.forward(self.variables(params), part)
        log_prob = learns = distribution.log_prob(part.action)
        if settings.clip_log_prob is not None:
            learns = jnp.clip(log_prob, -settings.clip_log_prob, settings.clip_log_prob)
        rows = {"entropy_loss": -distribution.entropy(), "approx_kl": losses.approx_kl(log_prob, old)}
        rows["ratio"] = losses.probability_ratio(log_prob, old)
        if self.clip_range is None:
            rows["policy_gradient_loss"] = losses.surrogate(learns, old, part.advantage)
        else:
            rows["policy_gradient_loss"] = losses.clipped_surrogate(learns, old, part.advantage, self.clip_range)
            rows["clip_fraction"] = losses.clip_fraction(log_prob, old, self.clip_range)
        if settings.clip_range_vf is None:
            rows["value_loss"] = losses.value_loss(value, part.value_target)
        else:
            rows["value_loss"] = losses.clipped_value_loss(value, part.value, part.value_target, settings.clip_range_vf)
        terms = losses.masked_means(rows, part.weight, total=total)
        loss = (
            terms["policy_gradient_loss"] + settings.vf_coef * terms["value_loss"] + settings.ent_coef * terms["entropy_loss"]
        )
        if self.kl_beta is not None:
            terms["kl_penalty_loss"] = self.kl_beta * self._kl(distribution, part, total)
            loss = loss + terms["kl_penalty_loss"]
        if known is not None:
            kl = self._kl(distribution, part, total)
            # The gradient of this share; the value, which is no sum of shares, is added to the whole.
            loss = loss + known["slope"] * (kl - jax.lax.stop_gradient(kl))
        return loss, {"loss": loss, **terms}

    def known(self, params: Float[Array, " n"], rows: Rows, index: Int32[Array, " M"], total: Scalar) -> PyTree:
        """Value and slope of the cutoff, which is a square of the whole minibatch's mean; None without one."""
        settings = self.settings
        if settings.kl_cutoff_coef is None:
            return None
        assert settings.kl_cutoff_factor is not None and settings.kl_target is not None, "the cutoff needs both"
        kl = self._mean_kl(params, rows, index, total)
        limit = {"factor": settings.kl_cutoff_factor, "target": settings.kl_target, "coef": settings.kl_cutoff_coef}
        return {"value": kl_cutoff(kl, **limit), "slope": kl_cutoff_slope(kl, **limit)}

    def whole(
        self, params: Float[Array, " n"], gradient: Float[Array, " n"], terms: Terms, known: PyTree
    ) -> tuple[Float[Array, " n"], Terms]:
        """With what does not come in shares: the cutoff's value, and the squares of parameters."""
        if known is not None:
            terms = terms | {"kl_cutoff_loss": known["value"], "loss": terms["loss"] + known["value"]}
        if self.squares is not None:
            each = {f"l2_{role}_loss": jnp.sum(c * jnp.square(params)) for role, c in self.squares.items()}
            punished = sum(each.values(), jnp.float32(0.0))
            gradient = gradient + 2.0 * sum(self.squares.values(), jnp.float32(0.0)) * params
            terms = terms | each | {"l2_loss": punished, "loss": terms["loss"] + punished}
        return gradient, terms

    def stops(self, terms: Terms) -> Bool[Array, ""]:
        """The policy has moved too far for another step."""
        most = self.settings.target_kl
        return jnp.array(False) if most is None else terms["approx_kl"] > 1.5 * most

    def kl_of_all(self, params: Float[Array, " n"], rows: Rows) -> Float[Array, ""]:
        """E[KL(π_old ‖ π)] over all rows that count."""
        number = rows.weight.shape[1 if rows.sequences else 0]
        total = sum_over_devices(rows.weight.sum(), self.axis_name)
        return self._mean_kl(params, rows, jnp.arange(number, dtype=jnp.int32), total)

    def _mean_kl(self, params: Array, rows: Rows, index: Array, total: Scalar) -> Float[Array, ""]:
        def share(index: Int32[Array, " m"]) -> Float[Array, ""]:
            part = rows.at(index)
            return self._kl(self.model.forward(self.variables(params), part)[0], part, total)

        kl: Float[Array, ""] = accumulate(share, index, self.axis_name, self.microbatch_size)
        return kl

    def _kl(self, distribution: Distribution, part: Rows, total: Scalar) -> Float[Array, ""]:
        """The share of some rows in E[KL(π_old ‖ π)], exact."""
        old = self.model.distribution(part.old_params, part.action_mask)
        return losses.masked_mean(old.kl_divergence(distribution), part.weight, total=total)
