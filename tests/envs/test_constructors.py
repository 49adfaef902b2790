"""Environments by name, by maker, as they are; and what is refused before anything runs."""

import builtins
import importlib.util
import subprocess
import sys
import tomllib
from pathlib import Path

import gymnasium
import jaxtyping
import numpy as np
import pytest
from gymnasium.envs.classic_control.cartpole import CartPoleVectorEnv
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from polyak import envs, train
from polyak.agents.ppo import PPO
from polyak.core.types import HostEnv
from polyak.envs import host_batches
from polyak.envs.autoreset import AutoReset
from polyak.envs.available import JAX_LIBRARIES
from polyak.envs.classic import CartPole
from polyak.envs.env_batch import SingleBatch
from polyak.envs.gymnasium import GymnasiumEnv
from polyak.envs.host_batches import _check_render_mode
from polyak.envs.source import source_of
from polyak.envs.vector import VectorBatch
from polyak.networks.feedforward import MLP
from tests.agents.rollouts import same_bits
from tests.envs import toys
from tests.envs.test_vector import Through


@pytest.fixture
def as_users_run():
    """Without the type checks that only tests have, which refuse some arguments first."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


def test_importing_the_room_imports_no_environment_and_no_jax():
    code = "import sys, polyak.envs; print([m for m in ('gymnasium', 'gymnax', 'jax') if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


def test_the_name_decides_between_jax_and_gymnasium():
    assert envs.make("jax/CartPole-v1", num_envs=3) == AutoReset(CartPole(), 3)
    assert envs.make("jax/CartPole-v1", env_kwargs={"max_episode_steps": 9}) == AutoReset(CartPole(max_episode_steps=9), 1)
    assert isinstance(envs.make("CartPole-v1"), GymnasiumEnv)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("vectorization", "sync"),
        ("timeout", 5.0),
        ("nonfinite", "pass"),
        ("out_of_bounds", "clip"),
        ("drop_unsupported_obs", True),
        ("action_mask_key", "mask"),
        ("info_metrics", ["x"]),
    ],
)
def test_arguments_of_gymnasiums_environments_are_rejected_for_those_in_jax(name, value):
    with pytest.raises(
        ValueError, match=f"make: {name} is for Gymnasium environments and must be left out for jax/CartPole-v1"
    ):
        envs.make("jax/CartPole-v1", **{name: value})


def test_dynamics_whose_reset_is_costly_have_a_pool_of_initial_states(monkeypatch):
    assert envs.make("jax/CartPole-v1", num_envs=9).reset_pool is None
    given = envs.make("jax/CartPole-v1", num_envs=9, reset_pool=4)
    assert given.reset_pool == 4 and source_of(given).options["reset_pool"] == 4
    monkeypatch.setattr(CartPole, "has_costly_reset", True, raising=False)
    assert envs.make("jax/CartPole-v1", num_envs=9).reset_pool == 2
    assert envs.make("jax/CartPole-v1", num_envs=9, reset_pool=None).reset_pool is None
    with pytest.raises(ValueError, match=r"make: reset_pool is for environments in JAX and must be left out for CartPole-v1"):
        envs.make("CartPole-v1", reset_pool=4)
    with pytest.raises(
        TypeError, match=r"make: reset_pool, where it is not 'auto', must be an integer in .* or None, got 'all'"
    ):
        envs.make("jax/CartPole-v1", reset_pool="all")
    with pytest.raises(ValueError, match=r"make: reset_pool, .*must be an integer in \[1, 1048576\] or None, got 1000000000"):
        envs.make("jax/CartPole-v1", reset_pool=10**9)


@pytest.mark.parametrize(
    ("name", "vectorization", "expected"),
    [
        ("CartPole-v1", "auto", VectorBatch),
        ("CartPole-v1", "own", VectorBatch),
        ("CartPole-v1", "sync", SingleBatch),
        ("Pendulum-v1", "auto", SingleBatch),
        ("phys2d/Pendulum-v0", "auto", SingleBatch),
    ],
)
def test_the_environments_own_vectorized_form_is_taken_where_there_is_a_sound_one(name, vectorization, expected):
    env = envs.make(name, num_envs=2, vectorization=vectorization)
    assert type(env._batch) is expected
    assert env.num_envs == 2 and env.spec.id == name


def test_settings_reach_the_environment():
    env = envs.make("CartPole-v1", num_envs=2, env_kwargs={"max_episode_steps": 3})
    env.reset(0)
    flags = [env.step(np.array([t % 2, 1 - t % 2])).truncated.tolist() for t in range(3)]
    assert flags == [[False, False], [False, False], [True, True]]
    assert envs.make("Pendulum-v1", env_kwargs={"g": 9.5})._batch.group.envs[0].env.unwrapped.g == 9.5


@pytest.mark.parametrize("name", ["CartPole-v1", "Pendulum-v1"])
@pytest.mark.parametrize("disable", [True, False])
def test_gymnasiums_checker_can_be_named_in_the_settings(name, disable):
    env = envs.make(name, num_envs=2, env_kwargs={"disable_env_checker": disable})
    assert env.reset(0).obs.shape[0] == 2
    assert source_of(env).options["env_kwargs"] == {"disable_env_checker": disable}


def test_a_function_that_creates_a_vector_environment_is_told_to_pass_it():
    with pytest.raises(TypeError, match=r"must be a gymnasium.Env, got CartPoleVectorEnv; pass the vector environment itself"):
        envs.make(lambda: gymnasium.make_vec("CartPole-v1", num_envs=2))


def test_a_function_a_class_and_an_environment_are_taken():
    assert envs.make(toys.Scripted, num_envs=3).spec.id == "Scripted"
    assert envs.make(lambda: gymnasium.make("Pendulum-v1"), num_envs=2).num_envs == 2
    assert envs.make(gymnasium.make("Pendulum-v1")).spec.id == "Pendulum-v1"
    assert envs.make(gymnasium.make_vec("CartPole-v1", num_envs=4)).num_envs == 4
    assert envs.make(gymnasium.make_vec("CartPole-v1", num_envs=4)).spec.id == "CartPole-v1"


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"id": "CartPol-v1"}, ValueError, "unknown environment 'CartPol-v1'; did you mean 'CartPole-v1'"),
        ({"id": "cartpole-v1"}, ValueError, "did you mean 'CartPole-v1'"),
        ({"id": "CartPole-v7"}, ValueError, "did you mean 'CartPole-v"),
        ({"id": "jax/CartPole-v0"}, ValueError, "unknown environment 'jax/CartPole-v0'; did you mean 'jax/CartPole-v1'"),
        ({"id": "jax/Taxi"}, ValueError, r"unknown environment 'jax/Taxi' \(.*jax/Pendulum-v1"),
        ({"id": "zzz"}, ValueError, "unknown environment 'zzz'; if another package registers it"),
        ({"id": "FetchReach-v4"}, ValueError, "did you mean 'Reacher-v4'.* 'package:FetchReach-v4'"),
        ({"id": ""}, ValueError, "unknown environment ''"),
        (
            {"id": "CartPole-v1", "drop_unsupported_obs": "yes"},
            TypeError,
            "make: drop_unsupported_obs must be True, False or None, got 'yes'",
        ),
        ({"id": "no_such_module_x:Env-v0"}, ImportError, "needs the module 'no_such_module_x': No"),
        ({"id": "tests.envs.toys:Tree"}, ValueError, "registers no such .*; pass .* itself, or --env tests.envs.toys:Tree"),
        ({"id": 5}, TypeError, "id must be a name, .*got int"),
        ({"id": None}, TypeError, "got NoneType"),
        ({"id": "CartPole-v1", "num_envs": 0}, ValueError, r"num_envs must be an integer in \[1, 65536\], got 0"),
        ({"id": "CartPole-v1", "num_envs": 2.0}, TypeError, r"num_envs must be an integer in \[1, 65536\], got 2.0"),
        ({"id": "CartPole-v1", "timeout": 0.0}, ValueError, "timeout must be a number"),
        ({"id": "CartPole-v1", "timeout": float("nan")}, ValueError, "timeout must be a number"),
        (
            {"id": "CartPole-v1", "vectorization": "fork"},
            ValueError,
            "vectorization must be one of 'auto', 'own', 'sync', 'async'",
        ),
        ({"id": "CartPole-v1", "nonfinite": "ignore"}, ValueError, "nonfinite must be one of 'error', 'pass', got 'ignore'"),
        ({"id": "CartPole-v1", "out_of_bounds": "x"}, ValueError, "out_of_bounds must be one of"),
        ({"id": "CartPole-v1", "action_scaling": "x"}, ValueError, "action_scaling must be 'clip' or 'rescale'"),
        ({"id": "jax/CartPole-v1", "action_scaling": "x"}, ValueError, "action_scaling must be 'clip' or 'rescale'"),
        (
            {"id": "jax/CartPole-v1", "vectorization": "sync"},
            ValueError,
            "vectorization is for Gymnasium environments",
        ),
        ({"id": "jax/CartPole-v1", "env_kwargs": {"steps": 3}}, TypeError, "unknown field 'steps'"),
        ({"id": "Pendulum-v1", "vectorization": "own"}, ValueError, "has no vectorized form, got 'own'"),
        ({"id": "phys2d/CartPole-v1", "vectorization": "own"}, ValueError, "has no vectorized form, got 'own'"),
        ({"id": "Pendulum-v1", "env_kwargs": {"gravity": 3}}, TypeError, "gravity"),
        ({"id": toys.Scripted, "env_kwargs": {"n": 3}}, TypeError, "env_kwargs must be None unless id is a name"),
        ({"id": "CartPole-v1", "num_envs": 10**30}, ValueError, r"num_envs must be an integer in \[1, 65536\], got 10{30}$"),
        ({"id": "ALE/Pong-v5", "num_envs": 10**7}, ValueError, r"num_envs must be an integer in \[1, 65536\]"),
        ({"id": "jax/CartPole-v1", "num_envs": 10**7}, ValueError, r"num_envs must be an integer in \[1, 1048576\]"),
        ({"id": "Pendulum-v1", "num_envs": 2000, "vectorization": "async"}, ValueError, r"must be .* in \[1, 1024\]"),
        (
            {"id": "HalfCheetah-v5", "env_kwargs": {"frame_skip": 10**9}},
            ValueError,
            r"frame_skip.* in \[1, 1000\]",
        ),
        ({"id": "HalfCheetah-v5", "env_kwargs": {"frame_skip": 1e9}}, TypeError, "frame_skip.* must be an integer"),
        ({"id": "ALE/Pong-v5", "env_kwargs": {"stack_num": 10**9}}, ValueError, r"stack_num must be .* in \[1, 64\]"),
        ({"id": "CartPole-v1", "env_kwargs": 5}, TypeError, "make: env_kwargs must be a dict .* or None, got 5"),
        ({"id": "jax/CartPole-v1", "env_kwargs": [1]}, TypeError, r"make: env_kwargs must be a dict .* or None, got \[1\]"),
        ({"id": "CartPole-v1", "info_metrics": 5}, TypeError, "info_metrics must be a tuple .* got 5"),
        ({"id": "CartPole-v1", "env_kwargs": {"render_mode": "nope"}}, ValueError, "render_mode.* 'rgb_array'.*, got 'nope'"),
        ({"id": "Pendulum-v1", "env_kwargs": {"render_mode": "nope"}}, ValueError, "render_mode.* 'human'.*, got 'nope'"),
        ({"id": toys.Scripted, "vectorization": "own"}, ValueError, "vectorization='own' needs the name"),
        ({"id": toys.Scripted, "info_metrics": "force"}, TypeError, r"info_metrics must be a tuple .* got 'force'"),
        ({"id": toys.Scripted, "info_metrics": (1,)}, TypeError, r"info_metrics must be a tuple .* got \(1,\)"),
    ],
)
def test_a_wrong_argument_is_rejected_before_anything_runs(arguments, error, says, as_users_run):
    with pytest.raises(error, match=says):
        envs.make(**arguments)


def test_an_older_name_of_the_ale_is_told_what_it_is_called(monkeypatch):
    envs.names()
    older = gymnasium.registry["BreakoutNoFrameskip-v4"]
    # As in a process that has not imported ale-py yet, which registers the name.
    monkeypatch.delitem(gymnasium.registry, older.id)
    monkeypatch.setattr(host_batches, "names", lambda: {"atari": [gymnasium.registry.setdefault(older.id, older).id]})
    with pytest.raises(ValueError, match="use 'ALE/Breakout-v5', or the ALE's older 'ale_py:BreakoutNoFrameskip-v4' without"):
        envs.make(older.id)


class Own:
    """Dynamics whose spec is an attribute of the class."""

    spec = CartPole().spec
    reset, step, observe = CartPole.reset, CartPole.step, CartPole.observe


@pytest.mark.parametrize(
    ("given", "settings"),
    [
        (CartPole(max_episode_steps=7), {}),
        (CartPole, {"max_episode_steps": 7}),
        (CartPole, {"max_episode_steps": np.int64(7)}),
    ],
)
def test_dynamics_and_their_class_are_environments_in_jax(given, settings):
    env = envs.make(given, num_envs=3, env_kwargs=settings, reset_pool=2, action_scaling="rescale")
    assert env == AutoReset(CartPole(max_episode_steps=7), 3, "rescale", reset_pool=2)


class Settable:
    """Dynamics that set their spec when they are created."""

    reset, step, observe = CartPole.reset, CartPole.step, CartPole.observe

    def __init__(self):
        self.spec = CartPole().spec


@pytest.mark.parametrize("dynamics", [Own, Settable])
def test_the_class_of_dynamics_needs_no_base_class(dynamics):
    assert isinstance(envs.make(dynamics, reset_pool=2).dynamics, dynamics)


@pytest.mark.usefixtures("unchecked")
def test_a_training_makes_an_environment_of_dynamics_and_of_their_class():
    made = AutoReset(CartPole(), 2)
    agent = PPO(made.spec, network=MLP((4,)), num_steps=8, num_epochs=1, num_minibatches=1)
    of_class, of_object, expected = (
        train.run(agent, env, env_steps=32, num_envs=count, progress=False).state
        for env, count in ((CartPole, 2), (CartPole(), 2), (made, None))
    )
    assert same_bits(of_class, expected) and same_bits(of_object, expected)


class Observing(toys.Scripted):
    """A Gymnasium environment with all members of dynamics."""

    spec = None

    def observe(self):
        return None


@pytest.mark.parametrize("library", ["mine", "gymnax.wrappers.gym", "brax.envs.wrappers.gym"])
def test_a_gymnasium_environment_with_the_members_of_dynamics_is_none_in_jax(library):
    env = envs.make(type("Wrapper", (Observing,), {"__module__": library}), num_envs=2)
    assert isinstance(env, HostEnv) and env.num_envs == 2


def test_the_class_of_an_environment_of_pettingzoo_is_told_its_conversion():
    methods = dict.fromkeys(("reset", "step", "observe"), lambda self: None)
    with pytest.raises(TypeError, match=r"got Theirs; convert a parallel environment with supersuit"):
        envs.make(type("Theirs", (), {"__module__": "pettingzoo.mine", **methods}))


class Incomplete:
    """Dynamics without observations."""

    spec = CartPole().spec
    reset, step = CartPole.reset, CartPole.step


NO_FUNCTION = "got {}; pass the environment in JAX or its class, not a function that creates it"


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"id": Own(), "env_kwargs": {"n": 3}}, TypeError, "env_kwargs must be None unless id is a name or a class in JAX"),
        ({"id": Own, "env_kwargs": {"n": 3}}, TypeError, "Own.* takes no arguments"),
        ({"id": Own, "vectorization": "sync"}, ValueError, "vectorization is for Gymnasium environments .* got 'sync'"),
        ({"id": Own, "num_envs": 2**21}, ValueError, r"num_envs must be an integer in \[1, 1048576\]"),
        ({"id": lambda: Own()}, TypeError, NO_FUNCTION.format("Own")),
        ({"id": lambda: AutoReset(Own())}, TypeError, "got AutoReset; .* and use one that make has created directly"),
        (
            {"id": Incomplete},
            TypeError,
            "Incomplete must have the methods reset, step, observe .*, has no observe$",
        ),
        ({"id": Incomplete()}, TypeError, "Incomplete must have the methods reset, step, observe .*, has no observe$"),
        ({"id": (Own, 3)}, TypeError, "a pair must have an environment, not its class, got"),
    ],
)
def test_a_wrong_argument_for_dynamics_is_an_error(arguments, error, says):
    with pytest.raises(error, match=says):
        envs.make(**arguments)


@pytest.mark.parametrize("name", ["CartPole-v1", "jax/CartPole-v1"])
def test_what_make_has_made_is_not_made_again(name):
    env = envs.make(name, num_envs=2)
    with pytest.raises(TypeError, match=r"make: id is already an environment created by make \(\S+\); use it directly"):
        envs.make(env)


def test_a_vector_environment_that_saves_itself_is_none_of_makes():
    class Saving(CartPoleVectorEnv):
        def snapshot(self):
            return None

        def restore(self, snapshot):
            pass

    assert isinstance(Saving(num_envs=2), HostEnv) and envs.make(Saving(num_envs=2)).num_envs == 2


class Called(toys.Scripted):
    """An environment that defines `__call__`."""

    def __call__(self):
        return self


class CalledVector(CartPoleVectorEnv):
    def __call__(self):
        return self


def test_an_environment_that_can_be_called_is_no_function():
    for given in (Called(), CalledVector(num_envs=2)):
        env = envs.make(given)
        assert env.num_envs in (1, 2) and source_of(env) is None
    assert source_of(envs.make(Called)).id is Called


@pytest.mark.parametrize("fault", ["raises", "other spaces", "no environment"])
def test_a_make_that_fails_closes_the_environments_that_exist(fault):
    made, closed = [], []

    class Closing(toys.Scripted):
        def close(self):
            closed.append(self)

    def make_env():
        if len(made) == 2:
            match fault:
                case "raises":
                    raise OSError("no display")
                case "no environment":
                    return 7
        made.append(Closing(n=5 if len(made) == 2 else 4))
        return made[-1]

    error = {"raises": OSError, "other spaces": ValueError, "no environment": TypeError}[fault]
    with pytest.raises(error, match=r"no display|env 2 must have the spaces of env 0|env 2 must be a gymnasium.Env"):
        envs.make(make_env, num_envs=3)
    assert closed == made and len(made) >= 2


def test_a_vectorized_form_that_make_cannot_use_is_closed(monkeypatch):
    closed = []
    monkeypatch.setattr(CartPoleVectorEnv, "close", lambda self: closed.append(self))
    with pytest.raises(ValueError, match="action_mask_key='mask' must be one of several entries"):
        envs.make("CartPole-v1", num_envs=2, action_mask_key="mask")
    assert len(closed) == 1


def test_one_environment_is_not_many():
    with pytest.raises(ValueError, match="pass a function that creates it"):
        envs.make(gymnasium.make("Pendulum-v1"), num_envs=2)
    with pytest.raises(ValueError, match="pass a function that creates it"):
        envs.make(gymnasium.make("Pendulum-v1"), vectorization="async")
    with pytest.raises(ValueError, match=r"left out for a vector environment \(it has 4 environments\), got 3"):
        envs.make(gymnasium.make_vec("CartPole-v1", num_envs=4), num_envs=3)


def without(monkeypatch, *absent):
    """As if these packages were not installed."""
    real_import, real_spec = builtins.__import__, importlib.util.find_spec

    def fake_import(name, *args, **kwargs):
        if name.split(".")[0] in absent:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real_import(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", fake_import)
    monkeypatch.setattr(importlib.util, "find_spec", lambda n, *a: None if n.split(".")[0] in absent else real_spec(n, *a))
    for name in list(sys.modules):
        if name.split(".")[0] in absent or name.startswith(("gymnasium.envs.mujoco", "gymnasium.envs.box2d")):
            monkeypatch.delitem(sys.modules, name)


@pytest.mark.parametrize(
    ("name", "packages", "extra"),
    [
        ("HalfCheetah-v5", ("mujoco",), "mujoco"),
        ("LunarLander-v3", ("Box2D",), "box2d"),
        ("ALE/Breakout-v5", ("ale_py",), "atari"),
        ("gymnax/CartPole-v1", ("gymnax",), "gymnax"),
        ("brax/ant", ("brax",), "brax"),
        ("jumanji/Snake-v1", ("jumanji",), "jumanji"),
        ("playground/CheetahRun", ("mujoco_playground",), "playground"),
        ("craftax/Craftax-Symbolic-v1", ("craftax",), "craftax"),
        ("navix/Navix-Empty-5x5-v0", ("navix",), "navix"),
        ("xminigrid/MiniGrid-Empty-5x5", ("xminigrid",), "xminigrid"),
        ("pgx/2048", ("pgx",), "pgx"),
    ],
)
def test_a_missing_extra_gives_its_pip_line(name, packages, extra, monkeypatch):
    without(monkeypatch, *packages)
    with pytest.raises(ImportError, match=rf"pip install 'polyak\[{extra}\]'"):
        envs.make(name)


def test_minatars_games_are_registered_by_their_names(tmp_path, monkeypatch):
    without(monkeypatch, "minatar")
    with pytest.raises(ImportError, match="MinAtar/Breakout-v1 needs MinAtar: pip install minatar"):
        envs.make("MinAtar/Breakout-v1")
    monkeypatch.undo()
    (tmp_path / "minatar").mkdir()
    (tmp_path / "minatar" / "__init__.py").touch()
    # As in MinAtar 1.0.15: importing it registers nothing.
    register = "lambda: gymnasium.register('MinAtar/Breakout-v1', entry_point='tests.envs.toys:Scripted')"
    (tmp_path / "minatar" / "gym.py").write_text(f"import gymnasium\nregister_envs = {register}\n")
    monkeypatch.syspath_prepend(tmp_path)
    for module in ("minatar", "minatar.gym"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    try:
        for _ in range(2):  # a second registration would warn, which is an error in tests
            assert envs.make("MinAtar/Breakout-v1", num_envs=2, import_modules=False).spec.id == "MinAtar/Breakout-v1"
    finally:
        gymnasium.registry.pop("MinAtar/Breakout-v1", None)
        for module in ("minatar", "minatar.gym"):
            sys.modules.pop(module, None)


def test_the_extras_that_errors_name_are_there():
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    assert {"mujoco", "box2d", "atari", *JAX_LIBRARIES} <= set(project["optional-dependencies"])


def test_a_name_from_a_file_imports_no_module(tmp_path, monkeypatch):
    (tmp_path / "payload_module.py").write_text("import pathlib; pathlib.Path(__file__).with_name('ran').touch()")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ValueError, match="must not import the module 'payload_module' here"):
        envs.make("payload_module:Env-v0", import_modules=False)
    assert not (tmp_path / "ran").exists()
    with pytest.raises(ValueError, match="unknown environment"):
        envs.make("payload_module:Env-v0")
    assert (tmp_path / "ran").exists()


def test_a_registered_environment_of_the_users_own_is_found_by_name():
    gymnasium.register("tests/Scripted-v0", entry_point="tests.envs.toys:Scripted")
    try:
        assert envs.make("tests/Scripted-v0", num_envs=2).spec.id == "tests/Scripted-v0"
        assert envs.make("tests.envs.toys:tests/Scripted-v0", import_modules=False).num_envs == 1
        assert "tests/Scripted-v0" in envs.names()["gymnasium"]
    finally:
        del gymnasium.registry["tests/Scripted-v0"]


def test_all_names_are_listed():
    names = envs.names()
    assert set(names) == {"jax", *JAX_LIBRARIES, "atari", "gymnasium"}
    assert {"ALE/Breakout-v5", "ALE/Pong-v5"} <= set(names["atari"]) and len(names["atari"]) > 100
    assert not [name for name in names["gymnasium"] if "Breakout" in name]
    assert names["jax"] == ["jax/CartPole-v1", "jax/Pendulum-v1", "jax/Acrobot-v1", "jax/MountainCar-v0", "jax/BitFlipping-v0"]
    assert {"CartPole-v1", "HalfCheetah-v5"} <= set(names["gymnasium"])


def test_rescaling_without_bounds_is_rejected_and_nothing_stays_open():
    closed = []

    def unbounded():
        env = toys.Faulty(on_close=lambda: closed.append(1))
        env.action_space = gymnasium.spaces.Box(-np.inf, np.inf, (2,))
        return env

    with pytest.raises(ValueError, match=r"action_scaling='rescale' needs finite bounds, got Box.*; give .*TransformAction\)$"):
        envs.make(unbounded, num_envs=3, action_scaling="rescale")
    assert closed == [1, 1, 1]


@pytest.mark.parametrize("mode", [None, "human", "rgb_array", "rgb_array_list"])
def test_render_modes_of_the_environment_and_of_gymnasiums_wrappers_are_accepted(mode):
    _check_render_mode("CartPole-v1", {"render_mode": mode}, gymnasium.spec("CartPole-v1").entry_point)


class Texts(gymnasium.Env):
    """Observations with text beside numbers, as in MiniGrid."""

    observation_space = gymnasium.spaces.Dict(
        image=gymnasium.spaces.Box(0, 255, (2, 2), np.uint8), mission=gymnasium.spaces.Text(9), way=gymnasium.spaces.Discrete(4)
    )
    action_space = gymnasium.spaces.Discrete(3)

    def obs(self):
        return {"image": np.full((2, 2), 7, np.uint8), "mission": "go", "way": 3}

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return self.obs(), {}

    def step(self, action):
        return self.obs(), 0.0, False, False, {}


def test_text_in_observations_is_rejected_with_the_way_out_if_nothing_may_be_dropped():
    with pytest.raises(TypeError, match=r"\['mission'\]: Text is not .*; wrap it with .*FilterObservation, or pass drop"):
        envs.make(Texts, drop_unsupported_obs=False)


class Mission(gymnasium.spaces.Space):
    """A space of strings that is no `Text`, as MiniGrid's."""

    def __init__(self):
        super().__init__(dtype=str)


