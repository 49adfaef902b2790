"""An agent that is passed to `polyak.resume` must have the settings of the run's."""

import dataclasses
import json
import shutil
import warnings

import jax
import numpy as np
import optax
import pytest

import polyak
from polyak.runs import read_config
from polyak.storage.checkpoint import CheckpointError
from polyak.storage.run_directory import open_run
from polyak.train.agent_settings import check_agent_settings, find_changes, store_agent_settings

SMALL = {"num_steps": 8, "num_epochs": 1, "num_minibatches": 1, "network": polyak.MLP((4,))}


def env():
    return polyak.envs.make("jax/CartPole-v1", num_envs=2)


def agent(kind=polyak.PPO, **changes):
    return kind(spec=env().spec, **SMALL | changes)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    path = tmp_path_factory.mktemp("runs") / "run"
    polyak.train.run(agent(), env(), env_steps=64, run_dir=path, progress=False)
    return path


@pytest.fixture
def run(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "run")


def config_of(run):
    return (run / "config.json").read_text()


def edited(run, change):
    """The open run, with the agent of its `config.json` changed, as an older version may have written it."""
    config = json.loads(config_of(run))
    change(config["agent"])
    (run / "config.json").write_text(json.dumps(config))
    with open_run(run, write=True) as opened:
        opened.accept_config()
    return opened


@pytest.mark.slow
def test_other_settings_resume_a_run_by_force_only_and_are_stored(run):
    with pytest.raises(ValueError, match=r"polyak\.resume: gamma of PPO must have single numbers, got array"):
        polyak.resume(run, agent=agent(gamma=np.array([0.5, 0.9])), env_steps=128, progress=False, force=True)
    before = config_of(run)
    with pytest.raises(ValueError, match=r"got gamma=0\.5 \(the run has 0\.99\); force=True accepts and stores them"):
        polyak.resume(run, agent=agent(gamma=0.5), env_steps=128, progress=False)
    assert config_of(run) == before
    polyak.resume(run, agent=agent(gamma=0.5), env_steps=128, force=True, progress=False)
    assert read_config(open_run(run)).agent.gamma == 0.5
    # The checkpoint that was saved since has them too.
    polyak.resume(run, env_steps=192, progress=False)


@pytest.mark.slow
def test_a_run_that_is_made_longer_than_its_schedules_warns_where_they_end(tmp_path, recwarn):
    schedules = {"learning_rate": polyak.Linear(1e-3, 0.0, 32), "clip_range": polyak.Linear(0.2, 0.1, 64)}
    polyak.train.run(agent(**schedules), env(), env_steps=64, run_dir=tmp_path / "run", progress=False)
    polyak.resume(tmp_path / "run", progress=False)
    assert not recwarn.list
    for env_steps, names in (
        (96, ["learning_rate stays at 0 after 32", "clip_range stays at 0.1 after 64"]),
        (128, ["learning_rate"]),
    ):
        recwarn.clear()
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            polyak.resume(tmp_path / "run", env_steps=env_steps, progress=False)
        messages = [str(warning.message) for warning in recwarn.list]
        assert len(messages) == len(names)
        assert all(
            f"polyak.resume: {name}" in message for name, message in zip(names, sorted(messages, reverse=True), strict=True)
        )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changed", "env_steps", "error", "message"),
    [
        (agent(gamma=0.5), 1, ValueError, "has already done"),
        (agent(network=polyak.MLP((8,))), 128, CheckpointError, r"float32\[4,8\]"),
    ],
)
def test_settings_are_stored_only_when_the_run_resumes_with_them(changed, env_steps, error, message, run):
    before = config_of(run)
    with pytest.raises(error, match=message):
        polyak.resume(run, agent=changed, env_steps=env_steps, force=True, progress=False)
    assert config_of(run) == before


def test_another_class_is_rejected_also_by_force(run):
    other = polyak.A2C(spec=env().spec, num_steps=8, network=SMALL["network"])
    with pytest.raises(ValueError, match=r"agent must be a PPO, as in .*run, got A2C"):
        polyak.resume(run, agent=other, env_steps=128, force=True, progress=False)


def test_differences_are_named_by_their_path(run):
    other = agent(network=polyak.MLP((4,), activation="relu"), learning_rate=polyak.Linear(0.1, env_steps=64))
    found = find_changes(open_run(run), other)
    assert found["network.activation"] == 'network.activation="relu" (the run has null)'
    assert found["learning_rate"] == "learning_rate=nothing (the run has 0.0003)"
    assert {path.split(".")[0] for path in found} == {"network", "learning_rate"}


def test_equal_settings_are_equal_however_they_are_written(run):
    assert find_changes(open_run(run), agent(gamma=np.float64(0.99))) == {}

    def remove_newer_settings(stored):
        del stored["clip_range"], stored["network"]["norm"]

    assert find_changes(edited(run, remove_newer_settings), agent()) == {}


def test_what_a_run_can_only_describe_is_not_compared(run):
    described = agent(optimizer=optax.sgd(0.1))
    opened = open_run(run)
    assert find_changes(opened, described) == {}
    assert "gamma" in find_changes(opened, dataclasses.replace(described, gamma=0.5))


@jax.tree_util.register_pytree_node_class
class Own:
    """An agent of one's own that is no dataclass."""

    def __getattr__(self, name):
        return getattr(agent(), name)

    def tree_flatten(self):
        return (), None

    @classmethod
    def tree_unflatten(cls, structure, leaves):
        return cls()


@pytest.mark.slow
def test_an_agent_that_can_only_be_described_is_not_compared(tmp_path):
    polyak.train.run(Own(), env(), env_steps=32, run_dir=tmp_path, progress=False)
    before = config_of(tmp_path)
    assert "$unsupported" in before
    with open_run(tmp_path, write=True) as opened:
        check_agent_settings(opened, Own(), force=False, owner="polyak.resume", consent="")
        store_agent_settings(opened, Own())
    assert config_of(tmp_path) == before
