"""A replay is in memory once, and one that does not fit is rejected before anything runs."""

import dataclasses
import re
from pathlib import Path

import jax
import numpy as np
import pytest

import polyak
from polyak.agents.dqn import DQN
from polyak.cli import main
from polyak.core.struct import struct
from polyak.loops import replay_memory
from polyak.loops.agent_check import check_agent_state
from polyak.loops.replay_memory import available_memory, check_memory, warn_of_other_devices
from polyak.storage.checkpoint import restore, save

LOOPS = {"compiled": polyak.loops.compiled, "host": polyak.loops.host}


def make(capacity=4096):
    env = polyak.envs.make("jax/CartPole-v1", num_envs=2)
    return polyak.DQN(
        env.spec, network=polyak.MLP((4,)), replay=polyak.UniformReplay(capacity), learning_starts=16, batch_size=8
    ), env


@pytest.mark.parametrize("key", [jax.random.PRNGKey(0), jax.random.key(0, impl="rbg")])
def test_a_state_that_has_a_key_of_any_kind_is_of_its_agent(key):
    agent, _ = make()
    agent = dataclasses.replace(agent, reset_period=1_000)
    check_agent_state("state", agent, agent.init(key), key)
    with pytest.raises(ValueError, match="its 'resets' is missing, expected None"):
        check_agent_state("state", make()[0], agent.init(key), key)


def test_a_state_of_an_agent_whose_init_reads_numbers_is_not_compared():
    @struct(kw_only=True)
    class Reads(DQN):
        def init(self, key):
            assert jax.random.uniform(key) < 1
            return super().init(key)

    agent = Reads(**{field.name: getattr(make()[0], field.name) for field in dataclasses.fields(DQN)})
    check_agent_state("state", agent, agent.init(jax.random.key(0)), jax.random.key(0))