class Missions(Texts):
    observation_space = gymnasium.spaces.Dict(dict(Texts.observation_space.spaces) | {"mission": Mission()})


@pytest.mark.parametrize("make_env", [Texts, Missions])
def test_text_in_observations_is_dropped_with_one_warning(make_env):
    with pytest.warns(UserWarning, match=r"dropped the text 'mission' from the observation of (Texts|Missions)") as warned:
        env = envs.make(make_env, num_envs=3)
    assert len(warned) == 1 and list(env.spec.obs.spaces) == ["image", "way"]
    assert env.reset(0).obs["way"].tolist() == [3, 3, 3]


def test_only_text_is_dropped_unasked():
    class Lists(Texts):
        observation_space = gymnasium.spaces.Dict(
            {
                "image": gymnasium.spaces.Box(0, 255, (2, 2), np.uint8),
                "all": gymnasium.spaces.Sequence(gymnasium.spaces.Discrete(2)),
            }
        )

    with pytest.raises(TypeError, match=r"\['all'\]: Sequence is not supported"):
        envs.make(Lists)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("id", "arguments"),
    [
        (Texts, {"num_envs": 2}),
        (Missions, {"num_envs": 2}),
        (Texts, {"num_envs": 2, "vectorization": "async"}),
        (lambda: Texts(), {"num_envs": 2}),
        ("vector", {}),
    ],
)
def test_unsupported_observations_are_dropped(id, arguments):
    if id == "vector":
        id = Through(SyncVectorEnv([Texts, Texts]))
    env = envs.make(id, drop_unsupported_obs=True, **arguments)
    try:
        assert list(env.spec.obs.spaces) == ["image", "way"]
        for time_step in (env.reset(0), env.step(np.zeros(2, int))):
            assert time_step.obs["image"].shape == (2, 2, 2) and time_step.obs["way"].tolist() == [3, 3]
    finally:
        env.close()


