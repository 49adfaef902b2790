"""Devices and threads of a training."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import polyak
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.train.devices import THREADS, choose_threads, count_devices, is_jax_started, start_jax
from tests.cli.processes import edit_config, environment

SPEC = EnvSpec(Box(np.full(3, -1.0), np.full(3, 1.0)), Discrete(2))
WIDE = EnvSpec(Box(np.full(257, -1.0), np.full(257, 1.0)), Discrete(2))
IMAGES = EnvSpec(Box(np.zeros((36, 36, 1)), np.full((36, 36, 1), 255.0), dtype=np.uint8), Discrete(2))


@pytest.mark.parametrize(
    ("devices", "num_minibatches", "spec", "network", "small"),
    [
        (1, 8, SPEC, None, True),
        (1, 7, SPEC, None, False),
        (2, 1, SPEC, None, True),
        (1, 8, SPEC, polyak.MLP((128, 128), head=polyak.PolicyAndValue()), True),
        (1, 8, SPEC, polyak.MLP((256, 256), head=polyak.PolicyAndValue()), False),
        (1, 32, SPEC, polyak.MLP((256, 256), head=polyak.PolicyAndValue()), True),
        (1, 8, SPEC, polyak.MLP((257,), head=polyak.PolicyAndValue()), False),
        (1, 8, SPEC, polyak.MLP((4,), head=polyak.PolicyAndValue(value_hidden=(257,))), False),
        (1, 8, SPEC, polyak.MLP((), head=polyak.PolicyAndValue()), True),
        (1, 8, SPEC, polyak.LSTM(head=polyak.PolicyAndValue()), True),
        (1, 8, SPEC, polyak.LSTM(257, head=polyak.PolicyAndValue()), False),
        (1, 8, WIDE, None, False),
        (1, 8, IMAGES, None, False),
    ],
)
def test_products_are_small_with_few_rows_narrow_layers_and_no_images(devices, num_minibatches, spec, network, small):
    # 7 * 256 rows and more.
    agent = polyak.PPO(spec, network=network, num_steps=256, num_minibatches=num_minibatches)
    assert agent.prefers_single_thread(8, devices) is small


@pytest.mark.parametrize(
    ("network", "microbatch_size", "small"),
    [
        (None, 64, True),
        (None, 512, False),
        (polyak.GRU(head=polyak.PolicyAndValue()), 1, True),
        (polyak.GRU(head=polyak.PolicyAndValue()), 2, False),
    ],
)
def test_products_are_small_where_microbatches_are(network, microbatch_size, small):
    # With a memory they are counted in sequences.
    agent = polyak.PPO(SPEC, network=network, num_steps=256, num_minibatches=1, microbatch_size=microbatch_size)
    assert agent.prefers_single_thread(8, 1) is small


def test_products_of_networks_of_action_values_are_small_too():
    spec = polyak.envs.make("jax/CartPole-v1", num_envs=1).spec
    assert polyak.DQN(spec).prefers_single_thread(8, 1)
    assert not polyak.DQN(spec, network=polyak.MLP((257,))).prefers_single_thread(8, 1)
    pendulum = polyak.envs.make("jax/Pendulum-v1", num_envs=1, action_scaling="rescale").spec
    assert not polyak.SAC(pendulum).prefers_single_thread(8, 1)  # 256 transitions, layers of 256 units
    assert polyak.SAC(pendulum, batch_size=64).prefers_single_thread(8, 1)
    assert not polyak.SAC(pendulum, batch_size=64, critics=polyak.Critics((512,))).prefers_single_thread(8, 1)


@pytest.mark.parametrize(("length", "small"), [(16, True), (17, False)])
def test_products_of_sequences_are_small_where_all_their_steps_are(length, small):
    settings = {"replay": polyak.SequenceReplay(1_000, length), "batch_size": 16}
    cartpole = polyak.envs.make("jax/CartPole-v1", num_envs=1).spec
    for cls in (polyak.DQN, polyak.BC):
        assert cls(cartpole, network=polyak.GRU(), **settings).prefers_single_thread(8, 1) is small
    pendulum = polyak.envs.make("jax/Pendulum-v1", num_envs=1, action_scaling="rescale").spec
    networks = {"actor": polyak.GRU(head=polyak.Actor(())), "critics": polyak.GRU(head=polyak.Critics(()))}
    assert polyak.SAC(pendulum, **networks, **settings).prefers_single_thread(8, 1) is small


@pytest.fixture
def jax_not_started(monkeypatch):
    """As in a process in which JAX has not started; nobody has said how many threads."""
    monkeypatch.setattr("polyak.train.devices.is_jax_started", lambda: False)
    monkeypatch.delenv(THREADS, raising=False)


def test_one_thread_per_device_for_small_products_unless_the_user_sets_the_number(jax_not_started, monkeypatch):
    small, large = (polyak.PPO(SPEC, num_minibatches=n) for n in (32, 1))
    assert [choose_threads(small, devices, 8) for devices in (1, 2)] == [1, 2]
    monkeypatch.setattr("os.sched_getaffinity", lambda process: range(5))
    assert [choose_threads(large, 1, 8), choose_threads(small, 1, 8, parallel_seeds=3)] == [5, 5]
    for said, used in (("3", 3), ("0", 1), ("all", 1), ("100000", 1)):
        monkeypatch.setenv(THREADS, said)
        assert choose_threads(small, 1, 8) == used


def test_threads_follow_the_devices_that_are_used(jax_not_started, command, monkeypatch):
    # 64 minibatches of one row cannot be shared by two devices, so one is used.
    monkeypatch.setattr("polyak.cli.new_run.start_jax", lambda threads: pytest.exit(f"{threads}"))
    with pytest.raises(pytest.exit.Exception, match=r"^1$"):
        command("train ppo jax/CartPole-v1 --num-envs 64 --num-minibatches 64 --num-steps 1")


def test_threads_are_fixed_once_jax_has_started():
    jax.local_devices()
    assert is_jax_started()
    assert choose_threads(polyak.PPO(SPEC), 1, 8) is None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "error"),
    [
        ("train ppo CartPole-v1 --run-dir new", AssertionError()),
        ("resume run --env-steps 800", RuntimeError("No backend 'abacus' (set JAX_PLATFORMS='')")),
        ("evaluate run", AssertionError()),
        ("export run --format numpy", AssertionError()),
    ],
)
def test_a_platform_that_is_not_there_is_named(words, error, run, command, monkeypatch):
    """JAX raises one of these, as it knows the platform or not."""

    def start():
        raise error

    monkeypatch.setattr(jax, "local_device_count", start)
    code, _, err = command(words)
    assert code == 2
    reason = ": No backend 'abacus'" if str(error) else ""
    assert err == f"error: JAX does not start with JAX_PLATFORMS=cpu{reason}; unset JAX_PLATFORMS, or set it to cpu\n"
    assert not Path("new").exists()


def test_where_no_platform_is_named_the_cpu_is_the_way_out(monkeypatch):
    def start():
        raise RuntimeError("No GPU answers")

    monkeypatch.setattr(jax, "local_device_count", start)
    # Another text among JAX's options, which is empty.
    monkeypatch.setattr("polyak.train.devices.PLATFORMS", "jax_debug_log_modules")
    with pytest.raises(ValueError, match=r"^JAX does not start: No GPU answers; set JAX_PLATFORMS=cpu to use the CPU$"):
        count_devices()


@pytest.mark.parametrize("before", [None, "5"])
def test_the_environment_variable_is_restored(before, monkeypatch):
    monkeypatch.delenv(THREADS, raising=False) if before is None else monkeypatch.setenv(THREADS, before)
    seen = []
    monkeypatch.setattr(jax, "local_device_count", lambda: seen.append(os.environ.get(THREADS)) or 4)
    assert [start_jax(2), start_jax(None)] == [4, 4]
    assert seen == ["2", None]
    assert os.environ.get(THREADS) == before


@pytest.mark.slow
def test_threads_are_chosen_before_jax_starts(trained, tmp_path):
    # Afterwards it would be too late, without a word. Each command has a fork of one process that has imported polyak.
    program = """