def test_a_rollout_that_does_not_fit_names_num_envs_and_num_steps(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert (
        main(["train", "ppo", "jax/CartPole-v1", "--num-envs", "1000000", "--num-steps", "4096", "--num-minibatches", "4096"])
        == 2
    )
    said = capsys.readouterr().err
    # Four floats, a reward and three flags at each of 4,097 times, and 4,096 actions.
    wanted = f"{1_000_000 * (4097 * 23 + 4096 * 4):,}"
    assert f"num_steps=4096 steps of num_envs=1000000 environments needs at least {wanted} bytes, this machine has" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("train", [polyak.loops.compiled, polyak.loops.host, polyak.loops.compiled_seeds, polyak.train.run])
def test_every_loop_refuses_a_rollout_that_does_not_fit(train, monkeypatch):
    monkeypatch.setattr(replay_memory, "available_memory", lambda: 1000)
    env = polyak.envs.make("jax/CartPole-v1", num_envs=2)
    keys = (
        {"keys": jax.random.split(jax.random.key(0), 2)} if train is polyak.loops.compiled_seeds else {"key": jax.random.key(0)}
    )
    with pytest.raises(ValueError, match=r"train: a rollout of num_steps=64 steps of num_envs=2 environments needs at least"):
        train(polyak.PPO(env.spec, num_steps=64, num_minibatches=1), env, env_steps=128, **keys)


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_the_loop_uses_the_arrays_that_init_made(loop, monkeypatch):
    agent, env = make()
    made, real = [], DQN.init

    def init(self, key):
        state = real(self, key)
        if not isinstance(state.replay.rows.obs, jax.core.Tracer):
            made.append(state.replay.rows.obs.unsafe_buffer_pointer())
        return state

    monkeypatch.setattr(DQN, "init", init)
    result = LOOPS[loop](agent, env, env_steps=64, key=jax.random.key(0))
    assert made == [result.state.replay.rows.obs.unsafe_buffer_pointer()], "copied, or not updated in place"


@pytest.mark.slow
@pytest.mark.parametrize(("loop", "devices"), [("compiled", 1), ("compiled", 2), ("host", 1)])
def test_a_donated_state_is_not_copied_and_gives_the_same_bits(loop, devices):
    agent, env = make()
    key = jax.random.key(0)
    if loop == "host":
        env = polyak.envs.make("CartPole-v1", num_envs=2)
    half = LOOPS[loop](agent, env, env_steps=64, key=key, devices=devices)
    snapshot = env.snapshot() if loop == "host" else None

    def resume(**options):
        if snapshot is not None:
            env.restore(snapshot)
        done = half.progress.env_steps
        return LOOPS[loop](
            agent, env, env_steps=128, key=key, devices=devices, resume_from=half.loop_state, env_steps_done=done, **options
        )

    copied = resume()
    donated = resume(donate=True)
    for ours, theirs in zip(jax.tree.leaves(donated.state), jax.tree.leaves(copied.state), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert half.state.replay.rows.obs.is_deleted() and not jax.tree.leaves(half.state.copies)[0].is_deleted()


def test_a_replay_of_another_number_of_devices_is_warned_of():
    agent, _ = make()
    state = agent.init(jax.random.key(0))
    warn_of_other_devices(agent, state, num_envs=2, devices=2)
    slots_envs_and_steps = np.array([2048, 2, 1], np.uint32)
    state = dataclasses.replace(state, replay=dataclasses.replace(state.replay, layout=slots_envs_and_steps))
    warn_of_other_devices(agent, state, num_envs=2, devices=1)
    with pytest.warns(UserWarning, match="resume_from has a replay of devices=1; with devices=2 it starts empty"):
        warn_of_other_devices(agent, state, num_envs=2, devices=2)


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_a_state_goes_on_with_other_devices_and_an_empty_replay(loop, tmp_path):
    """A checkpoint's arrays are on one device, whatever the layout of the replay's rows."""
    agent, env = make()
    key, done = jax.random.key(0), 0
    env = env if loop == "compiled" else polyak.envs.make("CartPole-v1", num_envs=2)
    agent = dataclasses.replace(agent, learning_starts=48)

    def go_on(devices, env_steps, state):
        options = {"resume_from": state, "env_steps_done": done, "devices": devices}
        return LOOPS[loop](agent, env, env_steps=done + env_steps, key=key, **options)

    result = go_on(1, 64, None)
    assert int(result.state.updates) > 0
    for devices, before in ((2, 1), (1, 2)):
        done, updates = result.progress.env_steps, int(result.state.updates)
        save(tmp_path / str(devices), result.loop_state, step=done, meta={})
        message = f"resume_from has a replay of devices={before}; with devices={devices} it starts empty, and learning waits"
        for state in (result.loop_state, restore(tmp_path / str(devices), result.loop_state).tree):
            with pytest.warns(UserWarning, match=message):
                result = go_on(devices, 32, state)
            assert int(result.state.updates) == updates and 16 <= int(result.state.replay.size) <= 20
            assert {len(leaf.devices()) for leaf in jax.tree.leaves(result.loop_state)} == {devices}
        done = result.progress.env_steps
        result = go_on(devices, 32, result.loop_state)
        assert int(result.state.updates) > updates


def test_a_replay_that_does_not_fit_is_rejected_with_the_bytes_before_anything_runs(tmp_path, capsys, monkeypatch):
    # The largest capacity would fit into a large machine.
    there_is = replay_memory.available_memory
    monkeypatch.setattr(replay_memory, "available_memory", lambda: min(there_is(), 10**10))
    agent, env = make(capacity=2 * 10**9)
    hosted = polyak.envs.make("CartPole-v1", num_envs=2)
    message = r"train: the replay of DQN needs ([\d,]+) bytes, this machine has ([\d,]+) available; use a smaller capacity"
    starts = (
        lambda: polyak.train.run(agent, env, env_steps=64, run_dir=tmp_path / "run", progress=False),
        lambda: polyak.loops.compiled(agent, env, env_steps=64, key=jax.random.key(0)),
        lambda: polyak.loops.host(agent, hosted, env_steps=64, key=jax.random.key(0)),
        lambda: polyak.loops.compiled_seeds(agent, env, env_steps=64, keys=jax.random.split(jax.random.key(0), 2)),
    )
    for i, start in enumerate(starts):
        with pytest.raises(ValueError, match=message) as error:
            start()
        needed, available = (int(text.replace(",", "")) for text in re.search(message, str(error.value)).groups())
        # 4 floats, an action, a reward and three flags a row, for each of the seeds.
        assert needed // (2 * 10**9) == 27 * (2 if i == 3 else 1) and 0 < available <= 10**10
    flags = "--capacity 2000000000 --env-steps 64"
    for seeds in ("", " --seeds 2"):
        assert main(f"train dqn jax/CartPole-v1 --run-dir {tmp_path / 'run'} {flags}{seeds}".split()) == 2
        assert re.search(message, capsys.readouterr().err)
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
def test_a_run_whose_replay_no_longer_fits_is_rejected_and_unchanged(tmp_path, monkeypatch):
    agent, env = make()
    polyak.train.run(agent, env, env_steps=64, run_dir=tmp_path / "run", progress=False)
    files = {path: path.read_bytes() for path in (tmp_path / "run/checkpoints").rglob("*") if path.is_file()}
    monkeypatch.setattr(replay_memory, "available_memory", lambda: 1000)
    with pytest.raises(ValueError, match="this machine has 1,000 available"):
        polyak.resume(tmp_path / "run", env_steps=128)
    assert files == {path: path.read_bytes() for path in (tmp_path / "run/checkpoints").rglob("*") if path.is_file()}


def test_an_agent_without_a_replay_is_not_measured(monkeypatch):
    monkeypatch.setattr(replay_memory, "available_memory", lambda: 0)
    check_memory(polyak.PPO(polyak.envs.make("jax/CartPole-v1", num_envs=2).spec))


def system(root, files):
    for name, text in {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   8000 kB\n", **files}.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


VERSION_2 = {
    "proc/self/cgroup": "0::/user/job\n",
    "sys/fs/cgroup/user/memory.max": "5000000\n",
    "sys/fs/cgroup/user/memory.current": "2000000\n",
    "sys/fs/cgroup/user/memory.stat": "anon 1\ninactive_file 500000\n",
    "sys/fs/cgroup/user/job/memory.max": "max\n",
    "sys/fs/cgroup/user/job/memory.current": "1000000\n",
    "sys/fs/cgroup/user/job/memory.stat": "anon 1\n",
}
VERSION_1 = {
    "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/docker/abc\n0::/\n",
    # As seen in a container: its own group is the top.
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "3000000\n",
    "sys/fs/cgroup/memory/memory.usage_in_bytes": "1000000\n",
    "sys/fs/cgroup/memory/memory.stat": "total_inactive_file 250000\n",
}


@pytest.mark.parametrize(
    ("files", "available"),
    [
        ({}, 8_192_000),
        (VERSION_2, 3_500_000),
        (VERSION_1, 2_250_000),
        ({**VERSION_1, "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n"}, 8_192_000),
        ({**VERSION_2, "sys/fs/cgroup/user/memory.current": "6000000\n"}, 0),
    ],
)
def test_available_memory_is_the_machines_or_what_its_group_leaves(files, available, tmp_path):
    assert available_memory(system(tmp_path, files)) == available


def test_available_memory_is_unknown_where_there_is_no_proc(tmp_path):
    assert available_memory(tmp_path) is None
    if Path("/proc/meminfo").exists():
        assert 10**6 < available_memory() < 10**14
