"""The names of the package: few, each what it says, and nothing imported before it is asked for."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import polyak

SOURCE = Path(polyak.__file__)


def modules_after(*programs):
    """The modules that a fresh interpreter has imported after each of the programs, which it runs one after another."""
    text = "".join(f"{program}\nimport sys; print(*sys.modules)\n" for program in programs)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    return [set(line.split()) for line in done.stdout.splitlines()]


def test_there_are_few_names():
    assert len(polyak.__all__) == len(set(polyak.__all__)) <= 85


@pytest.mark.parametrize("name", polyak.__all__)
def test_every_name_is_there(name):
    value = getattr(polyak, name)
    assert getattr(value, "__name__", name).split(".")[-1] == name


def test_type_checkers_see_the_same_names():
    (block,) = (node for node in ast.parse(SOURCE.read_text()).body if isinstance(node, ast.If))
    imported = [alias.asname or alias.name for node in block.body for alias in node.names]
    assert sorted(imported) == sorted(polyak.__all__)


def test_dir_shows_them():
    assert set(polyak.__all__) < set(dir(polyak))


def test_an_unknown_name_is_refused_and_the_known_ones_listed():
    with pytest.raises(
        AttributeError,
        match=r"module 'polyak' has no attribute 'SACK'; it has A2C, Actor, ActorAndCritic, Agent",
    ):
        _ = polyak.SACK


def test_a_star_import_works():
    names = {}
    exec("from polyak import *", names)
    assert set(polyak.__all__) <= set(names)


def test_importing_polyak_or_environments_imports_next_to_nothing():
    polyak_alone, environments = modules_after("import polyak", "import polyak.envs")
    assert not polyak_alone & {"jax", "numpy", "flax", "gymnasium", "rich", "tyro", "polyak.core"}
    assert not environments & {"jax", "gymnasium", "mujoco"}


def test_policies_need_neither_agents_nor_loops_and_the_training_stack_no_gymnasium_for_a_jax_environment():
    policies, training = modules_after(
        "import polyak; polyak.policies.EpsilonGreedy",
        "polyak.envs.make('jax/CartPole-v1', num_envs=2); polyak.PPO; polyak.train.run",
    )
    assert not policies & {"polyak.agents", "polyak.train", "polyak.envs"}
    assert "polyak.train" in training and "gymnasium" not in training


def test_a_policy_in_python_is_evaluated_and_a_worker_starts_without_flax():
    evaluated, worker = modules_after(
        "import jax, polyak; env = polyak.envs.make('CartPole-v1', num_envs=1); "
        "policy = polyak.PythonPolicy(lambda obs: obs[:, 2] > 0, env.spec, deterministic=True); "
        "polyak.evaluate(policy, env, episodes=1, key=jax.random.key(0))",
        "import polyak.workers.rollout_worker",
    )
    assert "polyak.loops.evaluate" in evaluated and "flax" not in evaluated | worker


@pytest.mark.parametrize("module", ["importers", "policies", "schedules"])
def test_everything_under_one_name_is_there(module):
    names = getattr(polyak, module).__all__
    assert names == sorted(set(names)) and all(getattr(getattr(polyak, module), name) is not None for name in names)
    assert polyak.schedules.Linear is polyak.Linear
