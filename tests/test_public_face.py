"""The names of the package: few, each what it says, and nothing imported before it is asked for."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import polyak

SOURCE = Path(polyak.__file__)


def modules_after(program):
    """The modules that a fresh interpreter has imported after the program."""
    text = f"{program}\nimport sys; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_there_are_at_most_forty_names():
    assert len(polyak.__all__) == len(set(polyak.__all__)) <= 40


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
    with pytest.raises(AttributeError, match=r"module 'polyak' has no attribute 'SACK'; it has PPO, Agent"):
        _ = polyak.SACK


def test_a_star_import_works():
    names = {}
    exec("from polyak import *", names)
    assert set(polyak.__all__) <= set(names)


def test_importing_polyak_imports_next_to_nothing():
    modules = modules_after("import polyak")
    assert not modules & {"jax", "numpy", "flax", "gymnasium", "rich", "tyro", "polyak.core"}


def test_importing_environments_imports_no_environment():
    assert not modules_after("import polyak.envs") & {"jax", "gymnasium", "mujoco"}


def test_the_training_stack_does_not_import_gymnasium_for_a_jax_environment():
    program = "import polyak; polyak.envs.make('jax/CartPole-v1', num_envs=2); polyak.PPO; polyak.train.run"
    assert "gymnasium" not in modules_after(program)


@pytest.mark.parametrize("module", ["policies", "schedules"])
def test_everything_under_one_name_is_there(module):
    names = getattr(polyak, module).__all__
    assert names == sorted(set(names)) and all(getattr(getattr(polyak, module), name) is not None for name in names)
    assert polyak.schedules.Linear is polyak.Linear


def test_policies_need_neither_agents_nor_loops():
    assert not modules_after("import polyak; polyak.policies.EpsilonGreedy") & {"polyak.agents", "polyak.train", "polyak.envs"}
