"""Collecting with any policy: the rollout that agents learn from, the same compiled and stepped from the host."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak import loops, train
from polyak.agents.ppo import PPO
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.struct import struct
from polyak.core.types import Rollout
from polyak.loops.collect import _FixedAgent, _program, collect
from polyak.networks.feedforward import MLP
from polyak.policies.exploration import EpsilonGreedy
from polyak.policies.info import with_info
from polyak.policies.mixture import Mixture
from polyak.policies.scripted import Scripted, Uniform
from tests.agents.rollouts import same_bits
from tests.loops.scripted import Scripted as ScriptedEnv
from tests.loops.setting import AGENT, ENV, KEY, NUM_ENVS, NUM_STEPS, hosted, run

# A nest with a memory: a learned policy that explores or a uniform one, chosen for each episode, and who acted.
begun = jax.jit(lambda agent, key: agent.init(key))
LEARNED = AGENT.policy(begun(AGENT, KEY)).policy


SHORT = Scripted(ENV.spec, [(5, 1)])


def nest():
    each = (EpsilonGreedy(LEARNED, 0.2), with_info(Uniform(ENV.spec)))
    return with_info(Mixture(each, (1.0, 2.0)), policy_id=3)


@pytest.mark.to_the_bit
def test_a_rollout_is_the_same_compiled_and_stepped_from_the_host():
    compiled = collect(nest(), ENV, 40, key=KEY)
    stepped = collect(nest(), hosted(), 40, key=KEY)
    assert isinstance(compiled, Rollout) and same_bits(compiled, stepped)
    assert compiled.actions.shape == (40, NUM_ENVS) and compiled.time_steps.reward.shape == (41, NUM_ENVS)
    assert compiled.first[0].all() and compiled.first[1:].any() and not compiled.valid.all()
    assert np.all(compiled.info["policy_id"] == 3) and np.all(compiled.info["log_prob"] <= 0)
    assert same_bits(jax.tree.map(jnp.asarray, compiled.carry), jax.tree.map(jnp.asarray, nest().initial_state(NUM_ENVS)))
    assert not np.array_equal(collect(nest(), ENV, 40, key=jax.random.key(1)).actions, compiled.actions)


def test_collecting_again_does_not_compile_again():
    program = _program(ENV)
    collect(SHORT, ENV, 5, key=KEY)
    before = program._cache_size()
    collect(SHORT, ENV, 5, key=jax.random.key(8))
    assert program._cache_size() == before > 0


def test_an_agent_learns_from_the_rollout_of_another_policy():
    agent = PPO(ENV.spec, network=MLP((4,)), num_steps=NUM_STEPS, num_epochs=1, num_minibatches=1)
    rollout = collect(Scripted(ENV.spec, [(NUM_STEPS, 1)]), ENV, NUM_STEPS, key=KEY)
    state = begun(agent, KEY)
    learned, metrics = jax.jit(PPO.update)(agent, state, rollout, KEY)
    assert not same_bits(learned.copies.online, state.copies.online) and int(metrics["train/skipped_steps"]) == 0
    assert int(learned.env_steps) == int(rollout.valid.sum()) > 0


def test_an_environment_outside_jax_is_collected_from_its_reset():
    env = ScriptedEnv([[3], [2, 4]], [1.0, 2.0])
    rollout = collect(Scripted(env.spec, [(1, 1), (4, 0)]), env, 7, key=KEY)
    assert len(env.seeds) == 1 and env.steps == 7
    assert np.array_equal(rollout.actions[:, 0], [1, 0, 0, 0, 1, 0, 0])
    assert np.array_equal(rollout.valid[:, 1], [True, True, False, True, True, True, True])
    assert np.array_equal(rollout.reward[:, 1], [2, 2, 0, 2, 2, 2, 2])
    assert all(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(rollout))


@pytest.mark.parametrize("env", [ENV, hosted()], ids=["compiled", "host"])
def test_a_script_that_ends_is_an_error_in_collecting_and_evaluating(env):
    with pytest.raises(RuntimeError, match="Scripted: the script has ended after its 5 steps"):
        collect(SHORT, env, 8, key=KEY)
    assert collect(SHORT, env, 5, key=KEY).actions.shape == (5, NUM_ENVS)
    with pytest.raises(RuntimeError, match="Scripted: the script has ended after its 5 steps"):
        train.evaluate(SHORT, env, episodes=NUM_ENVS, key=KEY)


@pytest.mark.parametrize("loop", ["compiled", "host"])
def test_a_script_that_ends_stops_a_training_loop(loop):
    with pytest.raises(RuntimeError, match="Scripted: the script has ended after its 5 steps"):
        run(loop, env_steps=10**9, agent=_FixedAgent(SHORT, ENV.spec, 4))


def test_script_may_end_after_the_last_counted_step():
    # The second environment has no episode to do, the first only its own first one.
    env = ScriptedEnv([[3, 9], [9]], [1.0, 1.0])
    done = train.evaluate(Scripted(env.spec, [(4, 1)]), env, episodes=1, key=KEY)
    assert done.lengths.tolist() == [3]
    pushed = train.evaluate(Scripted(ENV.spec, [(30, 1)]), ENV, episodes=NUM_ENVS, key=KEY)
    assert pushed.lengths.max() < 30


def test_invalid_arguments_are_rejected(unchecked):
    other = EnvSpec(Box([-1.0], [1.0]), Discrete(2))
    with pytest.raises(ValueError, match="train: obs of the agent's spec is Box"):
        collect(Uniform(other), ENV, 5, key=KEY)
    with pytest.raises(ValueError, match="collect: num_steps must be an integer >= 1, got 0"):
        collect(Uniform(ENV.spec), ENV, 0, key=KEY)
    with pytest.raises(TypeError, match=r"train: env must be created with polyak\.envs\.make"):
        collect(Uniform(ENV.spec), AGENT, 5, key=KEY)


@struct
class ScriptedAgent(_FixedAgent):
    """Has the script in its state alone: the numbers of an agent itself are one per seed."""

    def init(self, key):
        return SHORT


def test_error_names_the_seed_whose_script_ended():
    with pytest.raises(RuntimeError, match="Scripted: the script has ended after its 5 steps") as caught:
        loops.compiled_seeds(ScriptedAgent((), ENV.spec, 4), ENV, env_steps=10**9, keys=jax.random.split(KEY, 2))
    assert caught.value.__notes__ == ["while training with keys[0]"]
