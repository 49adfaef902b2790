"""Agents whose workers send gradients: one worker is a single process, a push counts once, a bad worker stands alone."""

from functools import partial

import jax
import numpy as np
import pytest

from polyak.agents.a2c import A2C
from polyak.copies.receive import Push
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.networks.feedforward import MLP
from tests.agents.rollouts import fresh, on_device, rollout, same_bits

SPEC = EnvSpec(Box(-np.ones(3, np.float32), np.ones(3, np.float32)), Discrete(3))
KEY = jax.random.key(0)
AGENT = A2C(SPEC, network=MLP((4,)), num_steps=6, learning_rate=1e-2, normalize_obs=True, normalize_reward="return")

update = jax.jit(lambda state, data: AGENT.update(state, data, KEY))
gradients = jax.jit(lambda state, data: AGENT.gradients(state, data, KEY))
receive = jax.jit(partial(AGENT.receive, max_staleness=1, max_bad=2))


def data(seed):
    return on_device(rollout(SPEC, seed, num_steps=6, num_envs=2, carry=((), np.zeros(2, np.float32))))


def push_of(state, sequence, worker=0):
    """What a worker that has just pulled sends for the rollout of this number."""
    own = AGENT.worker_state(state)
    return Push.create(worker, sequence, own.copies.version), *gradients(own, data(sequence))


def close(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("shared_optimizer", [True, False])
def test_one_worker_is_a_single_process(shared_optimizer):
    single = fresh(AGENT)
    state, senders = AGENT.share(fresh(AGENT), 2, shared_optimizer=shared_optimizer)
    for sequence in (1, 2, 3):
        single, expected = update(single, data(sequence))
        state, senders, metrics = receive(state, senders, *push_of(state, sequence))
        close(metrics, expected)
    close(state.copies.shared.variables, single.copies.online)
    close((state.obs_normalizer, state.reward_scaler), (single.obs_normalizer, single.reward_scaler))
    assert int(state.env_steps) == int(single.env_steps) and int(state.copies.shared.version) == 3
    assert int(state.copies.steps) == int(single.copies.steps) == 3
    optimizer_state = state.copies.shared.optimizer_state if shared_optimizer else senders.optimizer_state
    close(optimizer_state if shared_optimizer else jax.tree.map(lambda x: x[0], optimizer_state), single.copies.optimizer_state)


def test_a_repeated_push_counts_neither_in_the_weights_nor_in_the_statistics():
    state, senders = AGENT.share(fresh(AGENT), 2)
    push = push_of(state, 1)
    once, senders, _ = receive(state, senders, *push)
    twice, senders, metrics = receive(once, senders, *push)
    assert same_bits(twice, once) and senders.repeated.tolist() == [1, 0]
    assert metrics["train/n_updates"] == 1 and metrics["train/policy_gradient_loss"].count == 0


def test_a_rollout_that_only_resets_moves_no_weight_by_momentum():
    resets = jax.tree.map(np.array, data(2))
    resets.time_steps.truncated[:] = resets.time_steps.first[1:] = True
    resets = on_device(resets)
    state, senders = AGENT.share(fresh(AGENT), 2)
    once, senders, _ = receive(state, senders, *push_of(state, 1))
    own = AGENT.worker_state(once)
    after, senders, _ = receive(once, senders, Push.create(0, 2, own.copies.version), *gradients(own, resets))
    assert same_bits(after.copies.shared, once.copies.shared)
    assert (int(after.env_steps), int(after.updates)) == (int(once.env_steps), int(once.updates) + 1)
    assert senders.applied.tolist() == [1, 0] and senders.rejected.tolist() == [0, 0] and senders.sequence.tolist() == [2, 0]


def test_stale_gradients_are_dropped():
    state, senders = AGENT.share(fresh(AGENT), 2)
    old = push_of(state, 1, worker=1)
    for sequence in (1, 2):
        state, senders, _ = receive(state, senders, *push_of(state, sequence))
    after, senders, _ = receive(state, senders, *old)
    assert same_bits(after.copies.shared.variables, state.copies.shared.variables)
    assert senders.stale.tolist() == [0, 1] and int(after.env_steps) == int(state.env_steps)


def test_nan_from_one_worker_is_named_and_the_others_go_on():
    state, senders = AGENT.share(fresh(AGENT), 2)
    own = AGENT.worker_state(state)
    bad = jax.tree.map(np.array, data(1))
    bad.time_steps.obs[1, 0] = np.nan
    bad = on_device(bad)
    for sequence in (1, 2):
        state, senders, metrics = receive(state, senders, Push.create(1, sequence, 0), *gradients(own, bad))
    assert senders.is_quarantined(2).tolist() == [False, True]
    assert metrics["train/consecutive_skipped_updates"] == 2 and int(state.updates) == 0
    strict = A2C(SPEC, network=MLP((4,)), max_skipped_updates=2)
    assert "'obs'" in strict.diagnose(metrics) and "A2C: 2 consecutive updates" in strict.diagnose(metrics)
    state, senders, metrics = receive(state, senders, *push_of(state, 1))
    assert metrics["train/consecutive_skipped_updates"] == 0 and int(state.updates) == 1


def test_the_shared_copy_is_evaluated():
    state, senders = AGENT.share(fresh(AGENT), 2)
    state, senders, _ = receive(state, senders, *push_of(state, 1))
    assert same_bits(AGENT.policy(state).policy.variables, state.copies.shared.variables)
    pulled = AGENT.worker_state(state)
    assert same_bits(AGENT.collect_policy(pulled).policy.variables, state.copies.shared.variables)


def test_a_state_without_a_shared_copy_is_rejected():
    state, senders = AGENT.share(fresh(AGENT), 2)
    push = push_of(state, 1)
    with pytest.raises(ValueError, match=r"A2C\.receive: state has no shared copy; create one with share"):
        AGENT.receive(fresh(AGENT), senders, *push)
    with pytest.raises(ValueError, match="worker_copies needs a shared copy"):
        AGENT.worker_state(fresh(AGENT))
