"""What a policy says of its steps, policies as plain Python ones, and policies that follow each other."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.core.types import Policy
from polyak.ops.updates import soft_update
from polyak.policies.exploration import EpsilonGreedy, RandomWarmStart
from polyak.policies.info import with_info
from polyak.policies.mixture import Mixture
from polyak.policies.network_policy import DiscountedReturn, Greedy
from polyak.policies.noise import ActionSmoothing, GaussianNoise, MixedNoise, OUNoise
from polyak.policies.python.policy import PythonPolicy
from polyak.policies.scripted import Scripted, Uniform
from tests.agents.rollouts import same_bits
from tests.copies.inner import DISCRETE, Inner
from tests.policies.test_network_policy import BOX, KEY, REMEMBERS, SPEC, act, normalizer_of, policy_for, said, time_step
from tests.policies.test_predict import MASKED

OBS = jnp.asarray(np.random.default_rng(0).normal(size=(4, 3)), jnp.float32)
FIRST = time_step(OBS, first=np.ones(4, bool))


followed = jax.jit(soft_update, static_argnums=2)


@jax.jit
def log_prob(policy, now, carry, action):
    return policy.distribution(now, carry)[0].log_prob(action)


@pytest.mark.parametrize(
    "build",
    [
        Greedy,
        lambda p: GaussianNoise(OUNoise(p, 0.2), 0.2),
        lambda p: ActionSmoothing(OUNoise(DiscountedReturn(p, 0.9), 0.2), 0.5),
        lambda p: MixedNoise(p, 0.2, 0.2),
    ],
    ids=["greedy", "gaussian", "smoothed", "mixed"],
)
def test_with_info_adds_log_prob_value_and_id_through_recurrent_wrappers(build):
    inner = policy_for(BOX, network=REMEMBERS["gru"])
    policy = with_info(build(inner), policy_id=7)
    assert isinstance(policy, Policy)

    @jax.jit
    def two_steps(policy, key):
        one = policy.action(FIRST, policy.initial_state(4), key)
        return one, policy.action(time_step(2 * OBS), one.carry, key)

    one, two = two_steps(policy, KEY)
    assert jax.tree.structure(two.carry) == jax.tree.structure(policy.initial_state(4)), "the carry keeps its tree"
    remembered = inner.initial_state(4)
    for now, step, before in ((FIRST, one, policy.initial_state(4)), (time_step(2 * OBS), two, one.carry)):
        (_, value), remembered, _ = said(inner, now.obs, remembered)
        np.testing.assert_allclose(step.info["value"], value, rtol=1e-5)
        # A mode computed again outside of the program may differ in a bit.
        certain = isinstance(policy.policy, Greedy)
        wanted = jnp.zeros(4) if certain else log_prob(policy.policy, now, before, step.action)
        np.testing.assert_allclose(step.info["log_prob"], wanted, rtol=1e-3, atol=1e-4)
        assert np.array_equal(step.info["policy_id"], [7] * 4) and step.info["policy_id"].dtype == jnp.int32


def test_with_info_keeps_inner_info_and_outer_entries_win():
    policy = with_info(
        ActionSmoothing(with_info(policy_for(BOX, return_info=True), policy_id=1), 0.5), value=False, policy_id=2
    )
    carry = (policy.policy.policy.initial_state(4), jnp.ones((4, 2)))
    step = act(policy, time_step(OBS), carry)
    assert set(step.info) == {"value", "params", "log_prob", "policy_id"} and int(step.info["policy_id"][0]) == 2
    wanted = log_prob(policy, time_step(OBS), carry, step.action)
    np.testing.assert_allclose(step.info["log_prob"], wanted, rtol=1e-5)


def test_with_info_adds_the_value_where_a_policy_has_one():
    without = with_info(Uniform(SPEC))
    assert set(act(without, FIRST, ()).info) == {"log_prob"}
    with pytest.raises(ValueError, match="with_info: value must be False, no inner policy has a value, got Uniform"):
        with_info(Uniform(SPEC), value=True)
    with pytest.raises(ValueError, match="with_info: policy_id must be an integer >= 0, got -1"):
        with_info(Uniform(SPEC), policy_id=-1)


EXPLORERS = {
    "random start": lambda: polyak.PPO(BOX, network=polyak.MLP((8,), head=polyak.PolicyAndValue())),
    "sde": lambda: polyak.PPO(BOX, network=polyak.MLP((8,), head=polyak.PolicyAndValue(std="sde")), sde_sample_freq=4),
    "noisy": lambda: polyak.DQN(
        SPEC, network=polyak.MLP((8,), head=polyak.QValues(noisy=True)), replay=polyak.UniformReplay(100)
    ),
    "rnd": lambda: polyak.RND(
        polyak.PPO(BOX, network=polyak.MLP((8,), head=polyak.PolicyAndValue())),
        network=polyak.MLP((8,)),
        value=polyak.MLP((8,)),
    ),
    "actor": lambda: polyak.SAC(
        dataclasses.replace(BOX, action_scaling="rescale"),
        actor=polyak.Actor((8,)),
        critics=polyak.Critics((8,)),
        replay=polyak.UniformReplay(100),
    ),
}


@pytest.mark.parametrize("name", EXPLORERS)
def test_with_info_adds_the_value_to_what_agents_explore_with(name):
    agent = EXPLORERS[name]()
    state = agent.init(KEY)
    explorer = agent.collect_policy(state)
    policy = with_info(RandomWarmStart(explorer, 5) if name == "random start" else explorer)
    info = act(policy, FIRST, policy.initial_state(4)).info
    if name != "actor":
        valued, of_valued = (agent.agent, state.agent) if name == "rnd" else (agent, state)
        (_, wanted), _, _ = valued.network.apply(of_valued.copies.online, OBS)
        np.testing.assert_allclose(info["value"], wanted, rtol=1e-5)
        return
    # Critics stand beside it.
    assert set(info) == {"log_prob"}
    with pytest.raises(ValueError, match="with_info: value must be False, no inner policy has a value"):
        with_info(explorer, value=True)


class Stubborn:
    """Acts by the seed that it is given, and notes it."""

    def __init__(self, actions):
        self.actions, self.seeds = np.asarray(actions), []

    def action(self, obs, seed):
        self.seeds.append(int(seed))
        return self.actions[[seed % len(self.actions)] * len(obs)]


INDOORS = {
    "alone": (SPEC, lambda p: p),
    "told twice": (SPEC, lambda p: with_info(p, policy_id=1)),
    "mixed": (SPEC, lambda p: Mixture((with_info(p), with_info(p)))),
    "epsilon": (SPEC, lambda p: EpsilonGreedy(p, 0.5)),
    "smoothed": (BOX, lambda p: ActionSmoothing(p, 0.3)),
    "noise": (BOX, lambda p: GaussianNoise(p, 0.3)),
}


@pytest.mark.parametrize(("spec", "build"), INDOORS.values(), ids=INDOORS.keys())
def test_with_info_calls_a_python_policy_once_per_step(spec, build):
    asked = Stubborn([0, 1, 2, 3] if spec is SPEC else [[0.1, 0.7], [-1.3, 5.9]])
    python = PythonPolicy(asked.action, spec)
    policy = with_info(build(python))
    step = jax.jit(type(policy).action)(policy, FIRST, policy.initial_state(4), KEY)
    jax.block_until_ready(step)
    once = 2 if isinstance(policy.policy, Mixture) else 1
    assert python.num_calls == once == len(asked.seeds)
    draws = isinstance(policy.policy, EpsilonGreedy | GaussianNoise)
    assert draws == (asked.seeds == [0]), "the mode has no key"
    if not draws:
        assert np.array_equal(step.info["log_prob"], np.zeros(4))
    elif spec is SPEC:
        np.testing.assert_allclose(
            np.exp(step.info["log_prob"]), np.where(np.asarray(step.action) == 0, 0.625, 0.125), rtol=1e-5
        )
    else:
        assert np.all(np.isfinite(step.info["log_prob"]))


MANY = {
    "mlp": policy_for(SPEC),
    "masked": policy_for(MASKED),
    "box": policy_for(BOX),
    "squashed": policy_for(dataclasses.replace(BOX, action_scaling="rescale"), squash=True),
    "epsilon": EpsilonGreedy(policy_for(SPEC), 0.3),
    "noise": GaussianNoise(policy_for(BOX), 0.3),
}


def every_action(policy, *batch):
    """A mask that allows every action, where the policy needs one."""
    return {"a": np.ones((*batch, 3), bool), "b": None} if policy.spec.has_action_mask else None


@pytest.mark.parametrize("policy", MANY.values(), ids=MANY.keys())
def test_as_python_returns_the_same_bits(policy):
    plain = policy.as_python()
    now = time_step(OBS)
    action = jax.jit(lambda policy, now: policy.distribution(now, ())[0].mode())(policy, now)
    mask = every_action(policy, len(OBS))
    many = plain(np.asarray(OBS), mask)
    for got, wanted in zip(jax.tree.leaves(many), jax.tree.leaves(action), strict=True):
        assert isinstance(got, np.ndarray) and got.dtype == wanted.dtype
        bounded = np.clip(wanted, *policy.spec.action_bounds(BOX.action)) if got.dtype == np.float32 else wanted
        assert np.array_equal(got, bounded)
    one = plain(np.asarray(OBS[2]), every_action(policy))
    assert jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(x, y[2]), one, many))
    native, _ = policy.predict(np.asarray(OBS), action_mask=mask)
    # What is small, `predict` finds in NumPy, up to rounding.
    alike = partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6)
    jax.tree.map(alike, native, policy.spec.native_action(many))
    drawn = policy.as_python(deterministic=False).action(now, (), 5)
    again = jax.jit(lambda policy, now: policy.action(now, (), jax.random.key(5)).action)(policy, now)
    assert jax.tree.all(
        jax.tree.map(
            np.array_equal, policy.spec.native_action(drawn.action), policy.spec.native_action(jax.tree.map(np.array, again))
        )
    )


def test_as_python_of_a_recurrent_policy_has_initial_state_and_action():
    policy = Greedy(policy_for(BOX, network=REMEMBERS["lstm"], scale=0.3))
    plain = policy.as_python()
    carry, mine = plain.initial_state(4), policy.initial_state(4)
    assert same_bits(jax.tree.map(lambda x: x[0], carry), plain.carry_spec)
    for t in range(3):
        now = time_step((t + 1) * OBS, first=np.full(4, t == 0))
        step = plain.action(now, carry)
        wanted = jax.jit(type(policy).action)(policy, now, mine, KEY)
        assert np.array_equal(step.action, np.clip(wanted.action, BOX.action.low, BOX.action.high))
        assert same_bits(step.carry, jax.tree.map(np.asarray, wanted.carry))
        carry, mine = step.carry, wanted.carry
    with pytest.raises(TypeError, match="as_python: the policy is recurrent"):
        plain(np.zeros(3))


def test_as_python_rejects_observations_outside_the_space(unchecked):
    for wrong in (np.zeros(4), np.zeros((2, 4)), np.zeros((2, 2, 3)), 1.0):
        with pytest.raises(ValueError, match=r"as_python: obs must have shape \(3,\), got .*; a batch has shape \(N, 3\)"):
            policy_for(SPEC).as_python()(wrong)
    with pytest.raises(ValueError, match="as_python: obs must be finite, got"):
        policy_for(SPEC).as_python()([0.0, np.nan, 0.0])
    with pytest.raises(TypeError, match=r"as_python: obs must have dtype float32 \(floats or integers\), got <U1"):
        policy_for(SPEC).as_python()(["a", "b", "c"])


def test_as_python_accepts_lists():
    plain = policy_for(MASKED).as_python()
    every = {"a": [True, True, True], "b": None}
    assert plain([0, 1, 2], every)["a"] == plain(np.array([0.0, 1.0, 2.0]), every)["a"]
    mask = {"a": [False, True, False], "b": None}
    assert plain([0, 1, 2], mask)["a"] == 1
    assert np.array_equal(plain(OBS.tolist(), mask | {"a": [[False, False, True]] * 4})["a"], [2] * 4)


@pytest.mark.parametrize("policy", [policy_for(SPEC), policy_for(BOX, network=REMEMBERS["gru"])], ids=["mlp", "remembers"])
def test_python_policy_of_as_python_acts_the_same(policy):
    plain = policy.as_python()
    again = PythonPolicy(plain, policy.spec, carry_spec=plain.carry_spec)
    carry, compiled, direct = policy.initial_state(4), again.initial_state(4), plain.initial_state(4)
    act, modes = (
        again.direct_call(),
        jax.jit(lambda policy, *now: (lambda d, carry: (d.mode(), carry))(*policy.distribution(*now))),
    )
    for t in range(3):
        now = time_step((t + 1) * OBS, first=np.array([t == 0, t == 0, t != 1, t == 0]))
        action, carry = modes(policy, now, carry)
        inside, compiled = modes(again, now, compiled)
        step = act(now, direct, None)
        direct = step.carry
        bounded = np.clip(action, *policy.spec.action_bounds(BOX.action)) if action.dtype == np.float32 else action
        for got, its in ((inside, compiled), (step.action, direct)):
            assert np.array_equal(got, bounded) and same_bits(jax.tree.map(jnp.asarray, its), carry)
    assert again.num_calls == 6


def test_soft_update_between_policies():
    data = np.random.default_rng(1).normal(3.0, 2.0, (50, 3)).astype(np.float32)
    stats = [normalizer_of(data + np.float32(shift)) for shift in (0, 4)]
    a = dataclasses.replace(policy_for(SPEC), normalizer=stats[0])
    b = dataclasses.replace(policy_for(SPEC, scale=-0.5), normalizer=stats[1])
    for online, target in (
        (a, b),
        (EpsilonGreedy(a, 0.5, 100), EpsilonGreedy(b, 0.1)),
        (Mixture((a, a)), Mixture((b, b), (1, 3))),
    ):
        leaves = zip(*(jax.tree.leaves(tree) for tree in (online, target, followed(online, target, 0.25))), strict=True)
        for x, y, moved in leaves:
            whole = jnp.issubdtype(jnp.asarray(y).dtype, jnp.integer)
            np.testing.assert_allclose(moved, y if whole else y + 0.25 * (x - y), rtol=1e-5, atol=1e-6)
        copied = followed(online, target, 1.0)
        assert jax.tree.all(jax.tree.map(lambda x, y: np.array_equal(x, y), copied, online)) and type(copied) is type(online)
    moved = followed(a, b, 0.25).normalizer.stats
    np.testing.assert_allclose(moved.mean, 0.25 * stats[0].stats.mean + 0.75 * stats[1].stats.mean, rtol=1e-6)
    assert followed(a, b, 0.25).predict(np.zeros(3))[0] in range(2, 6)


def test_soft_update_rejects_policies_of_different_kinds():
    a = policy_for(SPEC)
    for other, message in (
        (policy_for(BOX), "only in target: 'variables/params/policy/log_std/all'"),
        (Greedy(a), "only in target: 'policy/noise_key', 'policy/normalizer', 'policy/variables"),
        (Scripted(SPEC, [(1, 0)]), "only in online"),
    ):
        with pytest.raises(ValueError, match=f"soft_update: .*{message}"):
            soft_update(a, other, 0.5)
    # Without arrays there is nothing to follow.
    assert soft_update(Uniform(SPEC), Uniform(BOX), 0.5).spec is BOX


def test_wrapper_rejects_objects_without_a_spec(unchecked):
    with pytest.raises(TypeError, match="Greedy: policy must have initial_state, distribution, action and spec, got 3"):
        Greedy(3)
    assert Greedy(Inner(jnp.zeros((1, 4)), DISCRETE)).spec is DISCRETE
