"""Presets: each makes an agent for its environment, and trains as long as it says."""

import dataclasses

import pytest

import polyak
from polyak.agents import AGENTS
from polyak.presets import DEFAULT, PRESETS, Preset, preset


@pytest.mark.filterwarnings("ignore:builtin type")  # Box2D warns while it is imported, and dies where warnings are errors.
@pytest.mark.parametrize(("algorithm", "env_id"), PRESETS)
def test_a_preset_makes_an_agent_for_its_environment(algorithm, env_id):
    found = PRESETS[algorithm, env_id]
    env = polyak.envs.make(env_id, num_envs=found.num_envs)
    agent = AGENTS[algorithm](spec=env.spec, **found.settings(found.env_steps))
    agent.check(found.num_envs)
    env.close()


@pytest.mark.parametrize("found", PRESETS.values(), ids=map(str, PRESETS))
def test_a_preset_says_how_long_and_where_its_numbers_come_from(found):
    assert found.env_steps >= 100_000
    assert found.source


def test_schedules_last_as_long_as_the_training():
    settings = preset("ppo", "CartPole-v1").settings(12_345)
    assert settings["learning_rate"].env_steps == settings["clip_range"].env_steps == 12_345


def test_a_jax_environment_has_the_preset_of_the_same_task():
    assert preset("ppo", "jax/CartPole-v1") is preset("ppo", "CartPole-v1")


@pytest.mark.parametrize("env_id", ["gymnax/CartPole-v1", "Nowhere-v0", "CartPole-v0"])
def test_what_has_no_preset_gets_the_defaults(env_id):
    assert preset("ppo", env_id) is DEFAULT
    assert DEFAULT.settings(1) == {}


def test_presets_cannot_be_changed_by_accident():
    with pytest.raises(dataclasses.FrozenInstanceError):
        DEFAULT.env_steps = 1
    assert dataclasses.replace(DEFAULT, env_steps=5) == Preset(5, 8, DEFAULT.settings, DEFAULT.source)
