"""Collect rollouts of any policy, for imitation learning, demonstrations and data sets."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import PRNGKeyArray

from polyak.core.checks import check_integer, check_key
from polyak.core.policy_faults import ExceptionRelay
from polyak.core.spaces import EnvSpec
from polyak.core.struct import static, struct
from polyak.core.suggestions import suggest_arguments
from polyak.core.types import Env, HostEnv, Metrics, Policy, PyTree, Rollout, TimeStep
from polyak.loops.agent_check import check_policy_methods
from polyak.loops.compiled_loop import collect_compiled, start_compiled
from polyak.loops.host_loop import start_host
from polyak.loops.jax_env_on_host import JaxEnvOnHost
from polyak.loops.loop import LoopState, check_match, iteration_keys
from polyak.loops.program_cache import cached_per_env
from polyak.loops.rollout_actors import rollout_actor
from polyak.loops.rollouts import collect_on_host


@suggest_arguments("collect")
def collect(policy: Policy, env: Env | HostEnv, num_steps: int, *, key: PRNGKeyArray) -> Rollout:
    """Run a policy in fresh episodes and return the `Rollout` that agents learn from, `[num_steps, num_envs]`.

    A JAX environment runs in one compiled program, other environments are stepped from Python, as in the training loops. Equal
    policies, JAX environments and keys give equal numbers if the environment is stepped from the host (as a `JaxEnvOnHost`).
    PPO and the other agents without a replay, with a recurrent network or with values computed while collecting, learn only
    from rollouts of their own policy.

    Args:
        policy: the policy to run, recurrent or not.
        env: the environment; reset first.
        num_steps: T, steps of each environment.
        key: source of all randomness; a host environment is seeded from it.

    Raises:
        TypeError: `policy` is a function or an exported policy, `num_steps` is not an integer, or `env` is not an environment.
        ValueError: `num_steps` is below 1, or the policy was built for other spaces.
        RuntimeError: the policy reports a failure (a script that has ended).
        Exception: any exception of a Python policy, unchanged.
    """
    return next(collect_rollouts(policy, env, num_steps, key=key))


def collect_rollouts(policy: Policy, env: Env | HostEnv, num_steps: int, *, key: PRNGKeyArray) -> Iterator[Rollout]:
    """Yield consecutive rollouts of a policy, each of which continues the episodes of the rollout before; see `collect`."""
    check_policy_methods("collect", policy)
    check_integer("collect", "num_steps", num_steps)
    check_key("collect", key)
    agent = _FixedAgent(policy, getattr(policy, "spec", env.spec), num_steps)
    check_match(agent, env, 1, key)
    relay = ExceptionRelay(policy)
    if isinstance(env, HostEnv):
        with relay:
            state = start_host(agent, env, key)
        while True:
            with relay:
                state, rollout = _collect_on_host(agent, env, state)
            yield rollout
    state = start_compiled(agent, env, key)
    while True:
        state, rollout = relay.run(_program(env), agent, state)
        yield rollout


def _collect_on_host(agent: "_FixedAgent", env: HostEnv, state: LoopState) -> tuple[LoopState, Rollout]:
    actor = rollout_actor(agent, state, exact=isinstance(env, JaxEnvOnHost))
    arrays = collect_on_host(actor, state.carry, env, jax.device_get(state.time_step), num_steps=agent.num_steps)
    assert arrays is not None, "a rollout without a deadline is always complete"
    time_steps, actions, info, carry = arrays
    rollout: Rollout = jax.tree.map(jnp.asarray, Rollout(time_steps, actions, info, state.carry))
    last, carry = jax.tree.map(jnp.asarray, (jax.tree.map(lambda x: x[-1], time_steps), carry))
    return _next_state(state, (), last, carry), rollout


def _next_state(state: LoopState, env: PyTree, time_step: TimeStep, carry: PyTree) -> LoopState:
    """The state before the next rollout."""
    iteration = state.iteration + jnp.uint32(1)
    return dataclasses.replace(state, env=env, time_step=time_step, carry=carry, iteration=iteration)


@struct
class _FixedAgent:
    """An agent that does not learn: its state is the policy."""

    fixed_policy: Any
    spec: EnvSpec = static()
    num_steps: int = static()

    def init(self, key: PRNGKeyArray) -> Any:
        return self.fixed_policy

    def check(self, num_envs: int, devices: int = 1) -> None:
        pass

    def prefers_single_thread(self, num_envs: int, devices: int) -> bool:
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
def _program(env: Env) -> Callable[..., tuple[LoopState, Rollout]]:
    """The jitted function that returns the state before the next rollout, and the rollout."""

    def program(agent: _FixedAgent, state: LoopState) -> tuple[LoopState, Rollout]:
        keys = iteration_keys(state.key, state.iteration, agent.num_steps)
        after, rollout = collect_compiled(agent, env, state, keys)
        return _next_state(state, *after), rollout

    return jax.jit(program)
