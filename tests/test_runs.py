"""A run directory as an agent again: what its config may say, and a policy that acts without the training stack."""

import contextlib
import dataclasses
import json
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
from flax import nnx
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import polyak
from polyak.agents import AGENTS, agent_class
from polyak.runs import FORMAT, RunConfig, read_config, run_key
from polyak.storage.checkpoint import CheckpointError
from polyak.storage.config import ConfigError
from polyak.storage.progress import replay_path, save_state, snapshot_of
from polyak.storage.run_directory import Run, RunError, create, open_run
from tests.mutated import mutated

OBS = np.array([0.01, 0.0, 0.05, 0.0], np.float32)


class Small(nnx.Module):
    """A network that no config can describe."""

    def __init__(self, spec, rngs):
        self.policy = nnx.Linear(spec.obs.shape[0], spec.action.n, rngs=rngs)
        self.value = nnx.Linear(spec.obs.shape[0], 1, rngs=rngs)

    def __call__(self, obs):
        return self.policy(obs), self.value(obs)[..., 0]


def config_for(agent, **changes):
    fields = {
        "algorithm": "ppo",
        "env": "jax/CartPole-v1",
        "num_envs": 2,
        "seed": 0,
        "env_steps": 16,
        "loop": "compiled",
        "devices": 1,
        "report_every": None,
        "checkpoint_every": 16,
        "agent": agent,
    }
    return RunConfig(**fields | changes)


def trained(directory, network=None):
    """A tiny training written into a run directory; returns its greedy policy."""
    env = polyak.envs.make("jax/CartPole-v1", num_envs=2)
    network = polyak.MLP((4,), head=polyak.PolicyAndValue()) if network is None else network
    agent = polyak.PPO(spec=env.spec, network=network, num_steps=8, num_epochs=1, num_minibatches=1)
    with create(directory, config_for(agent).to_json()) as run:
        result = polyak.train.run(agent, env, env_steps=16, key=run_key(0))
        save_state(run, result.progress, result.loop_state, snapshot_of(result.progress))
    return agent, agent.policy(result.state)


