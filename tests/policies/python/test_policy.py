"""A Python policy in compiled code of one's own: calls, errors, seeds, carries, and what it is shown."""

import dataclasses
import gc
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak import train
from polyak.core import policy_faults
from polyak.core.policy_faults import ExceptionRelay, PythonCalls
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.struct import struct
from polyak.core.types import Policy, PolicyStep, TimeStep
from polyak.loops.jax_env_on_host import JaxEnvOnHost
from polyak.ops.distributions import Categorical, Deterministic
from polyak.ops.updates import soft_update
from polyak.policies.exploration import EpsilonGreedy
from polyak.policies.network_policy import Greedy
from polyak.policies.python.policy import PythonPolicy
from tests.loops.setting import ENV

B = 3
SPEC = EnvSpec(Box([-9.0] * 2, [9.0] * 2), Discrete(4))
BOX = EnvSpec(Box([-9.0] * 2, [9.0] * 2), Box([-1.0], [1.0]))
KEY = jax.random.key(0)
pytestmark = pytest.mark.usefixtures("unchecked")


def time_step(obs=None, first=(False,) * B):
    obs = jnp.arange(2.0 * B).reshape(B, 2) if obs is None else obs
    zeros = jnp.zeros(B, bool)
    return TimeStep(obs, jnp.zeros(B), zeros, zeros, jnp.array(first))


def steps(policy, count, carry=(), first=None):
    """Actions and carries of so many compiled steps; the first step's `first` is given."""

    def step(carry, t):
        flags = jnp.where(t == 0, first, False) if first is not None else jnp.zeros(B, bool)
        acted = policy.action(time_step(first=flags), carry, jax.random.fold_in(KEY, t))
        return acted.carry, acted

    return jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(count))[1])(carry)


def rule(obs):
    return obs[:, 0] > 1


class Counter:
    """Counts the steps of each environment's episode, and answers the count."""

    def initial_state(self, batch_size):
        return np.zeros(batch_size, np.int32)

    def action(self, time_step, carry):
        return PolicyStep(carry % 4, carry + 1, {"seen": time_step.obs[:, 0]})


class Single:
    """The same, for one environment."""

    def initial_state(self):
        return 0

    def action(self, time_step, carry):
        return PolicyStep(carry % 4, carry + 1, {"seen": time_step.obs[0]})


COUNTER = {"carry_spec": np.int32(0), "info_spec": {"seen": jax.ShapeDtypeStruct((), np.float32)}}


def test_python_policy_has_no_leaves_and_a_name():
    policy = PythonPolicy(rule, SPEC)
    assert isinstance(policy, Policy) and jax.tree.leaves(policy) == []
    assert "rule" in repr(policy) and PythonPolicy(Counter(), SPEC).callee.calls.name == "PythonPolicy 'Counter'"


class Classifier:
    """As scikit-learn's: labels of float64."""

    def predict(self, X):
        return (X[:, 0] > 0).astype(np.float64)


def test_an_estimators_predict_is_a_policy():
    policy = PythonPolicy(Classifier().predict, SPEC)
    assert policy.action(time_step(jnp.array([[1.0, 0.0], [-1.0, 0.0], [2.0, 0.0]])), (), KEY).action.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("target", "options", "error", "says"),
    [
        (3, {}, TypeError, "the target must be a function of .* got int"),
        (lambda: 0, {}, TypeError, r"must take \(obs.*, got \(\)"),
        (lambda a, b, c, d: 0, {}, TypeError, "must take"),
        (rule, {"on_error": "ignore"}, ValueError, "on_error"),
        (rule, {"batched": "no"}, ValueError, "batched must be one of True, False, got 'no'"),
        (rule, {"deterministic": 1}, ValueError, "deterministic must be one of True, False"),
        (rule, {"timeout": 0}, ValueError, "timeout"),
        (rule, {"bached": False}, TypeError, "did you mean 'batched'"),
        (rule, {"carry_spec": np.int32(0)}, ValueError, "carry_spec and info_spec are for"),
        (rule, {"variables": True}, TypeError, "no pytree"),
        (lambda time_step, carry: 0, {"carry_spec": 0}, TypeError, "PythonPolicy '<lambda>': carry_spec must declare"),
        (
            lambda time_step, carry: 0,
            {"carry_spec": KEY},
            TypeError,
            "carry_spec must declare .* of numbers, .* got Array",
        ),
        (lambda time_step, carry: 0, {"info_spec": {"a": KEY}}, TypeError, "info_spec must declare .* at 'a', e.g. np.int32"),
        (lambda time_step, carry: 0, {"carry_spec": np.array("a")}, TypeError, "carry_spec must declare .* arrays of numbers"),
        (dict, {}, TypeError, "PythonPolicy 'dict': give an instance, not the class dict"),
        (Classifier(), {}, TypeError, r"got Classifier; pass its method, PythonPolicy\(classifier.predict, env.spec\)"),
    ],
)
def test_targets_with_unsupported_signatures_are_rejected(target, options, error, says):
    with pytest.raises(error, match=says):
        PythonPolicy(target, SPEC, **options)


