"""All policies, and what goes around them, under one name: `polyak.policies.EpsilonGreedy(policy, 0.1)`."""

from polyak.parts.exploration import Boltzmann, EpsilonGreedy
from polyak.parts.mixture import Mixture
from polyak.parts.noise import ActionSmoothing, GaussianNoise, OUNoise
from polyak.parts.policies import DiscountedReturn, Greedy, NetworkPolicy
from polyak.parts.python_policy import PythonPolicy
from polyak.parts.scripted import Scripted, Uniform
from polyak.parts.with_info import WithInfo, with_info

__all__ = [
    "ActionSmoothing",
    "Boltzmann",
    "DiscountedReturn",
    "EpsilonGreedy",
    "GaussianNoise",
    "Greedy",
    "Mixture",
    "NetworkPolicy",
    "OUNoise",
    "PythonPolicy",
    "Scripted",
    "Uniform",
    "WithInfo",
    "with_info",
]
