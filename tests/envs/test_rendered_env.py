"""The environment of a video: one copy of the training's, with images."""

import os
import subprocess

import gymnasium
import pytest
from gymnasium.envs.classic_control import CartPoleEnv

import polyak
from polyak.dynamics import opengl
from polyak.envs.rendered_env import make_rendered, single_copy, takes_render_mode
from polyak.envs.source import EnvSource, source_of


def make_pole(*, render_mode=None):
    return gymnasium.wrappers.TimeLimit(gymnasium.make("CartPole-v1", render_mode=render_mode), 7)


@pytest.mark.parametrize("target", ["CartPole-v1", make_pole, CartPoleEnv])
def test_a_training_environment_is_created_again_with_images(target):
    made = make_rendered(source_of(polyak.envs.make(target, num_envs=3)))
    made.reset(0)
    image, fps = made.render()
    assert made.num_envs == 1 and image.shape == (400, 600, 3) and fps == 50


def test_a_repeated_action_takes_the_time_of_its_repetitions():
    def make_one(render_mode):
        env = gymnasium.make("CartPole-v1", render_mode=render_mode)
        return gymnasium.wrappers.MaxAndSkipObservation(env, 2)

    env = make_rendered(EnvSource(make_one, {}))
    env.reset(0)
    assert env.render()[1] == 25


def test_an_environment_without_images_is_named():
    for target in (lambda: gymnasium.make("CartPole-v1"), "GymV21Environment-v0"):
        with pytest.raises((ValueError, ImportError, TypeError)):
            make_rendered(EnvSource(target, {})).render()

    class NotDrawn(type(gymnasium.make("Pendulum-v1").unwrapped)):
        render = gymnasium.Env.render

    with pytest.raises(ValueError, match=r"NotDrawn draws no images: its render\(\) is not implemented"):
        make_rendered(EnvSource(NotDrawn, {})).render()
    assert not takes_render_mode(lambda: None) and takes_render_mode(make_pole) and takes_render_mode(lambda **all: None)


def test_a_jax_environment_has_one_copy():
    env = polyak.envs.make("jax/CartPole-v1", num_envs=4)
    assert single_copy(env).num_envs == 1 and make_rendered(source_of(env)).num_envs == 1


def without_display(monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "MUJOCO_GL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("target", "kwargs", "camera"),
    [
        ("HalfCheetah-v5", {}, 0),
        ("HalfCheetah-v5", {"camera_id": -1}, -1),
        ("InvertedPendulum-v5", {}, -1),  # has no camera
    ],
)
def test_the_camera_follows_a_robot(monkeypatch, target, kwargs, camera):
    pytest.importorskip("mujoco")
    from gymnasium.envs.mujoco.mujoco_rendering import MujocoRenderer

    renderers, create = [], MujocoRenderer.__init__
    monkeypatch.setattr(
        MujocoRenderer, "__init__", lambda self, *args, **options: (renderers.append(self), create(self, *args, **options))[1]
    )
    monkeypatch.setattr("polyak.envs.rendered_env.choose_opengl", lambda: None)
    make_rendered(EnvSource(target, {"env_kwargs": kwargs})).close()
    assert renderers[-1].camera_id == camera


@pytest.mark.parametrize(("working", "chosen"), [(("egl", "osmesa"), "egl"), (("osmesa",), "osmesa")])
def test_mujoco_draws_with_what_works_without_a_display(monkeypatch, working, chosen):
    pytest.importorskip("mujoco")
    without_display(monkeypatch)
    monkeypatch.setattr(opengl, "_works", working.__contains__)
    opengl.choose_opengl()
    assert os.environ["MUJOCO_GL"] == chosen
    # A person's own choice stays.
    monkeypatch.setenv("MUJOCO_GL", "glfw")
    opengl.choose_opengl()
    assert os.environ["MUJOCO_GL"] == "glfw"


def test_the_error_names_the_libraries_of_which_mujoco_needs_one(monkeypatch):
    pytest.importorskip("mujoco")
    without_display(monkeypatch)
    monkeypatch.setattr(opengl, "_works", lambda library: False)
    with pytest.raises(RuntimeError, match=r"there is no display, and neither EGL nor OSMesa works; .* apt install libegl1"):
        opengl.choose_opengl()
    monkeypatch.setenv("DISPLAY", ":0")
    opengl.choose_opengl()
    assert "MUJOCO_GL" not in os.environ


def test_a_library_is_tried_in_another_process(monkeypatch):
    tried = []
    monkeypatch.setattr(
        subprocess, "run", lambda command, **_: tried.append(command) or subprocess.CompletedProcess(command, 1)
    )
    opengl._works.cache_clear()
    assert not opengl._works("egl") and "mujoco.egl" in tried[0][-1]
    opengl._works.cache_clear()
