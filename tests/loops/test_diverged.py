"""Environments that hand out NaN: what reaches callbacks and checkpoints, when training ends, and which seeds it ends."""

import dataclasses
import importlib

import jax
import numpy as np
import pytest

from polyak import envs, loops, train
from polyak.agents.ppo import PPO
from polyak.storage.checkpoint import restore
from polyak.storage.run_directory import create
from polyak.storage.writers import checkpointer
from tests.agents.rollouts import same_bits
from tests.loops.setting import AGENT, ENV, KEY, NUM_ENVS, everything, run
from tests.loops.sick import Sick, SickOutside

pytestmark = pytest.mark.usefixtures("unchecked")
CONSECUTIVE = "train/consecutive_skipped_updates"
STRICT = dataclasses.replace(AGENT, max_skipped_updates=3)
KEYS = jax.random.split(KEY, 3)
# One object each: a loop keeps its program.
SICK, SICK_SEEDS = Sick(ENV, KEY), Sick(ENV, KEYS[0], KEYS[2])


def sick(loop):
    """An environment for the loop, and an agent for it."""
    if loop == "compiled":
        return SICK, STRICT
    env = envs.make(SickOutside, num_envs=NUM_ENVS, nonfinite="pass")
    # With a normaliser too: what it saw must not be in the agent's part either.
    agent = PPO(env.spec, network=AGENT.network, num_steps=8, num_minibatches=2, normalize_obs=True, max_skipped_updates=3)
    return env, agent


pytestmark = pytest.mark.slow
BOTH = pytest.mark.parametrize("loop", ["compiled", "host"])


@BOTH
def test_divergence_is_noticed_between_two_reports(loop, monkeypatch):
    monkeypatch.setattr(importlib.import_module("polyak.loops.compiled_loop"), "CHUNK_SECONDS", 0.0)
    monkeypatch.setattr(importlib.import_module("polyak.loops.loop"), "DIAGNOSIS_SECONDS", 0.0)
    env, agent = sick(loop)
    seen = []
    with pytest.raises(train.TrainingDiverged, match="3 consecutive updates were skipped"):
        run(
            loop,
            env=env,
            agent=agent,
            env_steps=10**9,
            report_every=10**9,
            callbacks=[lambda progress, metrics, state: seen.append((progress.iteration, metrics[CONSECUTIVE]))],
        )
    assert seen == [(3, 3)]


@BOTH
def test_checkpoint_with_nonfinite_observations_restores_bit_for_bit(loop, tmp_path):
    env, agent = sick(loop)
    kept = []

    def keep(progress, metrics, state):
        kept.append(
            (progress.env_steps, jax.tree.map(np.array, dataclasses.replace(state, key=jax.random.key_data(state.key))))
        )

    with create(tmp_path / "run", {}) as made:
        callbacks = [checkpointer(made, every=1), keep]
        with pytest.raises(train.TrainingDiverged, match="3 consecutive updates were skipped"):
            run(loop, env=env, agent=agent, env_steps=10**9, report_every=1, callbacks=callbacks)
        step, state = kept[-1]
        assert np.isnan(state.time_step.reward).any() and np.isnan(state.episodes.returns).any()
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state.agent))
        like = dataclasses.replace(state, key=jax.random.key(0))
        restored = restore(made.checkpoints, like)
    assert restored.step == step
    assert same_bits(dataclasses.replace(restored.tree, key=jax.random.key_data(restored.tree.key)), state)


@BOTH
def test_run_resumed_from_a_checkpoint_with_nan_matches_the_uninterrupted_run(loop, tmp_path):
    env, agent = sick(loop)
    agent = dataclasses.replace(agent, max_skipped_updates=100)
    whole = run(loop, env=env, agent=agent, env_steps=200)
    half = run(loop, env=sick(loop)[0], agent=agent, env_steps=100)
    with create(tmp_path / "run", {}) as made:
        checkpointer(made, every=1)(half.progress, half.metrics, half.loop_state)
        restored = restore(made.checkpoints, half.loop_state)
    assert np.isnan(np.asarray(restored.tree.time_step.reward)).any()
    again, _ = sick(loop)
    if loop == "host":
        again.reset(0)
        again.restore(restored.meta["env"])
    finished = run(loop, env=again, agent=agent, env_steps=200, resume_from=restored.tree, env_steps_done=restored.step)
    assert same_bits(everything(finished), everything(whole))


def test_diverged_seeds_end_and_the_others_finish():
    ill = {0, 2}
    reported = [[], [], []]
    callbacks = [[lambda progress, *_, mine=mine: mine.append(progress.env_steps)] for mine in reported]
    with pytest.warns(UserWarning, match=r"keys\[\d\] has diverged: PPO: 3 consecutive updates .* 'reward'") as warned:
        results = loops.compiled_seeds(STRICT, SICK_SEEDS, env_steps=300, keys=KEYS, callbacks=callbacks, report_every=40)
    assert len(warned) == 2
    for i, (key, result) in enumerate(zip(KEYS, results, strict=True)):
        assert reported[i][-1] == result.progress.env_steps
        if i in ill:
            assert (result.stopped, result.progress.iteration, result.metrics[CONSECUTIVE]) == (
                "diverged",
                3,
                3,
            )
            assert "'reward'" in result.diagnosis and result.progress.env_steps < 100
            fresh = STRICT.init(jax.random.split(key, 3)[0])
            assert same_bits(result.state.copies.online, fresh.copies.online)
        else:
            assert (result.stopped, result.diagnosis) == (None, None)
            alone = run("compiled", env_steps=300, key=key, agent=STRICT)
            assert result.progress.env_steps == alone.progress.env_steps
            for a, b in zip(jax.tree.leaves(everything(alone)), jax.tree.leaves(everything(result)), strict=True):
                np.testing.assert_allclose(a, b, atol=1e-5, rtol=1e-5)


def test_training_ends_when_all_seeds_have_diverged():
    with pytest.warns(UserWarning, match="has diverged"):
        results = loops.compiled_seeds(STRICT, SICK_SEEDS, env_steps=10**9, keys=KEYS[np.array([0, 2, 0])])
    assert [result.stopped for result in results] == ["diverged"] * 3
