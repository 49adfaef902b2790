"""Random network distillation: networks, the novelty of observations, and a policy that sums it while it collects rollouts."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float

from polyak.core.spaces import Box, Discrete, EnvSpec, Leaf, map_space
from polyak.core.struct import static, struct
from polyak.core.types import Network, PyTree, TimeStep, Variables
from polyak.networks.feedforward import MLP, FeedForward, NatureCNN
from polyak.networks.heads import QValues
from polyak.networks.layers import has_images
from polyak.ops.gradient_step import Aux
from polyak.ops.losses import weighted_sum
from polyak.ops.normalize import RunningStats, Weights
from polyak.ops.returns import running_return_step
from polyak.policies.network_policy import DiscountedReturn


@struct
class Distillation:
    """The random network f, the predictor f̂, and the statistics that their observations are normalized with.

    Attributes:
        random: the variables of f, which are never trained.
        predictor: the variables of f̂.
        obs_stats: `RunningStats` of each Box of an observation, None for other spaces.
        networks: f and f̂.
        spec: the environment's spaces.
        clip: normalized observations are clipped to ± this value.
    """

    random: Variables
    predictor: Variables
    obs_stats: PyTree
    networks: tuple[Network, Network] = static()
    spec: EnvSpec = static()
    clip: float = static()

    def normalize(self, obs: PyTree) -> PyTree:
        """The observations with mean 0 and standard deviation 1, clipped, as networks take them; images too."""

        def leaf(space: Leaf, stats: RunningStats | None, x: Array) -> Array:
            if stats is None:
                return x
            # Networks divide bytes by their scale.
            scale = space.byte_scale if isinstance(space, Box) and space.dtype == np.uint8 else 1.0
            return stats.normalize(x, clip=self.clip) * scale

        return map_space(leaf, self.spec.obs, self.obs_stats, obs)

    def features(self, obs: PyTree) -> Float[Array, "N K"]:
        """f(s) of normalized observations."""
        (features, _), _, _ = self.networks[0].apply(self.random, obs)
        return jax.lax.stop_gradient(features)

    def error(self, obs: PyTree) -> Float[Array, " N"]:
        """mean_k (f̂_k(s) - f_k(s))², the novelty of each observation; 0 until there are statistics of observations."""
        normalized = self.normalize(obs)
        error = squared_error(self.networks[1], self.predictor, normalized, self.features(normalized))
        return jnp.where(self.has_stats, error, 0.0)

    def update_stats(self, obs: PyTree, weight: Weights, axis_name: str | None = None) -> "Distillation":
        """With the statistics after these observations `[*batch, ...]`; observations of weight 0 are ignored."""

        def leaf(_: Leaf, stats: RunningStats | None, x: Array) -> RunningStats | None:
            return None if stats is None else stats.update(x, weight, axis_name)

        return dataclasses.replace(self, obs_stats=map_space(leaf, self.spec.obs, self.obs_stats, obs))

    def loss(self, params: PyTree, obs: PyTree, weight: Float[Array, " N"]) -> tuple[Float[Array, ""], Aux]:
        """E[ mean_k (f̂_k(s) - f_k(s))² ] with f̂'s parameters `params`; weights sum to 1."""
        obs = self.normalize(obs)
        variables = dataclasses.replace(self.predictor, params=params)
        return weighted_sum(squared_error(self.networks[1], variables, obs, self.features(obs)), weight), Aux({})

    @property
    def has_stats(self) -> Bool[Array, ""]:
        """There are statistics of observations, or nothing to normalize."""
        counts = [x.count for x in jax.tree.leaves(self.obs_stats, is_leaf=_is_stats) if _is_stats(x)]
        return jnp.all(jnp.array([count > 0 for count in counts], bool))


@struct
class IntrinsicReturn(DiscountedReturn):
    """The inner policy, with the discounted intrinsic return so far of each environment in its carry.

        R_t = i_t + γ R_{t-1}, also across episodes

    In the carry it is sharded and saved with its environment.
    """

    distillation: Distillation

    def next_return(self, time_step: TimeStep, discounted: Float[Array, " B"]) -> Float[Array, " B"]:
        """R_t of a time step, from R_{t-1}."""
        error, episode_begins = self.distillation.error(time_step.obs), jnp.zeros_like(time_step.first)
        return running_return_step(error, episode_begins, discounted, gamma=self.gamma)


def squared_error(network: Network, variables: Variables, obs: PyTree, features: Float[Array, "N K"]) -> Float[Array, " N"]:
    """mean_k (f̂_k(s) - f_k(s))² of normalized observations."""
    (predicted, _), _, _ = network.apply(variables, obs)
    return jnp.mean(jnp.square(predicted - features), axis=-1)


def _is_stats(x: Any) -> bool:
    """True for running statistics."""
    return isinstance(x, RunningStats)


def random_network_or_default(owner: str, network: Any, spec: EnvSpec, name: str = "network") -> Any:
    """The setting of f: an `MLP` or a `NatureCNN` without a head; None takes `NatureCNN` for images, else `MLP`.

    Args:
        name: the setting's name, for the error.

    Raises:
        TypeError: the network is another one, or has no layers.
    """
    network = (NatureCNN() if has_images(spec.obs) else MLP()) if network is None else network
    if not isinstance(network, FeedForward) or network.head is not None or not network.hidden:
        raise TypeError(f"{owner}: {name} must be an MLP or a NatureCNN with layers and without a head, got {network!r:.80}")
    return network


def feature_networks(network: Any) -> tuple[Network, Network]:
    """The networks f and f̂ of the setting of f; f̂ has two more layers of its last width."""
    random = dataclasses.replace(network, head=QValues())
    return random, dataclasses.replace(random, hidden=(*network.hidden, *2 * network.hidden[-1:]))


def feature_spec(spec: EnvSpec, num_features: int) -> EnvSpec:
    """The spec of networks whose outputs are the features, as many as action values."""
    return EnvSpec(spec.obs, Discrete(num_features))


def create_obs_stats(spec: EnvSpec) -> PyTree:
    """Empty statistics of observations; see `Distillation.obs_stats`."""
    return map_space(lambda x: RunningStats.init(x.shape) if isinstance(x, Box) else None, spec.obs)


def diagnose_stats(owner: str, metrics: Mapping[str, Any], limit: int) -> str | None:
    """Why there are no intrinsic rewards after `limit` updates without statistics of observations; else None.

    `metrics` has `train/n_updates` and `train/intrinsic_stats`, which is `Distillation.has_stats` as a number.
    """
    if metrics["train/intrinsic_stats"] or metrics["train/n_updates"] < limit:
        return None
    return (
        f"{owner}: {int(metrics['train/n_updates'])} updates had no intrinsic rewards, as an observation of each has a square "
        "that is infinite in float32; scale or clip the environment's observations"
    )