def test_scan_calls_the_policy_once_per_step_in_order():
    seen = []
    policy = PythonPolicy(lambda obs: (seen.append(obs[0, 0]), [0] * B)[1], SPEC)

    @jax.jit
    def unused(obs):
        def step(obs, _):
            policy.action(time_step(obs), (), KEY)
            policy.action(time_step(obs), (), KEY)
            return obs + 1, None

        return jax.lax.scan(step, obs, None, 5)[0]

    jax.block_until_ready(unused(jnp.zeros((B, 2))))
    jax.effects_barrier()
    assert seen == [0, 0, 1, 1, 2, 2, 3, 3, 4, 4] and policy.num_calls == 10


def test_policy_is_called_once_outside_jit_and_with_donation():
    policy = PythonPolicy(rule, SPEC)
    assert policy.action(time_step(), (), KEY).action.tolist() == [0, 1, 1]
    act = jax.jit(
        lambda obs: policy.action(time_step(obs), (), KEY).action[:, None].astype(jnp.float32) + obs, donate_argnums=0
    )
    assert act(jnp.full((B, 2), 2.0)).tolist() == [[3, 3]] * B
    assert policy.num_calls == 2


def test_vmap_and_grad_raise_with_an_alternative():
    policy = PythonPolicy(lambda obs: obs[:, :1] / 9, BOX, name="planner")

    def looped(obs):
        return jax.lax.scan(lambda o, _: (o + policy.action(time_step(o), (), KEY).action, None), obs, None, 2)[0].sum()

    obs = jnp.zeros((B, 2))
    with pytest.raises(TypeError, match=r"'planner'.* cannot be mapped by vmap .*give it one"):
        jax.jit(jax.vmap(looped))(obs[None])
    with pytest.raises(TypeError, match=r"'planner'.* cannot be differentiated: use jax.lax.stop_gradient"):
        jax.grad(looped)(obs)
    assert policy.num_calls == 0
    # What it is given does not depend on w.
    assert jax.grad(lambda w: w * policy.action(time_step(obs), (), KEY).action.sum())(2.0) == 0.0


@pytest.mark.parametrize("by_hand", [False, True])
def test_several_devices_raise_with_an_alternative(by_hand):
    policy = PythonPolicy(rule, SPEC)
    mesh = jax.make_mesh((B,), ("x",), (jax.sharding.AxisType.Auto,), devices=jax.devices()[:B])
    rows = jax.sharding.PartitionSpec("x")

    def act(obs):
        return policy.action(time_step(obs), (), KEY).action

    program = jax.shard_map(act, mesh=mesh, in_specs=rows, out_specs=rows, check_vma=False) if by_hand else act
    obs = jax.device_put(jnp.zeros((B, 2)), jax.sharding.NamedSharding(mesh, rows))
    with pytest.raises(TypeError, match="cannot be split over devices: use devices=1"):
        jax.jit(program)(obs)


def test_vmap_over_keys_raises_with_and_without_seed():
    for policy in (PythonPolicy(rule, SPEC), PythonPolicy(lambda obs, seed: [0] * B, SPEC)):
        with pytest.raises(TypeError, match="cannot be mapped by vmap"):
            jax.vmap(lambda key, policy=policy: policy.action(time_step(), (), key).action)(jax.random.split(KEY, 2))
        assert policy.num_calls == 0


