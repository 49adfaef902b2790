"""An agent that follows a Python policy and counts what it is given."""

from typing import Any

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from polyak.core.struct import static, struct
from polyak.policies.python.policy import PythonPolicy


@struct
class Follower:
    """Collects with a policy of somebody else's; its state is how much it has seen."""

    chosen: Any
    num_steps: int = static(default=8)

    @property
    def spec(self):
        return self.policy(None).spec

    def init(self, key):
        return {"updates": jnp.zeros((), jnp.int32), "actions": jnp.zeros((), jnp.int32), "info": jnp.zeros(())}

    def check(self, num_envs, devices=1):
        pass

    def prefers_single_thread(self, num_envs, devices):
        return True

    def partition(self, axis_name):
        return PartitionSpec()

    def policy(self, state):
        return self.chosen

    collect_policy = policy

    def update(self, state, rollout, key, *, axis_name=None):
        total = jnp.where(rollout.valid, rollout.actions, 0).sum(dtype=jnp.int32)
        seen = rollout.info["seed"].sum() if rollout.info else jnp.zeros(())
        moved = {"updates": state["updates"] + 1, "actions": state["actions"] + total, "info": state["info"] + seen}
        return moved, {"train/actions": moved["actions"]}

    def diagnose(self, metrics):
        return None


def following(target, spec, **options):
    return Follower(PythonPolicy(target, spec, **options))