class NestedTexts(Texts):
    """A text beside an index, in a dict within the observation, and in a tuple."""

    observation_space = gymnasium.spaces.Dict(
        a=gymnasium.spaces.Discrete(4),
        b=gymnasium.spaces.Dict(c=gymnasium.spaces.Text(9), d=gymnasium.spaces.Discrete(4)),
        e=gymnasium.spaces.Tuple((gymnasium.spaces.Discrete(4), gymnasium.spaces.Text(9))),
    )

    def obs(self):
        return {"a": 1, "b": {"c": "go", "d": 2}, "e": (3, "go")}


@pytest.mark.parametrize("kind", ["sync", *AutoresetMode])
def test_only_the_unsupported_parts_of_a_dict_are_dropped_and_a_tuple_with_a_warning(kind):
    class Ending(NestedTexts):
        def step(self, action):
            return *super().step(action)[:2], True, False, {}

    vector = None if kind == "sync" else Through(SyncVectorEnv([Ending] * 2, autoreset_mode=kind))
    with pytest.warns(UserWarning, match="dropped the Tuple 'e' from the observation of") as warned:
        if vector is None:
            env = envs.make(Ending, num_envs=2, drop_unsupported_obs=True)
        else:
            env = envs.make(vector, drop_unsupported_obs=True)
    assert len(warned) == 1
    for time_step in (env.reset(0), *(env.step(np.zeros(2, np.int32)) for _ in range(3))):
        assert list(time_step.obs) == ["a", "b"] and list(time_step.obs["b"]) == ["d"]
        assert time_step.obs["a"].tolist() == [1, 1] and time_step.obs["b"]["d"].tolist() == [2, 2]