import jax, os, sys
from polyak.cli import new_run, resume, train
from polyak.train.devices import is_jax_started

def started(threads):
    print("started:", threads, max(1, jax.config.jax_num_cpu_devices), is_jax_started())
    raise SystemExit(0)

new_run.start_jax = resume.start_jax = started
for line in sys.argv[1:]:
    child = os.fork()
    if child == 0:
        command, *arguments = line.split()
        {"train": train.train, "resume": resume.resume}[command](arguments)
    assert os.waitpid(child, 0)[1] == 0, line
"""
    shutil.copytree(trained, tmp_path / "run")
    # null where the tests before have started JAX.
    threads = json.dumps(json.loads((tmp_path / "run/config.json").read_text())["threads"])
    edit_config(tmp_path / "run", f'"threads": {threads}', '"threads": 3')
    cores = len(os.sched_getaffinity(0))
    commands = {
        "train ppo CartPole-v1": (1, 1),
        "train ppo_kl jax/CartPole-v1 --num-envs 64 --l2-policy 0.1": (2, 2),
        "train ppo ALE/Breakout-v5": (max(2, cores), 2),
        "train ppo ALE/Breakout-v5 --num-envs 1": (cores, 1),
        "resume run --env-steps 800": (3, 1),
    }
    done = subprocess.run(
        [sys.executable, "-c", program, *commands],
        # A fork must not leave threads of BLAS behind.
        env={name: value for name, value in environment().items() if name != THREADS} | {"OPENBLAS_NUM_THREADS": "1"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("started: ")]
    assert found == [f"started: {threads} {devices} False" for threads, devices in commands.values()], done.stderr
    assert (done.returncode, done.stderr) == (0, "")
