"""An agent's state is placed on the devices as the agent's `partition` says."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from polyak.core.struct import static, struct
from polyak.policies.scripted import Uniform
from tests.loops.setting import ENV, LOOPS, NUM_ENVS, run


@struct
class RewardRecorder:
    """Acts at random and keeps one total per environment, as a replay buffer keeps one row per environment."""

    spec = ENV.spec
    num_steps: int = static(default=8)
    network = None

    def init(self, key):
        return {"updates": jnp.zeros((), jnp.int32), "total": jnp.zeros(NUM_ENVS)}

    def check(self, num_envs, devices=1):
        pass

    def prefers_single_thread(self, num_envs, devices):
        return True

    def partition(self, axis_name):
        return {"updates": PartitionSpec(), "total": PartitionSpec(axis_name)}

    def policy(self, state):
        return Uniform(self.spec)

    collect_policy = policy

    def update(self, state, rollout, key, *, axis_name=None):
        total = state["total"] + rollout.reward.sum(0)
        return {"updates": state["updates"] + 1, "total": total}, {"train/n_updates": state["updates"] + 1}

    def diagnose(self, metrics):
        return None


@pytest.mark.slow
@pytest.mark.parametrize("loop", LOOPS)
def test_state_per_environment_is_split_over_devices(loop):
    one, two = (run(loop, env_steps=90, agent=RewardRecorder(), devices=devices) for devices in (1, 2))
    assert {shard.data.shape for shard in two.state["total"].addressable_shards} == {(NUM_ENVS // 2,)}
    assert two.state["updates"].sharding.is_fully_replicated
    np.testing.assert_array_equal(np.asarray(one.state["total"]), np.asarray(two.state["total"]))
    assert one.state["total"].sum() > 0 and int(two.state["updates"]) == two.progress.iteration == 3
    again = run(loop, env_steps=90, agent=RewardRecorder(), devices=2)
    assert jax.tree.all(jax.tree.map(np.array_equal, again.state, two.state))
