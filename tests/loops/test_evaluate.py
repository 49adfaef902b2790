"""Evaluation: whole episodes, each environment its share."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.core.struct import struct
from polyak.core.types import PolicyStep
from polyak.envs.autoreset import AutoReset
from polyak.envs.classic import Pendulum
from polyak.loops.collect import collect
from polyak.loops.evaluate import Evaluation, evaluate
from polyak.loops.jax_env_on_host import JaxEnvOnHost
from polyak.loops.loop import env_reset_key, env_step_key
from polyak.ops.distributions import Deterministic
from polyak.policies.scripted import Uniform
from tests.loops.scripted import Scripted
from tests.loops.setting import AGENT, ENV, KEY
from tests.probe_envs import probe


@struct
class Constant:
    """Always the first action."""

    def initial_state(self, batch_size):
        return ()

    def distribution(self, time_step, carry):
        return Deterministic(jnp.zeros(time_step.first.shape, jnp.int32)), carry

    def action(self, time_step, carry, key):
        return PolicyStep(self.distribution(time_step, carry)[0].mode(), carry)


def collecting():
    return AGENT.collect_policy(AGENT.init(jax.random.key(0)))


def by_hand(policy, env, episodes, key):
    """The same, slowly: every environment's own first episodes, one time step at a time."""
    env_key, act_key = jax.random.split(key)
    quota = [episodes // env.num_envs + (i < episodes % env.num_envs) for i in range(env.num_envs)]
    state, time_step = jax.jit(env.init)(env_reset_key(env_key))
    carry, t = policy.initial_state(env.num_envs), 0
    done, now = [[] for _ in quota], [(0.0, 0)] * env.num_envs
    step = jax.jit(env.step)
    act = jax.jit(lambda time_step, carry, key: policy.action(time_step, carry, key))
    while any(len(each) < q for each, q in zip(done, quota, strict=True)):
        acted = act(time_step, carry, jax.random.fold_in(act_key, t))
        carry = acted.carry
        state, time_step = step(state, acted.action, env_step_key(env_key, t))
        t += 1
        for i in range(env.num_envs):
            now[i] = (0.0, 0) if time_step.first[i] else (now[i][0] + float(time_step.reward[i]), now[i][1] + 1)
            if time_step.last[i] and len(done[i]) < quota[i]:
                done[i].append(now[i])
    return [episode for each in done for episode in each], t


@pytest.fixture(scope="module")
def slow():
    return by_hand(collecting(), ENV, 6, KEY)


class SameStart:
    """A host environment that starts as the compiled evaluation does, whatever the seed."""

    def __init__(self, env, key):
        self._hosted = JaxEnvOnHost(env, jax.random.split(key)[0])
        self.spec, self.num_envs = env.spec, env.num_envs
        self.step, self.snapshot, self.restore = self._hosted.step, self._hosted.snapshot, self._hosted.restore
        self.close = self._hosted.close

    def reset(self, seed):
        return self._hosted.reset(0)


def test_evaluation_matches_the_slow_oracle_compiled_and_on_the_host(slow):
    episodes, _ = slow
    for env in (ENV, SameStart(ENV, KEY)):
        result = evaluate(collecting(), env, episodes=6, key=KEY)
        assert list(result.lengths) == [length for _, length in episodes]
        np.testing.assert_allclose(result.returns, [total for total, _ in episodes], rtol=1e-6)
        assert result.mean_return == pytest.approx(np.mean(result.returns)) and len(result.returns) == 6
        assert result.std_return == pytest.approx(np.std(result.returns))
        assert result.mean_length == pytest.approx(np.mean(result.lengths))


def test_short_episodes_are_not_favoured():
    env = Scripted([[2], [50]], [1.0, 1.0])
    result = evaluate(Constant(), env, episodes=4, key=KEY)
    # The first four to end would all be environment 0's.
    assert list(result.lengths) == [2, 2, 50, 50] and result.mean_return == 26.0


@pytest.mark.parametrize(("episodes", "lengths"), [(1, [2]), (2, [2, 3]), (3, [2, 2, 3]), (5, [2, 2, 2, 3, 4])])
def test_episodes_are_divided_equally_and_the_first_environments_run_one_more(episodes, lengths):
    env = Scripted([[2], [3, 4]], [1.0, -2.0])
    result = evaluate(Constant(), env, episodes=episodes, key=KEY)
    assert list(result.lengths) == lengths
    shares = [2] * (episodes // 2 + episodes % 2), lengths[episodes // 2 + episodes % 2 :]
    assert list(result.returns) == [*map(float, shares[0]), *(-2.0 * n for n in shares[1])]


def test_both_ways_for_an_episode_to_end_count():
    assert list(evaluate(Constant(), Scripted([[2, 3]], [1.0]), episodes=2, key=KEY).lengths) == [2, 3]


def test_episodes_of_one_step():
    result = evaluate(Constant(), probe(3), episodes=7, key=KEY)
    assert list(result.lengths) == [1] * 7 and list(result.returns) == [1.0] * 7


def test_key_determines_the_episodes():
    policy = collecting()
    a, b, c = (evaluate(policy, ENV, episodes=8, key=jax.random.key(seed)) for seed in (1, 1, 2))
    assert np.array_equal(a.returns, b.returns) and not np.array_equal(a.returns, c.returns)
    env = Scripted([[2]], [1.0])
    for seed in (1, 1, 2):
        evaluate(Constant(), env, episodes=1, key=jax.random.key(seed))
    assert env.seeds[0] == env.seeds[1] != env.seeds[2]


def test_evaluation_times_out_after_max_steps_and_not_before(slow):
    _, steps = slow
    for env in (ENV, SameStart(ENV, KEY)):
        assert len(evaluate(collecting(), env, episodes=6, key=KEY, max_steps=steps).returns) == 6
        with pytest.raises(TimeoutError, match=f"jax/CartPole.* max_steps={steps - 1} steps"):
            evaluate(collecting(), env, episodes=6, key=KEY, max_steps=steps - 1)


def test_an_evaluation_can_be_stopped():
    for env, calls in ((ENV, 1), (SameStart(ENV, KEY), 3)):
        answers = iter([False] * (calls - 1) + [True])
        with pytest.raises(TimeoutError, match=r"stopped before all episodes of jax/CartPole\S* had ended"):
            evaluate(collecting(), env, episodes=6, key=KEY, should_stop=lambda: next(answers))  # noqa: B023
        assert next(answers, None) is None


def test_long_episodes_pass_through_several_chunks():
    env = AutoReset(dataclasses.replace(probe(1).dynamics, length=np.int32(600)), 2)
    assert list(evaluate(Constant(), env, episodes=3, key=KEY).lengths) == [600] * 3


@pytest.mark.parametrize("argument", ["episodes", "max_steps"])
@pytest.mark.parametrize("wrong", [0, -1, 2.5, "10", float("nan")])
def test_invalid_numbers_are_rejected(unchecked, argument, wrong):
    with pytest.raises((TypeError, ValueError), match=f"evaluate: {argument} must be an integer >= 1"):
        evaluate(Constant(), ENV, **({"episodes": 5, "key": KEY} | {argument: wrong}))


def test_should_stop_must_be_a_function(unchecked):
    with pytest.raises(TypeError, match="evaluate: should_stop must be a function without arguments, got True"):
        evaluate(Constant(), ENV, episodes=5, key=KEY, should_stop=True)


def test_second_evaluation_compiles_nothing():
    events = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, duration, **_: events.append(event) if "backend_compile" in event else None
    )
    for env in (ENV, Scripted([[2]], [1.0])):
        policy = AGENT.policy(AGENT.init(jax.random.key(0))) if env is ENV else Constant()
        evaluate(policy, env, episodes=2, key=KEY)
        other = AGENT.policy(AGENT.init(jax.random.key(1))) if env is ENV else Constant()
        before = len(events)
        evaluate(other, env, episodes=3, key=jax.random.key(5))
        assert len(events) == before


def test_an_evaluation_prints_mean_deviation_and_episodes():
    assert repr(Evaluation(np.array([400.0, 500.0]), np.zeros(2, np.int64))) == "Evaluation(450.0 ± 50.0, 2 episodes)"


def test_a_function_or_an_exported_policy_is_rejected_with_the_way_out(unchecked):
    for policy in (lambda obs: obs, object()):
        with pytest.raises(TypeError, match=r"evaluate: policy must have .*PythonPolicy\(f, env.spec\)"):
            evaluate(policy, ENV, episodes=1, key=KEY)
        with pytest.raises(TypeError, match=r"collect: policy must have .*PythonPolicy\(f, env.spec\)"):
            collect(policy, ENV, 1, key=KEY)


@pytest.mark.parametrize(("policy_scaling", "env_scaling"), [("clip", "rescale"), ("rescale", "clip")])
def test_policy_of_another_action_scaling_is_rejected(policy_scaling, env_scaling):
    spec = AutoReset(Pendulum(), 2).spec
    policy = Uniform(dataclasses.replace(spec, action_scaling=policy_scaling))
    env = Scripted([[2]], [1.0])
    env.spec = dataclasses.replace(spec, action_scaling=env_scaling)
    with pytest.raises(ValueError, match=f"evaluate: action_scaling of the policy's spec is {policy_scaling}"):
        evaluate(policy, env, episodes=1, key=KEY)


def test_policy_of_other_spaces_is_rejected():
    with pytest.raises(ValueError, match="evaluate: obs of the policy's spec is"):
        evaluate(collecting(), AutoReset(Pendulum(), 2), episodes=1, key=KEY)
