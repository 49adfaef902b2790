"""What environments in JAX report in `info`, as metrics of training and evaluation in every loop."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak import envs, loops
from polyak.agents.ppo import PPO
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.envs.autoreset import AutoReset
from polyak.loops.evaluate import evaluate
from polyak.loops.jax_env_on_host import JaxEnvOnHost
from polyak.networks.feedforward import MLP
from polyak.policies.scripted import Uniform

LENGTH, NUM_ENVS, KEY = 4, 8, jax.random.key(5)


@dataclass(frozen=True)
class Silent:
    """Counts up to the end of an episode, which is a success as its initial state says."""

    spec = EnvSpec(Box(0.0, LENGTH, (1,)), Discrete(2), "Counting")

    def reset(self, key, num_envs):
        return jnp.zeros(num_envs), jax.random.bernoulli(key, 0.4, (num_envs,))

    def step(self, state, action, key):
        count, success = state[0] + 1, state[1]
        return (count, success), jnp.ones_like(count), count == LENGTH, jnp.zeros_like(success)

    def observe(self, state):
        return state[0][:, None]


@dataclass(frozen=True)
class Counting(Silent):
    """Reports the count, odd counts alone, and success."""

    def info(self, state):
        count, success = state
        return {"count": count, "odd": jnp.where(count % 2 == 1, count, jnp.nan), "is_success": success}


ENV = AutoReset(Counting(), NUM_ENVS)
# A rollout is an episode of each environment and its reset.
AGENT = PPO(ENV.spec, network=MLP((4,)), num_steps=LENGTH + 1, num_minibatches=1, num_epochs=1)
STEPS = NUM_ENVS * LENGTH


def trained(loop, env_steps=10 * STEPS, env=ENV, **options):
    return loop(AGENT, env, env_steps=env_steps, key=options.pop("key", KEY), report_every=3 * STEPS, **options)


def episodes_of(result):
    return [(entry.count, dict(entry.info)) for entry in result.progress.episodes]


def test_numbers_are_means_over_transitions_and_success_over_episodes():
    result = trained(loops.compiled)
    assert (result.metrics["env/count"], result.metrics["env/odd"]) == (2.5, 2.0)
    assert {(count, info["rollout/success_rate"][0]) for count, info in episodes_of(result)} == {(NUM_ENVS, NUM_ENVS)}
    totals = [info["rollout/success_rate"][1] for _, info in episodes_of(result)]
    assert result.metrics["rollout/success_rate"] == sum(totals) / (NUM_ENVS * len(totals)) and 0 < sum(totals) < 40


@pytest.mark.slow
def test_the_host_loop_reports_the_same():
    compiled, host = (trained(loop) for loop in (loops.compiled, loops.host))
    tags = [tag for tag in compiled.metrics if tag.startswith(("env/", "rollout/"))]
    assert len(tags) == 5 and [compiled.metrics[tag] for tag in tags] == [host.metrics[tag] for tag in tags]
    assert episodes_of(compiled) == episodes_of(host)


@pytest.mark.slow
def test_seeds_and_devices_report_the_same():
    one = trained(loops.compiled)
    many = loops.compiled_seeds(
        AGENT, ENV, env_steps=10 * STEPS, keys=jnp.stack([jax.random.key(1), KEY]), report_every=3 * STEPS
    )[1]
    split = trained(loops.compiled, devices=2)
    for other in (many, split):
        assert [other.metrics[tag] for tag in ("env/count", "env/odd")] == [2.5, 2.0]
        assert episodes_of(other) == episodes_of(one)


def test_a_resumed_run_reports_the_same():
    whole, half = trained(loops.compiled), trained(loops.compiled, 5 * STEPS)
    resumed = trained(
        loops.compiled,
        resume_from=half.loop_state,
        env_steps_done=half.progress.env_steps,
        episodes_done=half.progress.episodes,
    )
    assert resumed.metrics == whole.metrics and episodes_of(resumed) == episodes_of(whole)


@pytest.mark.slow
def test_reports_do_not_change_training_and_agents_do_not_see_them():
    silent, reporting = (trained(loops.compiled, env=AutoReset(env, NUM_ENVS)) for env in (Silent(), Counting()))
    for a, b in zip(jax.tree.leaves(silent.state), jax.tree.leaves(reporting.state), strict=True):
        np.testing.assert_array_equal(a, b)
    assert not [tag for tag in silent.metrics if tag.startswith("env/") or tag == "rollout/success_rate"]


@pytest.mark.parametrize("wrap", [lambda env: env, lambda env: JaxEnvOnHost(env, KEY)])
def test_evaluation_has_the_successes(wrap):
    evaluation = evaluate(Uniform(ENV.spec), wrap(ENV), episodes=32, key=KEY)
    assert set(evaluation.successes) == {0.0, 1.0} and 0 < evaluation.success_rate < 1
    silent = evaluate(Uniform(ENV.spec), wrap(AutoReset(Silent(), NUM_ENVS)), episodes=32, key=KEY)
    assert silent.success_rate is None


def test_an_environments_numbers_are_checked():
    class Wrong(Silent):
        def info(self, state):
            return {"count": jnp.zeros(3)}

    with pytest.raises(ValueError, match=r"Counting: info\(\) must return 'count' of shape \(8,\), got \(3,\)"):
        AutoReset(Wrong(), NUM_ENVS).init(KEY)

    class Text(Silent):
        def info(self, state):
            return {"state": state[0].astype(jnp.complex64)}

    with pytest.raises(TypeError, match=r"Counting: info\(\) must return 'state' as real numbers, got complex64"):
        AutoReset(Text(), NUM_ENVS).init(KEY)


@pytest.mark.parametrize("info", [{"author": "me"}, lambda state: [1.0]], ids=["an attribute", "a list"])
def test_an_info_that_is_no_method_of_numbers_is_named(info):
    class Other(Silent):
        pass

    Other.info = info if isinstance(info, dict) else staticmethod(info)
    with pytest.raises(TypeError, match=r"Counting: info must be a method that returns numbers \[B\] by name, got"):
        AutoReset(Other(), NUM_ENVS).init(KEY)


def test_classic_environments_report_nothing():
    assert envs.make("jax/CartPole-v1").init(KEY)[1].info is None