@pytest.fixture(scope="module")
def run_and_policy(tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "run"
    return directory, trained(directory)[1]


def test_a_loaded_policy_acts_like_the_trained_one(run_and_policy):
    directory, policy = run_and_policy
    loaded = polyak.load_policy(directory)
    batch = np.random.default_rng(0).normal(size=(64, 4)).astype(np.float32)
    np.testing.assert_array_equal(loaded.predict(batch)[0], policy.predict(batch)[0])
    for got, wanted in zip(jax.tree.leaves(loaded), jax.tree.leaves(policy), strict=True):
        np.testing.assert_array_equal(got, wanted)


def test_a_policy_acts_without_the_training_stack(run_and_policy):
    directory, policy = run_and_policy
    program = (
        "import sys, polyak\n"
        f"action, _ = polyak.load_policy({str(directory)!r}).predict({OBS.tolist()})\n"
        "print(action, *sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    action, *modules = done.stdout.split()
    assert int(action) == policy.predict(OBS)[0]
    assert {"gymnasium", "polyak.train", "polyak.envs", "polyak.cli", "tensorboard", "tyro"} & set(modules) == set()


def test_custom_network_must_be_passed_again(tmp_path):
    agent, policy = trained(tmp_path / "run", polyak.FlaxNNX(Small))
    with pytest.raises(ConfigError, match="could not be stored with the run; rebuild it in Python and pass it again"):
        polyak.load_policy(tmp_path / "run")
    loaded = polyak.load_policy(tmp_path / "run", agent=agent)
    assert loaded.predict(OBS)[0] == policy.predict(OBS)[0]


def test_a_run_that_a_program_made_loads_with_its_agent(tmp_path):
    agent, policy = trained(tmp_path / "one")
    with create(tmp_path / "mine", {"note": "made by a program"}) as run:
        shutil.copytree(tmp_path / "one/checkpoints", run.checkpoints, dirs_exist_ok=True)
    assert polyak.load_policy(tmp_path / "mine", agent=agent).predict(OBS)[0] == policy.predict(OBS)[0]
    with pytest.raises(ConfigError, match="has format None, this version reads 4; it is not from polyak train"):
        polyak.load_policy(tmp_path / "mine")


def test_an_agent_whose_policy_would_act_otherwise_is_rejected(run_and_policy):
    directory, policy = run_and_policy
    agent = read_config(open_run(directory)).agent
    other = dataclasses.replace(agent, network=dataclasses.replace(agent.network, activation="elu"))
    with pytest.raises(ValueError, match=r'must have the settings of .*, got network\.activation="elu" \(the run has null'):
        polyak.load_policy(directory, agent=other)
    spec = dataclasses.replace(agent.spec, action=dataclasses.replace(agent.spec.action, start=3))
    with pytest.raises(
        ValueError, match=r"must have the settings of .*, got action Discrete\(n=2, start=3\) \(the run has Discr"
    ):
        polyak.load_policy(directory, agent=dataclasses.replace(agent, spec=spec))
    # What only training depends on may differ.
    loaded = polyak.load_policy(directory, agent=dataclasses.replace(agent, learning_rate=0.5))
    assert loaded.predict(OBS)[0] == policy.predict(OBS)[0]


def test_load_policy_rejects_an_agent_argument_that_is_not_an_agent(run_and_policy, unchecked):
    with pytest.raises(TypeError, match="load_policy: agent must be an agent with the settings of the trained agent, got 5"):
        polyak.load_policy(run_and_policy[0], agent=5)


def test_checkpoint_of_another_network_is_rejected_by_leaf(run_and_policy):
    directory, _ = run_and_policy
    agent = read_config(open_run(directory)).agent
    other = dataclasses.replace(agent, network=polyak.MLP((5,)))
    with pytest.raises(CheckpointError, match="does not match the requested tree") as error:
        polyak.load_policy(directory, agent=other)
    assert "float32[4,4]" in str(error.value).replace(" ", "")
    assert "float32[4,5]" in str(error.value).replace(" ", "")


def test_missing_run_directory_is_rejected(tmp_path):
    with pytest.raises(RunError, match="nothing: there is no such run directory or exported file"):
        polyak.load_policy(tmp_path / "nothing")


def test_a_config_comes_back_as_it_was(run_and_policy):
    directory, _ = run_and_policy
    config = read_config(open_run(directory))
    assert config == config_for(config.agent)
    assert config.agent.network == polyak.MLP((4,), head=polyak.PolicyAndValue())


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("num_envs", 0, r"num_envs must be an integer in \[1, 1048576\], got 0"),
        ("env_steps", -5, "env_steps must be an integer >= 1, got -5"),
        ("devices", 0, r"devices must be an integer in \[1, 1024\], got 0"),
        # JAX would abort the process.
        ("devices", 20_000, r"devices must be an integer in \[1, 1024\], got 20000"),
        ("checkpoint_every", 0, "checkpoint_every must be an integer >= 1, got 0"),
        ("report_every", 0, "report_every must be an integer >= 1 or None, got 0"),
        ("final_eval_episodes", -1, "final_eval_episodes must be an integer >= 0 or None, got -1"),
        ("seed", -1, r"seed must be an integer in \[0, 4294967295\], got -1"),
        ("seed", 2**32, r"seed must be an integer in \[0, 4294967295\], got 4294967296"),
        ("loop", "both", "loop must be one of 'compiled', 'host', got 'both'"),
        ("action_scaling", "squash", "action_scaling must be one of 'clip', 'rescale', got 'squash'"),
        (
            "env_kwargs",
            {"xml_file": "/etc/passwd"},
            r"env_kwargs\['xml_file'\] must be a finite number or a bool, got '/etc/passwd'",
        ),
        ("env_kwargs", {"frameskip": [4]}, r"env_kwargs\['frameskip'\] must be a finite number or a bool"),
        ("env_options", {"wraper": 1}, r"unknown env_options entry 'wraper'.* \(env_options entries: "),
    ],
)
def test_config_value_out_of_range_is_rejected_by_field(field, value, message, run_and_policy, tmp_path):
    directory, _ = run_and_policy
    config = read_config(open_run(directory))
    if field != "action_scaling" and field != "loop":
        with pytest.raises(ValueError, match=f"run: {message}"):
            dataclasses.replace(config, **{field: value})
    run = create(tmp_path / "run", {**config.to_json(), field: value})
    run.close()
    with pytest.raises(ConfigError, match=r"config\.json: ") as error:
        read_config(run)
    assert field in str(error.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_settings_are_finite_and_integers_of_any_size(value, run_and_policy):
    config = read_config(open_run(run_and_policy[0]))
    with pytest.raises(ValueError, match=r"run: env_kwargs\['a'\] must be a finite number or a bool, got"):
        dataclasses.replace(config, env_kwargs={"a": value})
    assert dataclasses.replace(config, env_kwargs={"a": 10**400}).env_kwargs == {"a": 10**400}


@pytest.mark.parametrize("agent", [3, None, "PPO", {"$class": "Discrete", "n": 2}, {"$class": "Popen", "args": "ls"}])
def test_config_whose_agent_is_not_an_agent_is_rejected(agent, run_and_policy, tmp_path):
    directory, _ = run_and_policy
    config = open_run(directory).read_config()
    with create(tmp_path / "run", {**config, "agent": agent}) as run, pytest.raises(ConfigError, match=r"config\.json"):
        read_config(run)


class Given(Run):
    """A run whose config is this document, as if its hash were right."""

    document = None

    def read_config(self, *, verify=True):
        return self.document


JUNK = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(([], {}, 10**400, -(10**400)))


@pytest.mark.slow
@given(st.data())
@settings(deadline=None, max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_a_mutated_config_raises_only_config_errors(run_and_policy, data):
    run = Given(run_and_policy[0], None)
    run.__dict__["document"] = mutated(open_run(run_and_policy[0]).read_config(), JUNK, data)
    with contextlib.suppress(ConfigError):
        read_config(run)


def test_newer_format_is_rejected(run_and_policy, tmp_path):
    directory, _ = run_and_policy
    config = open_run(directory).read_config()
    with (
        create(tmp_path / "run", {**config, "format": FORMAT + 1}) as run,
        pytest.raises(ConfigError, match=rf"has format {FORMAT + 1}, this version reads {FORMAT}; upgrade polyak"),
    ):
        read_config(run)


def test_fields_that_are_missing_or_unknown_are_named(run_and_policy, tmp_path):
    directory, _ = run_and_policy
    config = open_run(directory).read_config()
    del config["loop"]
    with (
        create(tmp_path / "run", {**config, "loops": 1}) as run,
        pytest.raises(ConfigError, match=r"fields missing: \['loop'\]; fields unknown: \['loops'\]"),
    ):
        read_config(run)


def test_a_config_from_before_a_field_had_a_default_is_read(run_and_policy, tmp_path):
    directory, _ = run_and_policy
    config = open_run(directory).read_config()
    del config["env_kwargs"]
    with create(tmp_path / "run", config) as run:
        assert read_config(run).env_kwargs == {}


@pytest.mark.parametrize(
    ("stored", "episodes"),
    [
        ({}, 100),
        ({"eval_every": 50, "eval_episodes": 7}, 7),
        ({"final_eval_episodes": 0}, 0),
        ({"eval_every": 50, "eval_episodes": 7, "final_eval_episodes": 9}, 9),
    ],
)
def test_episodes_at_the_end_are_the_runs_where_it_has_stored_them(stored, episodes, run_and_policy, tmp_path):
    config = open_run(run_and_policy[0]).read_config()
    del config["final_eval_episodes"]
    with create(tmp_path / "run", config | stored) as run:
        assert read_config(run).episodes_at_end(100) == episodes


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_a_seed_is_the_key_of_the_same_number(seed):
    np.testing.assert_array_equal(jax.random.key_data(run_key(seed)), jax.random.key_data(jax.random.key(np.uint32(seed))))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('"num_envs": 2', '"num_envs": 10000000', r"num_envs must be an integer in \[1, 1048576\], got 10000000"),
        ('"hidden": {"$tuple": [', '"hidden": {"$tuple": [' + "4, " * 5000, "hidden must have at most 256 layers, got 500"),
        (
            '"hidden": {"$tuple": [',
            '"hidden": {"$tuple": [1000000000, ',
            "hidden must have widths of at most 65536, got 1000000000",
        ),
    ],
)
def test_a_config_that_asks_for_too_much_is_rejected_with_the_number(old, new, message, run_and_policy, tmp_path):
    text = json.dumps(open_run(run_and_policy[0]).read_config())
    assert old in text
    with create(tmp_path / "run", json.loads(text.replace(old, new, 1))) as run, pytest.raises(ConfigError, match=message):
        read_config(run)


@pytest.mark.parametrize("name", ["algorithm", "env"])
def test_control_characters_in_names_of_a_config_are_rejected_and_printed_escaped(name, run_and_policy, tmp_path):
    config = open_run(run_and_policy[0]).read_config()
    with create(tmp_path / "run", config | {name: "\x1b[2J"}) as run, pytest.raises(ConfigError) as error:
        read_config(run)
    assert f"{name} must be printable" in str(error.value) and str(error.value).isprintable()
    config["agent"]["\x1b[2J"] = [{"$class": "no"}]
    with create(tmp_path / "other", config) as run, pytest.raises(ConfigError) as error:
        read_config(run)
    assert str(error.value).isprintable()


@pytest.mark.parametrize("name", AGENTS)
def test_every_agent_with_a_replay_names_it_for_checkpoints(name):
    agent = None
    for env in ("jax/CartPole-v1", "jax/Pendulum-v1"):
        with contextlib.suppress(ValueError):
            agent = agent or agent_class(name)(spec=polyak.envs.make(env, num_envs=2, action_scaling="rescale").spec)
    fields = [field.name for field in dataclasses.fields(jax.eval_shape(agent.init, jax.random.key(0)))]
    assert replay_path(agent) == (".agent.replay" if "replay" in fields else None)