@pytest.mark.parametrize("kind", [StopIteration, SystemExit, KeyboardInterrupt])
def test_exceptions_keep_their_type_and_text(kind):
    raised = []

    def failing(obs):
        if len(raised) == 2:
            raised.append(kind("mine"))
            raise raised[-1] from ValueError("its cause")
        raised.append(None)
        return [0] * B

    policy = PythonPolicy(failing, SPEC)
    with pytest.raises(kind) as caught, policy.raising():
        steps(policy, 5)
    assert caught.value is raised[-1] and isinstance(caught.value.__cause__, ValueError)
    assert caught.value.__notes__ == ["raised by PythonPolicy 'failing' at its step 2, counted from 0"]
    assert caught.traceback[-1].name == "failing"
    # And nothing of it is left behind.
    raised.clear()
    policy_after = PythonPolicy(rule, SPEC)
    with policy_after.raising():
        assert steps(policy_after, 2).action.shape == (2, B)


def test_jax_error_outside_raising_contains_the_original_text(caplog):
    policy = PythonPolicy(lambda obs: {}["lost"], SPEC)
    with pytest.raises(jax.errors.JaxRuntimeError, match="KeyError: 'lost'"):
        jax.block_until_ready(steps(policy, 2))
    assert not caplog.records


def test_exception_of_an_unbatched_policy_names_the_environment():
    policy = PythonPolicy(lambda obs: 1 // int(obs[0] - 2), SPEC, batched=False, on_error="clip")
    with pytest.raises(ZeroDivisionError) as caught:
        policy.direct_call()(jax.tree.map(np.asarray, time_step()), (), None)
    assert caught.value.__notes__[0] == "for environment 1"


def test_other_exceptions_pass_through_raising():
    with pytest.raises(LookupError, match="other"), PythonPolicy(rule, SPEC).raising():
        raise LookupError("other")


def test_observation_outside_the_spec_is_rejected():
    policy = PythonPolicy(rule, SPEC)
    for obs in (np.zeros((B, 3), np.float32), np.zeros((B, 2), np.int32), {"a": np.zeros((B, 2), np.float32)}):
        with pytest.raises(ValueError, match="PythonPolicy 'rule': obs"):
            policy.direct_call()(TimeStep(obs, *[None] * 4), (), None)
        with pytest.raises(ValueError, match="PythonPolicy 'rule': obs"), policy.raising():
            jax.block_until_ready(policy.action(time_step(jax.tree.map(jnp.asarray, obs)), (), KEY))


def test_inputs_are_read_only_and_may_be_stored():
    kept, copies = [], []

    def spoiling(time_step, carry):
        kept.append(time_step.obs)
        copies.append(time_step.obs.copy())
        for array in (*jax.tree.leaves(time_step), carry):
            with pytest.raises(ValueError, match="read-only"):
                array[...] = 1
        return PolicyStep([0] * B, carry)

    policy = PythonPolicy(spoiling, SPEC, carry_spec=np.zeros(2, np.float32))
    now = jax.tree.map(np.array, time_step())
    policy.direct_call()(now, policy.initial_state(B), None)
    assert now.obs.flags.writeable and now.obs[1, 0] == 2.0
    # Not even by force: what the environment has is elsewhere.
    assert not np.shares_memory(kept[0], now.obs)

    def step(obs, _):
        policy.action(time_step(obs), policy.initial_state(B), KEY)
        return obs + 1, None

    with policy.raising():
        jax.block_until_ready(jax.jit(lambda obs: jax.lax.scan(step, obs, None, 3))(now.obs))
    np.testing.assert_array_equal(kept, copies)
    assert [obs[0, 0] for obs in kept] == [0, 0, 1, 2]


@pytest.mark.parametrize(("target", "batched"), [(Counter(), True), (Single(), False)])
def test_carry_is_reset_at_new_episodes_and_info_is_returned(target, batched):
    policy = PythonPolicy(target, SPEC, batched=batched, **COUNTER)
    first = jnp.array([False, True, False])
    carry = jnp.full(B, 2, jnp.int32)
    got = steps(policy, 3, carry, first)
    assert got.action.tolist() == [[2, 0, 2], [3, 1, 3], [0, 2, 0]] and got.action.dtype == jnp.int32
    assert got.carry[-1].tolist() == [5, 3, 5]
    assert got.info["seen"].tolist() == [[0.0, 2.0, 4.0]] * 3
    assert policy.initial_state(5).tolist() == [0] * 5
    directly = policy.direct_call()(jax.tree.map(np.asarray, time_step(first=first)), np.asarray(carry), None)
    assert directly.carry.tolist() == [3, 1, 3] and directly.info["seen"].dtype == np.float32


@pytest.mark.parametrize(
    ("answer", "error", "says"),
    [
        (lambda c: (c, c), TypeError, "must return a PolicyStep.*, got tuple"),
        (lambda c: None, TypeError, "must return a PolicyStep.*, got NoneType"),
        (lambda c: PolicyStep([0] * B), TypeError, r"carry must be an array of int32, got \(\)"),
        (lambda c: PolicyStep([0] * B, c[:2]), ValueError, r"carry must have shape \(3,\), got \(2,\)"),
        (lambda c: PolicyStep([0] * B, c * 0.5), TypeError, r"carry must have dtype int32 \(integers or bools\), got float64"),
        (lambda c: PolicyStep([0] * B, c, c), ValueError, r"info has the wrong structure: .* wanted \(\)"),
    ],
)
def test_invalid_carry_and_info_are_rejected(answer, error, says):
    policy = PythonPolicy(lambda time_step, carry: answer(carry), SPEC, carry_spec=np.int32(0), name="odd")
    with pytest.raises(error, match=f"PythonPolicy 'odd': {says}"):
        policy.direct_call()(jax.tree.map(np.asarray, time_step()), np.zeros(B, np.int32), None)


def test_input_carry_is_validated():
    policy = PythonPolicy(Counter(), SPEC, **COUNTER)
    with pytest.raises(ValueError, match=r"the input carry must have shape \(3,\), got \(2,\)"):
        policy.direct_call()(jax.tree.map(np.asarray, time_step()), np.zeros(2, np.int32), None)


def test_ten_thousand_calls_of_a_policy_that_runs_jitted_jax_do_not_deadlock():
    program = """
import jax, jax.numpy as jnp, numpy as np
from polyak import PythonPolicy, EnvSpec, TimeStep
from polyak.core.spaces import Box, Discrete
net = jax.jit(lambda x: (jnp.tanh(x @ jnp.ones((2, 64))) @ jnp.ones((64, 2))).argmax(1))
policy = PythonPolicy(lambda obs: np.asarray(net(obs)), EnvSpec(Box([-9.0] * 2, [9.0] * 2), Discrete(2)))
no = jnp.zeros(4, bool)
def step(obs, _):
    action = policy.action(TimeStep(obs, jnp.zeros(4), no, no, no), (), jax.random.key(0)).action
    return jnp.sin(obs + action[:, None]), None
jax.block_until_ready(jax.jit(lambda obs: jax.lax.scan(step, obs, None, 10_000))(jnp.ones((4, 2))))
print(policy.num_calls)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "10000", done.stderr


@pytest.mark.parametrize(
    ("target", "options"),
    [
        (lambda obs, seed: seeds.append(seed) or [0] * B, {}),
        (lambda obs, gain=2, *, seed: seeds.append(seed) or [0] * B, {}),
        (lambda time_step, carry, dice: seeds.append(dice) or PolicyStep([0] * B), {}),
        (lambda time_step, carry=(), seed=0: seeds.append(seed) or PolicyStep([0] * B), {}),
        (lambda obs, seed: seeds.append(seed) or 0, {"batched": False}),
    ],
)
def test_a_seed_comes_from_the_key_and_is_the_same_in_both_loops(target, options):
    policy = PythonPolicy(target, SPEC, **options)
    seeds.clear()
    jax.block_until_ready(policy.action(time_step(), (), KEY))
    compiled = list(seeds)
    seeds.clear()
    policy.direct_call()(jax.tree.map(np.asarray, time_step()), (), np.asarray(policy.seed(KEY, B)))
    assert seeds == compiled and len(set(seeds)) == (B if options else 1)
    assert all(type(seed) is int and 0 <= seed < 2**31 for seed in seeds)
    seeds.clear()
    jax.block_until_ready(policy.action(time_step(), (), jax.random.key(1)))
    assert seeds != compiled
    assert policy.python_calls.nondeterminism is None


seeds: list[int] = []


def test_policy_without_seed_is_reported_unless_deterministic():
    note = "PythonPolicy 'rule' takes no seed and is not declared deterministic"
    assert PythonPolicy(rule, SPEC).python_calls.nondeterminism == note
    assert PythonPolicy(rule, SPEC, deterministic=True).python_calls.nondeterminism is None
    assert isinstance(PythonPolicy(rule, SPEC).python_calls, PythonCalls)


def test_default_distribution_is_deterministic():
    for policy in (PythonPolicy(rule, SPEC), PythonPolicy(lambda obs: obs[:, :1] / 9, BOX)):
        distribution, carry = policy.distribution(time_step())
        action = policy.action(time_step(), (), KEY).action
        assert isinstance(distribution, Deterministic) and carry == ()
        assert distribution.mode().tolist() == action.tolist()
        assert distribution.log_prob(action).tolist() == [0.0] * B
    greedy = Greedy(PythonPolicy(rule, SPEC))
    assert greedy.action(time_step(), (), KEY).action.tolist() == [0, 1, 1]


class Odds(Counter):
    """Knows its distribution."""

    def distribution(self, time_step, carry):
        return np.eye(4)[carry] * 3, carry + 1


def test_distribution_method_of_the_object_is_used():
    policy = PythonPolicy(Odds(), SPEC, **COUNTER)
    distribution, carry = policy.distribution(time_step(), jnp.array([1, 2, 3], jnp.int32))
    assert isinstance(distribution, Categorical) and distribution.mode().tolist() == [1, 2, 3]
    assert carry.tolist() == [2, 3, 4]


@struct
class Linear:
    """A foreign model that is a tree of arrays."""

    weight: np.ndarray

    def __call__(self, obs):
        assert isinstance(self.weight, np.ndarray)
        return np.clip(obs @ self.weight, -1, 1)


def test_declared_variables_are_followed_by_soft_updates():
    online = PythonPolicy(Linear(np.full((2, 1), 0.5, np.float32)), BOX, variables=True)
    target = jax.tree.map(jnp.zeros_like, online)
    moved = soft_update(online, target, 0.25)
    obs = jnp.ones((B, 2))
    assert moved.action(time_step(obs), (), KEY).action.tolist() == [[0.25]] * B
    assert jax.jit(lambda policy: policy.action(time_step(obs), (), KEY).action)(online).tolist() == [[1.0]] * B
    in_numpy = jax.tree.map(np.asarray, moved).direct_call()
    assert in_numpy(jax.tree.map(np.asarray, time_step(obs)), (), None).action.tolist() == [[0.25]] * B


def test_policies_around_two_objects_follow_each_other_by_name():
    online, target = (PythonPolicy(Linear(np.full((2, 1), w, np.float32)), BOX, variables=True) for w in (0.5, 0.0))
    with pytest.raises(ValueError, match=r'static fields differ.*must match, or pass match="name" to pair leaves by name'):
        soft_update(online, target, 0.25)
    moved = soft_update(online, target, 0.25, match="name")
    assert moved.action(time_step(jnp.ones((B, 2))), (), KEY).action.tolist() == [[0.25]] * B and moved.callee is target.callee
    # Without variables there is nothing that could follow.
    online, target = PythonPolicy(lambda obs: obs[:, :1], BOX), PythonPolicy(lambda obs: obs[:, 1:], BOX)
    assert soft_update(online, target, 1.0).callee is target.callee


def test_clipped_actions_are_counted():
    policy = PythonPolicy(lambda obs: obs[:, :1] * 9, BOX, on_error="clip")
    assert steps(policy, 2).action[:, :, 0].tolist() == [[0.0, 1.0, 1.0]] * 2
    assert policy.clipped == 4


def test_predict_returns_native_actions_and_keeps_exceptions():
    policy = PythonPolicy(rule, EnvSpec(SPEC.obs, Discrete(4, start=10)))
    assert policy.predict(np.array([2.0, 0.0]))[0] == 11
    failing = PythonPolicy(lambda obs: {}["mine"], SPEC, name="odd")
    # Greedy has a predict of its own; the other is that of every wrapper.
    for wrapped in (failing, Greedy(failing), EpsilonGreedy(failing, 0.1)):
        with pytest.raises(KeyError, match="mine") as caught:
            wrapped.predict(np.zeros(2))
        assert caught.value.__notes__[0].startswith("raised by PythonPolicy 'odd' at its step 0")


def test_a_wrapper_as_plain_python_raises_what_the_policy_raised():
    def failing(obs):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        Greedy(PythonPolicy(failing, SPEC)).as_python()(np.zeros(SPEC.obs.shape, np.float32))


def test_policies_that_nobody_refers_to_are_freed_with_their_programs():
    env = ENV

    class Rule:
        def __call__(self, obs):
            return np.zeros(len(obs), np.int64)

    def count(kind):
        gc.collect()
        return sum(isinstance(each, kind) for each in gc.get_objects())

    programs = len(policy_faults._programs)
    for number in range(4):
        policy = PythonPolicy(Rule(), env.spec)
        Greedy(policy).predict(np.zeros(env.spec.obs.shape, np.float32))
        policy.predict(np.zeros(env.spec.obs.shape, np.float32))
        train.evaluate(policy, env, episodes=1, key=jax.random.key(number))
        train.evaluate(policy, JaxEnvOnHost(env, KEY), episodes=1, key=jax.random.key(number))
    assert count(Rule) == 1
    del policy
    assert count(Rule) == 0 and len(policy_faults._programs) <= programs


def test_a_policy_made_while_tracing_lives_as_long_as_its_program():
    made = jax.jit(lambda: Greedy(PythonPolicy(rule, SPEC)))
    for _ in range(2):
        gc.collect()
        assert made().policy.direct_call()(jax.tree.map(np.asarray, time_step()), (), None).action.tolist() == [0, 1, 1]


def test_predict_calls_a_python_policy_directly(monkeypatch):
    monkeypatch.setattr(policy_faults, "_compile", lambda *_: pytest.fail("compiled"))
    seen = []
    policy = PythonPolicy(lambda obs, seed: seen.append((type(obs), seed)) or [0], SPEC)
    policy.predict(np.zeros(2))
    policy.predict(np.zeros(2), deterministic=False, key=KEY)
    assert [kind for kind, _ in seen] == [np.ndarray] * 2 and seen[0][1] == 0
    assert seen[1][1] == int(policy.seed(KEY, 1))


def test_as_python_of_a_python_policy():
    plain = PythonPolicy(Counter(), SPEC, **COUNTER).as_python()
    step = plain.action(jax.tree.map(np.asarray, time_step()), plain.initial_state(B))
    assert step.carry.shape == (B,)
    assert PythonPolicy(rule, SPEC).as_python()(np.array([2.0, 0.0], np.float32)) == 1


class WithoutNotes(Exception):
    """An exception that takes no notes, and has no text either."""

    def add_note(self, note):
        raise TypeError("no notes")

    def __str__(self):
        raise TypeError("no text")


def test_an_exception_that_takes_no_notes_keeps_its_type():
    def failing(obs):
        raise WithoutNotes

    for policy in (PythonPolicy(failing, SPEC), PythonPolicy(lambda obs: failing(obs), SPEC, batched=False)):
        with pytest.raises(WithoutNotes):
            ExceptionRelay(policy).run(jax.jit(lambda policy=policy: policy.action(time_step(), (), KEY).action))


@dataclasses.dataclass(frozen=True)
class Frozen(Exception):
    """An exception whose attributes cannot be set, neither notes nor the context."""

    code: int


def test_a_frozen_exception_is_raised_as_it_is():
    def failing(obs):
        raise Frozen(4)

    policy = PythonPolicy(failing, SPEC)
    with pytest.raises(Frozen) as caught:
        ExceptionRelay(policy).run(jax.jit(lambda policy=policy: policy.action(time_step(), (), KEY).action))
    assert caught.value.__context__ is None


def test_each_thread_gets_its_own_exception():
    both = threading.Barrier(2, timeout=30)

    shared = PythonPolicy(lambda obs: (both.wait(), raise_by_name(obs)), SPEC)

    def raise_by_name(obs):
        raise (KeyError if obs[0, 0] > 0 else OSError)("mine")

    def work(sign, errors):
        now = time_step(jnp.full((B, 2), sign))
        try:
            ExceptionRelay(shared).run(jax.jit(lambda policy: policy.action(now, (), KEY).action), shared)
        except Exception as error:
            errors.append(type(error))

    errors = [], []
    threads = [threading.Thread(target=work, args=(sign, errors[i])) for i, sign in enumerate((1.0, -1.0))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert errors == ([KeyError], [OSError])
