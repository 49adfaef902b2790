"""A rollout of any policy, for learning from what it does: imitation, demonstrations, data sets."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import PRNGKeyArray

from polyak.core.checks import check_integer
from polyak.core.policy_faults import ExceptionRelay
from polyak.core.spaces import EnvSpec
from polyak.core.struct import static, struct
from polyak.core.types import Env, HostEnv, Metrics, Policy, PyTree, Rollout
from polyak.train.compiled_loop import collect_rollout as collect_compiled
from polyak.train.compiled_loop import start as compiled_start
from polyak.train.host_loop import collect_rollout as collect_on_host
from polyak.train.host_loop import rollout_actor
from polyak.train.host_loop import start as host_start
from polyak.train.jax_env_on_host import JaxEnvOnHost
from polyak.train.loop import HasSpec, LoopState, cached_per_env, check_match, iteration_keys


def collect(policy: Policy, env: Env | HostEnv, num_steps: int, *, key: PRNGKeyArray) -> Rollout:
    """What a policy does in fresh episodes: the `Rollout` that agents learn from, `[num_steps, num_envs]`.

    It is collected as a training loop would: in one compiled program in a JAX environment, else step by step. The same
    policy, JAX environment and key give the same numbers when the environment is stepped from the host (as a `JaxEnvOnHost`).
    An agent whose network has a memory, or that keeps values since collecting, learns from rollouts of its own policy only.

    Args:
        policy: acts, with its own memory.
        env: is reset first.
        num_steps: T, steps of each environment.
        key: decides everything random but a host environment's own dice, which get a seed from it.

    Raises:
        TypeError: `num_steps` is no integer, or `env` no environment.
        ValueError: it is below 1, or the policy is one for other spaces.
        RuntimeError: the policy says that it could not go on (a script that has ended).
        Exception: what a Python policy raises, as it was raised.
    """
    check_integer("collect", "num_steps", num_steps)
    watched = _Watched(policy, policy.spec if isinstance(policy, HasSpec) else env.spec, num_steps)
    check_match(watched, env, 1)
    relay = ExceptionRelay(policy)
    if isinstance(env, HostEnv):
        with relay:
            return _stepped(watched, env, key)
    rollout, _ = relay.run(_program(env), watched, compiled_start(watched, env, key))
    return rollout


def _stepped(watched: "_Watched", env: HostEnv, key: PRNGKeyArray) -> Rollout:
    state = host_start(watched, env, key)
    actor = rollout_actor(watched, state, None, exact=isinstance(env, JaxEnvOnHost))
    collected = collect_on_host(actor, state.carry, env, jax.device_get(state.time_step), num_steps=watched.num_steps)
    assert collected is not None, "without patience a rollout is always finished"
    time_steps, actions, info, _ = collected
    rollout: Rollout = jax.tree.map(jnp.asarray, Rollout(time_steps, actions, info, state.carry))
    return rollout


@struct
class _Watched:
    """An agent that learns nothing: its state is the policy."""

    acts: Any
    spec: EnvSpec = static()
    num_steps: int = static()

    def init(self, key: PRNGKeyArray) -> Any:
        return self.acts

    @property
    def network(self) -> None:
        return None

    def check(self, num_envs: int) -> None:
        pass

    def has_small_products(self, num_envs: int, devices: int) -> bool:
        return True

    def partition(self, axis_name: str) -> PartitionSpec:
        return PartitionSpec()

    def policy(self, state: Any) -> Policy:
        return state

    def collect_policy(self, state: Any) -> Policy:
        return state

    def update(self, state: Any, rollout: Rollout, key: PRNGKeyArray, *, axis_name: str | None = None) -> tuple[Any, Metrics]:
        return state, {}

    def diagnose(self, metrics: Mapping[str, Any]) -> str | None:
        return None


@cached_per_env
def _program(env: Env) -> Callable[..., tuple[Rollout, PyTree]]:
    """The rollout and the policy's carry after it, jitted."""

    def program(watched: _Watched, state: LoopState) -> tuple[Rollout, PyTree]:
        keys = iteration_keys(state.key, state.iteration, watched.num_steps)
        (_, _, carry), rollout = collect_compiled(watched, env, state, keys)
        return rollout, carry

    return jax.jit(program)
