"""Several seeds, or settings, at once: the numbers of single runs, on one device or several."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak import loops
from polyak.loops import seeds_loop
from tests.agents.rollouts import same_bits
from tests.loops.setting import AGENT, ENV, KEY, everything, run

pytestmark = pytest.mark.usefixtures("unchecked")


def assert_close(one, other):
    for a, b in zip(jax.tree.leaves(everything(one)), jax.tree.leaves(everything(other)), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-6)


@pytest.mark.slow
def test_seeds_trained_together_are_those_trained_alone_but_for_rounding():
    keys = jax.random.split(KEY, 2)
    reported = [[], []]
    callbacks = [[lambda progress, *_, mine=mine: mine.append(progress)] for mine in reported]
    together = loops.compiled_seeds(AGENT, ENV, env_steps=90, keys=keys, callbacks=callbacks, report_every=60)
    for key, result, mine in zip(keys, together, reported, strict=True):
        alone = run("compiled", env_steps=90, key=key)
        assert result.progress.env_steps == alone.progress.env_steps == mine[-1].env_steps and len(mine) == 2
        for a, b in zip(jax.tree.leaves(everything(alone)), jax.tree.leaves(everything(result)), strict=True):
            np.testing.assert_allclose(a, b, atol=1e-6, rtol=1e-6)
    half = together[1]
    finished = run("compiled", env_steps=150, resume_from=half.loop_state, env_steps_done=half.progress.env_steps)
    assert finished.progress.iteration > half.progress.iteration


@pytest.mark.slow
def test_a_seed_that_has_reached_env_steps_is_not_stopped_by_a_request(monkeypatch):
    monkeypatch.setattr(seeds_loop, "CHUNK_SECONDS", 0.0)  # one iteration in each chunk

    def trained(env_steps):
        chunks, keys = iter(range(17)), jax.random.split(KEY, 2)
        should_stop = lambda: next(chunks) == 16  # noqa: E731
        return loops.compiled_seeds(AGENT, ENV, env_steps=env_steps, keys=keys, devices=1, should_stop=should_stop)

    done = [result.progress.env_steps for result in trained(10_000)]
    assert done[0] != done[1]
    assert [result.stopped for result in trained(max(done))] == [None if x == max(done) else "request" for x in done]


@pytest.mark.slow
def test_states_that_callbacks_of_seeds_keep_stay_as_they_were():
    kept, copies = [], []

    def keep(progress, metrics, state):
        kept.append(state)
        copies.append(jax.tree.map(np.array, state.agent))

    loops.compiled_seeds(AGENT, ENV, env_steps=200, keys=jax.random.split(KEY, 2), callbacks=[[keep]] * 2, report_every=60)
    assert len(kept) >= 6
    assert all(same_bits(state.agent, copy) for state, copy in zip(kept, copies, strict=True))


def test_callbacks_and_keys_of_different_lengths_are_rejected():
    with pytest.raises(ValueError, match=r"len\(callbacks\)=2 must equal len\(keys\)=3"):
        loops.compiled_seeds(AGENT, ENV, env_steps=90, keys=jax.random.split(KEY, 3), callbacks=[[], []])


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_each_agent_of_a_batch_trains_as_it_does_alone(devices):
    # Small rates: Adam makes the rounding of a gradient near 0 a share of its step, 1.2e-6 at 1e-2 on some processors.
    settings = [(0.9, 3e-3, 0.0), (0.99, 1e-3, 0.01)]
    agents = [dataclasses.replace(AGENT, gamma=g, learning_rate=polyak.Linear(rate), ent_coef=c) for g, rate, c in settings]
    batch = jax.tree.map(lambda *values: jnp.stack(values), *agents)
    keys = jax.random.split(KEY, 2)
    results = loops.compiled_seeds(batch, ENV, env_steps=90, keys=keys, devices=devices)
    for agent, key, result in zip(agents, keys, results, strict=True):
        assert_close(result, run("compiled", agent=agent, env_steps=90, key=key))
        np.testing.assert_allclose(jax.tree.leaves(result.agent), jax.tree.leaves(agent), rtol=1e-6)
        result.agent.policy(result.state).predict(np.zeros(4, np.float32))


@pytest.mark.slow
def test_a_batch_may_be_made_by_vmap_and_share_other_settings():
    rates = jnp.array([1e-2, 1e-3])
    mapped = jax.vmap(lambda rate: dataclasses.replace(AGENT, learning_rate=rate))(rates)
    partly = dataclasses.replace(AGENT, learning_rate=rates)
    keys = jnp.stack([KEY, KEY])
    for batch in (mapped, partly):
        results = loops.compiled_seeds(batch, ENV, env_steps=90, keys=keys)
        assert [float(result.agent.learning_rate) for result in results] == pytest.approx([1e-2, 1e-3])
        assert results[0].metrics["train/learning_rate"] == pytest.approx(1e-2)
        assert not same_bits(results[0].state.copies.online, results[1].state.copies.online)


@pytest.mark.parametrize(
    ("make", "values", "message"),
    [
        (lambda x: dataclasses.replace(AGENT, gamma=x), [0.9, 1.5], r"PPO: gamma must be a number in \[0, 1\], got .*1\.5"),
        (
            lambda x: dataclasses.replace(AGENT, learning_rate=polyak.Linear(x)),
            [1e-3, np.nan],
            r"PPO: learning_rate\.start .*nan",
        ),
        (lambda x: polyak.DQN(AGENT.spec, tau=x), [0.5, 1.5], r"DQN: tau must be a number in \(0, 1\], got .*1\.5"),
        (lambda x: polyak.DQN(AGENT.spec, tau=x), [0.5, np.nan], "DQN: tau must be a number in .* got .*nan"),
    ],
)
def test_a_wrong_setting_of_an_agent_made_by_vmap_is_rejected_by_name(make, values, message):
    batch = jax.vmap(make)(jnp.array(values))
    with pytest.raises(ValueError, match=message) as error:
        loops.compiled_seeds(batch, ENV, env_steps=90, keys=jax.random.split(KEY, 2))
    assert error.value.__notes__ == ["in agent 1 of the batch"]


def test_a_batch_of_another_length_than_the_keys_is_rejected_by_name():
    batch = dataclasses.replace(AGENT, gamma=jnp.array([0.9, 0.95, 0.99]))
    with pytest.raises(ValueError, match=r"train: gamma of the batch of agents must have len\(keys\)=2 values, got 3"):
        loops.compiled_seeds(batch, ENV, env_steps=90, keys=jax.random.split(KEY, 2))


@pytest.mark.slow
def test_seeds_on_more_devices_are_those_on_one_but_for_rounding():
    keys = jax.random.split(KEY, 4)
    # One seed a device, which is the default, is in the tests above.
    one, two = (loops.compiled_seeds(AGENT, ENV, env_steps=200, keys=keys, devices=devices) for devices in (1, 2))
    for a, b in zip(one, two, strict=True):
        assert a.progress.env_steps == b.progress.env_steps
        assert_close(a, b)
        # Also of a seed whose device was done before the others were.
        names = {name for name in a.metrics if name.startswith("train/")}
        assert names and a.metrics.keys() == b.metrics.keys()
        for name in names:
            np.testing.assert_allclose(a.metrics[name], b.metrics[name], rtol=1e-4, atol=1e-6, err_msg=name)
    assert {len(x.devices()) for x in jax.tree.leaves(two[1].loop_state)} == {1}


def test_devices_that_do_not_divide_the_seeds_are_rejected():
    with pytest.raises(ValueError, match=r"train: len\(keys\)=3 cannot be split over devices=2"):
        loops.compiled_seeds(AGENT, ENV, env_steps=90, keys=jax.random.split(KEY, 3), devices=2)
