"""The cross-entropy method: an approximate maximum over actions, by samples that narrow on the best ones."""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int32

from polyak.core.struct import choice, integer, number, struct
from polyak.core.types import PyTree

MAX_ITERATIONS = 100
"""Iterations are unrolled in the program, so that it can be exported and layers of the observation alone are computed once."""


@struct(kw_only=True)
class CEMSettings:
    """The cross-entropy method over actions in [-1, 1].

    Attributes:
        num_samples: N, actions that are drawn in each iteration.
        num_elites: M, number of the best actions, to which mean and standard deviation are fitted.
        num_iterations: K, number of iterations.
        initial_std: standard deviation of the first iteration, around the middle of the action space.
        min_std: least standard deviation of an iteration.
        cem_action: the action that is taken: the `"best"` of the last iteration, or the `"mean"` of its M best.
    """

    num_samples: int = integer(default=64)
    num_elites: int = integer(default=6)
    num_iterations: int = integer(default=2, at_most=MAX_ITERATIONS)
    initial_std: float = number(default=1.0, above=0, static=True)
    min_std: float = number(default=0.01, at_least=0, static=True)
    cem_action: Literal["best", "mean"] = choice(default="best", choices=("best", "mean"))

    def cem_settings(self) -> "CEMSettings":
        """These settings alone, of an agent that has others too."""
        return CEMSettings(**{field.name: getattr(self, field.name) for field in dataclasses.fields(CEMSettings)})

    def check_cem(self) -> None:
        """Check the settings that depend on each other; called by `check_together` of an agent.

        Raises:
            ValueError: there are fewer samples than elites, or `initial_std` is below `min_std`.
        """
        if self.num_elites > self.num_samples:
            raise ValueError(
                f"{type(self).__name__}: num_elites must be at most num_samples={self.num_samples}, got {self.num_elites}"
            )
        if self.initial_std < self.min_std:
            raise ValueError(
                f"{type(self).__name__}: initial_std must be at least min_std={self.min_std}, got {self.initial_std}"
            )


def cem_maximum(score: Callable[[PyTree], Float[Array, "N B"]], noise: PyTree, settings: CEMSettings) -> PyTree:
    """The actions in [-1, 1] that the cross-entropy method finds, leaves `[B, ...]`.

        x_i = clip(μ_k + σ_k ε_ki, ±1),  i = 1 ... N
        μ_{k+1}, σ_{k+1} = mean and standard deviation of the M actions x_i of the largest scores,    μ_1 = 0

    with σ_k at least `min_std`. A score of NaN counts as the smallest.

    Args:
        score: the function to be maximized, of actions with leaves `[N, B, ...]`.
        noise: standard normal numbers ε, leaves `[K, N, B, ...]`.
        settings: N and K must be the numbers of the noise.

    Source: Rubinstein and Kroese 2004, doi:10.1007/978-1-4757-4321-0; for actions, Kalashnikov et al. 2018, arXiv:1806.10293.

    >>> noise = jax.random.normal(jax.random.key(0), (8, 64, 1, 1))
    >>> cem_maximum(lambda x: -jnp.square(x[..., 0] - 0.3), noise, CEMSettings(num_iterations=8)).round(2)
    Array([[0.3]], dtype=float32)
    """
    mean = jax.tree.map(lambda z: jnp.zeros(z.shape[2:], jnp.float32), noise)
    std = jax.tree.map(lambda m: jnp.full_like(m, settings.initial_std), mean)
    for k in range(settings.num_iterations):
        x = jax.tree.map(partial(_samples, number=k, min_std=settings.min_std), mean, std, noise)
        rank = _rank(score(x))
        mean = jax.tree.map(partial(_masked_mean, chosen=rank < settings.num_elites), x)
        variance = jax.tree.map(partial(_masked_mean, chosen=rank < settings.num_elites), _square_deviations(x, mean))
        std = jax.tree.map(jnp.sqrt, variance)
    return mean if settings.cem_action == "mean" else jax.tree.map(partial(_masked_mean, chosen=rank == 0), x)


def _samples(mean: Array, std: Array, noise: Array, *, number: int, min_std: float) -> Float[Array, "N B ..."]:
    return jnp.clip(mean[None] + jnp.maximum(std, min_std)[None] * noise[number], -1.0, 1.0)


def _square_deviations(x: PyTree, mean: PyTree) -> PyTree:
    return jax.tree.map(lambda x, mean: jnp.square(x - mean[None]), x, mean)


def _rank(score: Float[Array, "N B"]) -> Int32[Array, "N B"]:
    """The number of samples that are better, of equal ones those before; by comparisons alone, which exported files allow."""
    score = jnp.where(jnp.isnan(score), -jnp.inf, score)
    number = jnp.arange(len(score))
    is_before = (number[None, :] < number[:, None])[:, :, None]
    is_better = (score[None] > score[:, None]) | ((score[None] == score[:, None]) & is_before)
    return jnp.sum(is_better, axis=1, dtype=jnp.int32)


def _masked_mean(x: Float[Array, "N B ..."], chosen: Bool[Array, "N B"]) -> Float[Array, "B ..."]:
    """The mean over the chosen samples of each row."""
    wide = chosen.reshape(*chosen.shape, *(1,) * (x.ndim - 2))
    return jnp.sum(jnp.where(wide, x, 0.0), axis=0) / jnp.sum(wide, axis=0, dtype=jnp.float32)
