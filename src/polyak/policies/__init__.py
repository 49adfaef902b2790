"""All policies, and what goes around them, under one name: `polyak.policies.EpsilonGreedy(policy, 0.1)`."""

from polyak.policies.exploration import Boltzmann, EpsilonGreedy
from polyak.policies.mixture import Mixture
from polyak.policies.network_policy import DiscountedReturn, Greedy, NetworkPolicy
from polyak.policies.noise import ActionSmoothing, GaussianNoise, OUNoise
from polyak.policies.python.policy import PythonPolicy
from polyak.policies.scripted import Scripted, Uniform
from polyak.policies.with_info import WithInfo, with_info

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
