"""Environments of other libraries that `make` cannot read are errors with the way out; those that look odd are read."""

import gymnasium
import jax
import numpy as np
import pytest

from polyak import envs, loops
from polyak.agents.ppo import PPO
from polyak.envs.libraries import CONVERSIONS, IN_JAX
from polyak.networks.feedforward import MLP
from tests.envs import toys


def of_library(library):
    """An object of a class that the library seems to define."""
    return type("Theirs", (), {"__module__": f"{library}.envs", "reset": None, "step": None})()


@pytest.mark.parametrize("library", sorted(set(CONVERSIONS) - set(IN_JAX)))
def test_an_environment_of_another_library_is_an_error_with_its_conversion(library):
    with pytest.raises(TypeError, match=r"make: id must be a name, .*, got Theirs; (wrap|convert|pass)"):
        envs.make(of_library(library))


@pytest.mark.parametrize("library", sorted(CONVERSIONS))
def test_a_function_that_creates_one_is_an_error_with_its_conversion(library):
    with pytest.raises(TypeError, match=r"env 0 must be a gymnasium.Env, got Theirs; (wrap|convert|pass)"):
        envs.make(lambda: of_library(library))


class Adapter(toys.Scripted):
    """An adapter to another library: what it wraps is no Gymnasium environment."""

    @property
    def unwrapped(self):
        return object()


@pytest.mark.slow
@pytest.mark.parametrize(
    "make_env", [Adapter, lambda: gymnasium.wrappers.TimeLimit(gymnasium.wrappers.ClipReward(Adapter(), -1, 1), 4)]
)
@pytest.mark.parametrize("given", ["function", "env", "vector", "async"])
def test_what_it_unwraps_to_does_not_matter(make_env, given):
    match given:
        case "function" | "async":
            env = envs.make(make_env, num_envs=2, vectorization="async" if given == "async" else "auto")
        case "env":
            env = envs.make(make_env())
        case "vector":
            env = envs.make(gymnasium.vector.SyncVectorEnv([make_env] * 2))
    agent = PPO(env.spec, network=MLP((4,)), num_steps=8, num_minibatches=1, num_epochs=1)
    result = loops.host(agent, env, env_steps=32, key=jax.random.key(0))
    env.close()
    assert np.isfinite(result.metrics["train/loss"])


@pytest.mark.filterwarnings("ignore:pkg_resources")
def test_minigrid_is_learned_without_its_text():
    pytest.importorskip("minigrid")
    with pytest.warns(UserWarning, match=r"dropped the text 'mission' from the observation of MiniGrid-Empty-5x5-v0"):
        env = envs.make("MiniGrid-Empty-5x5-v0", num_envs=2)
    assert sorted(env.spec.obs.spaces) == ["direction", "image"]
    agent = PPO(env.spec, network=MLP((4,)), num_steps=8, num_minibatches=1, num_epochs=1)
    assert np.isfinite(loops.host(agent, env, env_steps=32, key=jax.random.key(0)).metrics["train/loss"])
