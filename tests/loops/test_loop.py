"""What all loops share: keys, targets, meshes."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak import loops
from polyak.core.struct import static, struct
from polyak.loops.loop import (
    Target,
    env_reset_key,
    env_step_key,
    initial,
    iteration_keys,
    mesh_over,
    run_env_key,
)
from tests.loops.setting import AGENT, ENV, KEY, run


def words(keys):
    return [tuple(np.ravel(key)) for key in np.asarray(jax.random.key_data(keys))]


def test_no_key_is_used_twice():
    all_keys = [env_reset_key(run_env_key(KEY)), *jax.random.split(KEY, 3)]
    seen = [tuple(np.asarray(jax.random.key_data(key))) for key in all_keys]
    acting = []
    for iteration in range(5):
        keys = iteration_keys(KEY, jnp.uint32(iteration), 8)
        seen += [*words(keys.env), tuple(np.asarray(jax.random.key_data(keys.update)))]
        acting += words(jax.vmap(jax.random.fold_in, (None, 0))(keys.act, jnp.arange(8, dtype=jnp.uint32)))
    assert len(set(seen)) == len(seen) == 4 + 5 * 9
    assert len(set(acting)) == len(acting) == 40


def test_the_environments_keys_follow_its_own_count_of_steps():
    env_key = run_env_key(KEY)
    by_iteration = [words(iteration_keys(KEY, jnp.uint32(i), 4).env) for i in range(3)]
    by_number = [tuple(np.asarray(jax.random.key_data(env_step_key(env_key, number)))) for number in range(12)]
    assert list(itertools.chain(*by_iteration)) == by_number


def test_the_minibatches_of_two_iterations_are_not_alike():
    updates = [iteration_keys(KEY, jnp.uint32(i), 4).update for i in range(2)]
    assert not np.array_equal(*(jax.random.permutation(key, 32) for key in updates))


@pytest.mark.parametrize(("name", "dtype"), [("terminated", jnp.int32), ("first", jnp.float32), ("reward", jnp.int32)])
def test_flags_or_rewards_of_another_dtype_are_rejected_by_name(name, dtype):
    time_step = ENV.init(KEY)[1]
    time_step = dataclasses.replace(time_step, **{name: getattr(time_step, name).astype(dtype)})
    with pytest.raises(TypeError, match=rf"environment's time_step\.{name} must have dtype \w+ .*, got {dtype.__name__}"):
        initial(AGENT, ENV.num_envs, KEY, (), time_step)


def test_flags_or_rewards_of_another_shape_are_rejected_by_name():
    time_step = ENV.init(KEY)[1]
    time_step = dataclasses.replace(time_step, reward=time_step.reward[:, None])
    with pytest.raises(ValueError, match=r"environment's time_step\.reward must have shape \((\d+),\), got \(\1, 1\)"):
        initial(AGENT, ENV.num_envs, KEY, (), time_step)


@struct
class Changing:
    """An environment that is no AutoReset, and whose step hands out another type of this."""

    what: str = static()
    num_envs: int = static(default=ENV.num_envs)

    @property
    def spec(self):
        return ENV.spec

    def init(self, key):
        return ENV.init(key)

    def step(self, state, action, key):
        state, time_step = ENV.step(state, action, key)
        if self.what == "state":
            return {"state": state}, time_step
        return state, dataclasses.replace(time_step, reward=time_step.reward[:, None])


@pytest.mark.parametrize(
    ("what", "says"),
    [
        ("state", r"step\(\) changes the tree of the state: .* is gone"),
        ("reward", r"step\(\) changes the time step\.reward from float32\[(\d+)\] to float32\[\1, 1\]; it must keep its shape"),
    ],
)
def test_environment_that_changes_its_types_is_rejected_before_compilation(what, says):
    with pytest.raises(TypeError, match=says):
        loops.compiled(AGENT, Changing(what), env_steps=100, key=KEY)


@pytest.mark.parametrize(
    ("target", "done", "due"),
    [
        (Target(1000, 100), 0, 100),
        (Target(1000, 100), 99, 100),
        (Target(1000, 100), 100, 200),
        (Target(1000, 100), 350, 400),
        (Target(1000, 300), 950, 1000),
        (Target(1000), 0, 10),
        (Target(7), 0, 1),
        (Target(1000, 5000), 0, 1000),
    ],
)
def test_a_report_falls_due_at_the_next_multiple(target, done, due):
    assert target.next_report(done) == due


def test_mesh_has_the_requested_number_of_devices():
    assert mesh_over(1, 5) is None and mesh_over(4, 8).size == 4
    with pytest.raises(ValueError, match=r"devices=16, but JAX sees 8; on a CPU call .*jax_num_cpu_devices"):
        mesh_over(16, 16)
    with pytest.raises(ValueError, match="num_envs=6 cannot be split over devices=4"):
        mesh_over(4, 6)


def test_completed_training_returns_at_once():
    result = run("compiled", env_steps=60)
    again = run("compiled", env_steps=60, resume_from=result.loop_state, env_steps_done=result.progress.env_steps)
    assert again.stopped is None and again.progress.env_steps == result.progress.env_steps and again.progress.fps == 0
    assert AGENT.policy(again.state).predict(np.zeros(4))[0] in (0, 1) and ENV.num_envs == 4
