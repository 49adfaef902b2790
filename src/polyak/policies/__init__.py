"""All policies and wrappers under one name: `polyak.policies.EpsilonGreedy(policy, 0.1)`."""

from typing import TYPE_CHECKING

from polyak.core.lazy import lazy_attribute

if TYPE_CHECKING:
    from polyak.policies.exploration import Boltzmann as Boltzmann
    from polyak.policies.exploration import EpsilonGreedy as EpsilonGreedy
    from polyak.policies.exploration import RandomWarmStart as RandomWarmStart
    from polyak.policies.flow_policy import FlowPolicy as FlowPolicy
    from polyak.policies.info import WithInfo as WithInfo
    from polyak.policies.info import with_info as with_info
    from polyak.policies.mixture import Mixture as Mixture
    from polyak.policies.network_policy import DiscountedReturn as DiscountedReturn
    from polyak.policies.network_policy import Greedy as Greedy
    from polyak.policies.network_policy import NetworkPolicy as NetworkPolicy
    from polyak.policies.noise import ActionSmoothing as ActionSmoothing
    from polyak.policies.noise import GaussianNoise as GaussianNoise
    from polyak.policies.noise import MixedNoise as MixedNoise
    from polyak.policies.noise import OUNoise as OUNoise
    from polyak.policies.parameter_noise import ParameterNoise as ParameterNoise
    from polyak.policies.python.policy import PythonPolicy as PythonPolicy
    from polyak.policies.repeated_noise import RepeatedNoise as RepeatedNoise
    from polyak.policies.scripted import Scripted as Scripted
    from polyak.policies.scripted import Uniform as Uniform
    from polyak.policies.sde import StateDependentExploration as StateDependentExploration
    from polyak.policies.stable_baselines import StableBaselinesPolicy as StableBaselinesPolicy

_MODULES = {
    "exploration": ("Boltzmann", "EpsilonGreedy", "RandomWarmStart"),
    "flow_policy": ("FlowPolicy",),
    "mixture": ("Mixture",),
    "network_policy": ("DiscountedReturn", "Greedy", "NetworkPolicy"),
    "noise": ("ActionSmoothing", "GaussianNoise", "MixedNoise", "OUNoise"),
    "parameter_noise": ("ParameterNoise",),
    "python.policy": ("PythonPolicy",),
    "repeated_noise": ("RepeatedNoise",),
    "sde": ("StateDependentExploration",),
    "scripted": ("Scripted", "Uniform"),
    "stable_baselines": ("StableBaselinesPolicy",),
    "info": ("WithInfo", "with_info"),
}

__all__ = sorted(name for names in _MODULES.values() for name in names)

# Imported when used: an exported policy acts without flax, optax and gymnasium.
__getattr__ = lazy_attribute("polyak.policies", _MODULES)


def __dir__() -> list[str]:
    return __all__
