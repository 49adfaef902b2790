"""Probability distributions over actions, with the method names of distrax."""

from polyak.ops.distributions.continuous import Normal, TanhNormal
from polyak.ops.distributions.discrete import Bernoulli, Categorical, MultiCategorical
from polyak.ops.distributions.joint import Deterministic, Distribution, Joint, broadcast_params, for_space, parameter_shapes

__all__ = [
    "Bernoulli",
    "Categorical",
    "Deterministic",
    "Distribution",
    "Joint",
    "MultiCategorical",
    "Normal",
    "TanhNormal",
    "broadcast_params",
    "for_space",
    "parameter_shapes",
]
