"""What users write; `test_types.py` checks its types, and nothing runs it."""

from typing import assert_type

import gymnasium
import jax
import numpy as np

import polyak
from polyak import envs, loops, train
from polyak.agents.on_policy import OnPolicyState
from polyak.core.types import PredictingPolicy, TrainedPolicy
from polyak.loops.loop import TrainResult
from polyak.train.result import Result


def make_env() -> gymnasium.Env[np.ndarray, int]:
    return gymnasium.make("CartPole-v1")


jax_env = envs.make("jax/CartPole-v1", num_envs=8)
assert_type(jax_env, polyak.Env)
host_env = envs.make(make_env, num_envs=2, vectorization="async")
assert_type(host_env, polyak.HostEnv)
assert_type(envs.make(make_env()), polyak.HostEnv)
named_env = envs.make("CartPole-v1")
assert_type(named_env, polyak.Env | polyak.HostEnv)

agent = polyak.PPO(jax_env.spec, num_steps=32, learning_rate=polyak.Linear(3e-4), network=polyak.MLP((32,)))
compiled = loops.compiled(agent, jax_env, env_steps=1000, key=jax.random.key(0))
assert_type(compiled, TrainResult[OnPolicyState])
assert_type(compiled.state, OnPolicyState)
seeds = loops.compiled_seeds(agent, jax_env, env_steps=1000, keys=jax.random.split(jax.random.key(0), 2))
assert_type(seeds[0].state, OnPolicyState)
updates = int(compiled.state.updates)


def report(progress: polyak.Progress, metrics: object, state: train.LoopState) -> bool | None:
    return progress.env_steps < 500


result = train.run(agent, named_env, env_steps=1000, seed=0, callbacks=[report])
assert_type(result, Result[OnPolicyState])
assert_type(result.state, OnPolicyState)
assert_type(result.policy, TrainedPolicy)
action, carry = result.policy.predict(np.zeros(4, np.float32))
action, carry = agent.policy(result.state).predict(np.zeros(4, np.float32), carry)
evaluation = train.evaluate(result.policy, named_env, episodes=10, key=jax.random.key(1))
assert_type(evaluation.mean_return, float)

loaded = polyak.load_policy("runs/cartpole")
assert_type(loaded, PredictingPolicy)
action, _ = loaded.predict(np.zeros(4, np.float32))