@pytest.mark.parametrize("mode", AutoresetMode)
def test_text_of_a_vector_environment_is_dropped_in_every_mode(mode):
    class Ending(Texts):
        def step(self, action):
            return *super().step(action)[:2], True, False, {}

    with pytest.warns(UserWarning, match="dropped the text 'mission'"):
        env = envs.make(Through(SyncVectorEnv([Ending] * 2, autoreset_mode=mode)))
    env.reset(0)
    assert env.step(np.zeros(2, np.int32)).terminated.all() and env.step(np.zeros(2, np.int32)).first.all()


def test_text_deep_in_the_observation_is_dropped_with_its_path():
    class Deep(NestedTexts):
        observation_space = gymnasium.spaces.Dict({k: v for k, v in NestedTexts.observation_space.spaces.items() if k != "e"})

    with pytest.warns(UserWarning, match="dropped the text 'b/c' from the observation of Deep"):
        assert list(envs.make(Deep).reset(0).obs["b"]) == ["d"]


def test_dropping_keeps_an_environment_whose_observations_are_supported_as_it_is():
    env = envs.make(gymnasium.make("Pendulum-v1"), drop_unsupported_obs=True)
    assert env.spec == envs.make("Pendulum-v1").spec


def test_a_function_that_returns_one_environment_twice_is_an_error():
    one = gymnasium.make("CartPole-v1")
    with pytest.raises(ValueError, match=r"the same CartPoleEnv as environments 0 and 1; create a new one in each call"):
        envs.make(lambda: one, num_envs=2)
    with pytest.raises(ValueError, match=r"the same CartPoleEnv as environments 0 and 2"):
        wrapped = iter([one, gymnasium.make("CartPole-v1"), gymnasium.wrappers.TimeLimit(one, 10)])
        envs.make(lambda: next(wrapped), num_envs=3)
    envs.make(lambda: one).close()
