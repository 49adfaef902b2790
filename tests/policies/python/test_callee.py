"""What a Python policy is shown, and whose arrays its answers are."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.core.spaces import Dict, EnvSpec
from polyak.core.types import PolicyStep, TimeStep
from polyak.policies.python.policy import PythonPolicy
from tests.policies.python.test_policy import KEY, SPEC, B, rule, time_step

pytestmark = pytest.mark.usefixtures("unchecked")


def test_observation_with_wrong_tree_or_length_is_rejected():
    policy = PythonPolicy(
        lambda time_step, carry: PolicyStep([0] * B), EnvSpec(Dict({"x": SPEC.obs, "y": SPEC.obs}), SPEC.action)
    )
    x, flags = np.zeros((B, 2), np.float32), np.zeros(B, bool)
    act = policy.direct_call()
    assert act(TimeStep({"x": x, "y": x}, *[flags] * 4), (), None).action.tolist() == [0] * B
    for obs, says in (({"x": x, "z": x}, "obs must have the tree"), ({"x": x, "y": x[:2]}, r"obs at 'y' is float32 \(2, 2\)")):
        with pytest.raises(ValueError, match=f"PythonPolicy '<lambda>': {says}"):
            act(TimeStep(obs, *[flags] * 4), (), None)
    with pytest.raises(ValueError, match=r"must have one batch size, got \[2, 3\]"):
        act(TimeStep({"x": x, "y": x}, *[flags[:2]] * 4), (), None)


def test_masked_action_raises_in_both_loops():
    policy = PythonPolicy(rule, dataclasses.replace(SPEC, has_action_mask=True))
    masked = dataclasses.replace(time_step(), action_mask=jnp.asarray(np.arange(4) != [[3], [1], [0]]))
    with pytest.raises(ValueError, match=r"'rule': action is not allowed by action_mask: np.int32\(1\) in environment 1\n"):
        policy.direct_call()(jax.tree.map(np.asarray, masked), (), None)
    with pytest.raises(ValueError, match="action is not allowed by action_mask"), policy.raising():
        jax.block_until_ready(policy.action(masked, (), KEY))


class Refilling:
    """Answers out of the same arrays again and again."""

    def __init__(self, rows):
        self.action_, self.carry, self.begun = np.zeros(rows, np.int32), np.zeros(rows, np.int32), 0

    def initial_state(self, *_):
        self.begun += 1
        self.carry[...] = self.begun
        return self.carry

    def action(self, time_step, carry):
        self.action_[...] = time_step.obs[..., 0] % 4
        self.carry[...] = carry + 10
        return PolicyStep(self.action_, self.carry)


@pytest.mark.parametrize("batched", [True, False])
def test_a_policy_may_fill_the_same_arrays_at_every_call(batched):
    target = Refilling(B if batched else ())
    policy = PythonPolicy(target, SPEC, batched=batched, carry_spec=np.int32(0))
    act, now = policy.direct_call(), jax.tree.map(np.asarray, time_step())
    begun = np.asarray(policy.initial_state(B))
    first = act(now, begun, None)
    second = act(dataclasses.replace(now, obs=now.obs + 1), first.carry, None)
    assert first.action.tolist() == [0, 2, 0] and second.action.tolist() == [1, 3, 1]
    want = [1] * B if batched else [1, 2, 3]
    assert begun.tolist() == want and second.carry.tolist() == [n + 20 for n in want]
    # A new episode begins with what the object says then.
    third = act(dataclasses.replace(now, first=np.array([False, True, False])), second.carry, None)
    assert third.carry.tolist() == [want[0] + 30, 12 if batched else 15, want[2] + 30]
