"""All policies and wrappers under one name: `polyak.policies.EpsilonGreedy(policy, 0.1)`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyak.policies.exploration import Boltzmann, EpsilonGreedy, RandomWarmStart
    from polyak.policies.info import WithInfo, with_info
    from polyak.policies.mixture import Mixture
    from polyak.policies.network_policy import DiscountedReturn, Greedy, NetworkPolicy
    from polyak.policies.noise import ActionSmoothing, GaussianNoise, OUNoise
    from polyak.policies.python.policy import PythonPolicy
    from polyak.policies.scripted import Scripted, Uniform
    from polyak.policies.sde import StateDependentExploration
    from polyak.policies.stable_baselines import StableBaselinesPolicy

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
    "RandomWarmStart",
    "Scripted",
    "StableBaselinesPolicy",
    "StateDependentExploration",
    "Uniform",
    "WithInfo",
    "with_info",
]

_MODULES = {
    "exploration": ("Boltzmann", "EpsilonGreedy", "RandomWarmStart"),
    "mixture": ("Mixture",),
    "network_policy": ("DiscountedReturn", "Greedy", "NetworkPolicy"),
    "noise": ("ActionSmoothing", "GaussianNoise", "OUNoise"),
    "python.policy": ("PythonPolicy",),
    "sde": ("StateDependentExploration",),
    "scripted": ("Scripted", "Uniform"),
    "stable_baselines": ("StableBaselinesPolicy",),
    "info": ("WithInfo", "with_info"),
}


def __getattr__(name: str) -> Any:
    # Imported when used: an exported policy acts without flax, optax and gymnasium.
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(f"polyak.policies.{module}"), name)
    from polyak.core.suggestions import missing_from_module

    raise AttributeError(missing_from_module("polyak.policies", name, __all__))


def __dir__() -> list[str]:
    return list(__all__)
