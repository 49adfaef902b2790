"""The interface of Stable-Baselines3's models, driven as its `evaluate_policy` drives them."""

import numpy as np

from polyak.policies.scripted import Uniform
from polyak.policies.stable_baselines import StableBaselinesPolicy
from tests.policies.test_network_policy import REMEMBERS, SPEC, policy_for

OBS = np.random.default_rng(0).normal(size=(4, 3)).astype(np.float32)


def test_a_policy_without_recurrent_state_has_none():
    policy = policy_for(SPEC)
    action, state = StableBaselinesPolicy(policy).predict(OBS, deterministic=True)
    assert state is None and np.array_equal(action, policy.predict(OBS)[0])


def test_episode_start_resets_the_recurrent_state():
    policy = policy_for(SPEC, network=REMEMBERS["lstm"])
    model, state = StableBaselinesPolicy(policy), None
    # As evaluate_policy: ones at first, then the dones of the step before.
    starts = np.ones(4, bool)
    carry = None
    for t in range(3):
        action, state = model.predict(OBS + t, state=state, episode_start=starts, deterministic=True)
        wanted, carry = policy.predict(OBS + t, carry, first=starts)
        assert np.array_equal(action, wanted) and state is not None
        starts = np.array([False, True, False, t == 1])


def test_samples_differ_from_step_to_step_and_repeat_by_the_seed():
    def draw(seed):
        model = StableBaselinesPolicy(Uniform(SPEC), seed=seed)
        return [model.predict(np.zeros((50, 3), np.float32))[0].tolist() for _ in range(2)]

    first, second = draw(0)
    assert first != second and draw(0) == [first, second] and draw(1)[0] != first
