"""DDPG, TD3, SAC and TQC: when they learn, from what, and what they leave alone."""

import dataclasses
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import polyak
from polyak import loops
from polyak.agents.soft_actor import SoftActorCopies
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, MultiBinary
from polyak.core.types import Rollout, TimeStep, Variables
from polyak.learning.skip_counts import count_skips
from polyak.ops.distributions import TanhNormal
from polyak.ops.gradient_step import Guard, StepLog, flag_quantities
from polyak.policies.numpy_policies import numpy_actor
from polyak.replay import Transition
from tests.selection import quick

KEY = jax.random.key(0)
OBS = Box([-9.0] * 3, [9.0] * 3)
SPEC = EnvSpec(OBS, Box([-1.0] * 2, [1.0] * 2))
AGENTS = {"ddpg": polyak.DDPG, "td3": polyak.TD3, "sac": polyak.SAC, "tqc": polyak.TQC}
# The code of the bases, OffPolicyAgent and ActorCriticAgent, for one agent that has a distribution and one that has none.
of_the_bases = pytest.mark.parametrize("name", ["td3", "sac"])
# The order of the steps: TQC has that of SAC, in SoftActorAgent.
every_train_step = pytest.mark.parametrize("name", quick("td3", "sac", of=["ddpg", "td3", "sac"]))
# The losses, of which each agent has its own.
every_agent = pytest.mark.parametrize("name", quick("td3", "sac", of=list(AGENTS)))


def make(name, spec=SPEC, **settings):
    actor = polyak.Actor((8,), std="state" if name in ("sac", "tqc") else "fixed")
    critics = polyak.Critics((8,), num_critics=1 if name == "ddpg" else 2)
    small = {
        "actor": actor,
        "critics": critics,
        "replay": polyak.UniformReplay(512),
        "batch_size": 16,
        "learning_starts": 0,
        "num_steps": 4,
    }
    return AGENTS[name](spec, **{**small, "updates_per_step": 0.5, **settings})


def random_rollout(agent, num_envs=2, seed=0, **changes):
    rng = np.random.default_rng(seed)
    steps = agent.num_steps
    shape = steps + 1, num_envs
    zeros = jnp.zeros(shape, bool)
    time_steps = TimeStep(
        obs=jnp.asarray(rng.normal(size=(*shape, 3)), jnp.float32),
        reward=jnp.asarray(rng.normal(size=shape), jnp.float32),
        terminated=zeros,
        truncated=zeros,
        first=zeros,
    )
    changed = {name: change(getattr(time_steps, name)) for name, change in changes.items()}
    return Rollout(
        dataclasses.replace(time_steps, **changed), jnp.asarray(rng.uniform(-1, 1, size=(steps, num_envs, 2)), jnp.float32)
    )


# The agent is a pytree: tests with the same static settings share one program.
update = jax.jit(lambda agent, state, rollout, key: agent.update(state, rollout, key))


def updated(agent, rollouts, state=None):
    state = agent.init(KEY) if state is None else state
    for number, rollout in enumerate(rollouts):
        state, metrics = update(agent, state, rollout, jax.random.fold_in(KEY, number))
    return state, metrics


def batch(**changes):
    rng = np.random.default_rng(0)
    rows = Transition(
        obs=jnp.asarray(rng.normal(size=(6, 3)), jnp.float32),
        action=jnp.asarray(rng.uniform(-1, 1, size=(6, 2)), jnp.float32),
        action_mask=None,
        reward=jnp.ones(6),
        discount=jnp.full(6, 0.9),
        next_obs=jnp.asarray(rng.normal(size=(6, 3)), jnp.float32),
        next_action_mask=None,
        weight=jnp.full(6, 1 / 6, jnp.float32),
        index=jnp.arange(6, dtype=jnp.int32),
    )
    return dataclasses.replace(rows, **changes)


def first_steps(obs):
    zeros = jnp.zeros(len(obs), bool)
    return TimeStep(obs, jnp.zeros(len(obs)), zeros, zeros, ~zeros)


def equal(a, b):
    # NumPy says of two keys that they differ, whatever they are.
    is_key = lambda x: isinstance(x, jax.Array) and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)  # noqa: E731
    a, b = ([jax.random.key_data(x) if is_key(x) else x for x in jax.tree.leaves(tree)] for tree in (a, b))
    return all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.mark.slow
@of_the_bases
def test_actions_are_uniform_and_nothing_is_trained_before_learning_starts(name):
    agent = make(name, learning_starts=17)
    state, _ = updated(agent, [random_rollout(agent, seed=i) for i in range(2)])
    assert int(state.updates) == 0 and int(state.env_steps) == 16
    assert equal(state.copies, agent.init(KEY).copies)
    policy = agent.collect_policy(state)
    steps = first_steps(jnp.zeros((2000, 3)))
    actions = policy.action(steps, policy.initial_state(2000), KEY).action
    assert abs(float(actions.mean())) < 0.03 and abs(float(actions.var()) - 1 / 3) < 0.02
    state, _ = updated(agent, [random_rollout(agent, seed=2)], state)
    assert int(state.updates) == 4
    policy = agent.collect_policy(state)
    actions = policy.action(steps, policy.initial_state(2000), KEY).action
    assert bool((jnp.abs(actions) <= 1).all())
    if name != "sac":
        assert float(actions.std(axis=0).max()) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(("num_envs", "ratio", "steps"), [(4, 0.25, 4), (2, 2.0, 16)])
def test_gradient_steps_are_a_ratio_of_transitions(num_envs, ratio, steps):
    agent = make("td3", updates_per_step=ratio)
    state, _ = updated(agent, [random_rollout(agent, num_envs)])
    assert int(state.updates) == steps


@pytest.mark.slow
def test_rows_that_only_reset_do_not_reach_the_networks():
    agent = make("sac")
    rollout = random_rollout(agent, terminated=lambda x: x.at[2].set(True))
    # The row after the end: its action, and the reward that it leads to, belong to no transition.
    reward = rollout.time_steps.reward.at[3].set(1e6)
    other = Rollout(dataclasses.replace(rollout.time_steps, reward=reward), rollout.actions.at[2].multiply(-1.0))
    assert equal(*(updated(agent, [x])[0].copies for x in (rollout, other)))


@of_the_bases
def test_a_truncated_transition_bootstraps_and_a_terminal_one_does_not(name):
    agent = make(name, replay=polyak.UniformReplay(64), num_steps=1, updates_per_step=1.0)
    ring = agent.replay
    for flag, discount in (("terminated", 0.0), ("truncated", 0.99)):
        rollout = random_rollout(agent, **{flag: lambda x: x.at[1].set(True)})
        rows = ring.sample(ring.add(agent.init(KEY).replay, rollout), KEY, 8, num_envs=2, gamma=agent.gamma)
        np.testing.assert_allclose(rows.discount, discount)


@of_the_bases
@pytest.mark.parametrize("where", ["obs", "reward"])
def test_nan_reaches_neither_the_replay_nor_the_networks(name, where):
    agent = make(name)
    state, metrics = updated(agent, [random_rollout(agent, **{where: lambda x: x.at[1].set(jnp.nan)})])
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating))
    assert int(metrics["train/skipped_steps"]) == 0 and int(state.updates) == 4


@pytest.mark.slow
@pytest.mark.parametrize("where", ["obs", "reward", "action"])
def test_rollouts_of_which_nothing_can_be_stored_are_diagnosed(where):
    agent = make("sac", max_skipped_updates=3)
    rollout = random_rollout(agent, **({} if where == "action" else {where: lambda x: x * jnp.nan}))
    if where == "action":
        rollout = Rollout(rollout.time_steps, rollout.actions * jnp.nan)
    state, metrics = updated(agent, [random_rollout(agent), rollout, rollout])
    assert agent.diagnose(metrics) is None and int(state.guard.consecutive_skipped_updates) == 2
    state, metrics = updated(agent, [random_rollout(agent), rollout, rollout, rollout])
    said = agent.diagnose(metrics)
    assert "3 consecutive updates were skipped by a network" in said and f"NaN or infinite is {where!r}" in said


@pytest.mark.slow
@of_the_bases
def test_a_state_goes_on_with_another_period_and_tau_of_the_agent(name):
    agent = make(name)
    other = dataclasses.replace(agent, target_period=3, tau=0.5)
    state, _ = updated(agent, [random_rollout(agent)])
    before = int(state.copies.critics.target_count.fired)
    after, _ = update(other, state, random_rollout(agent), KEY)
    # Loops carry the state from update to update.
    assert jax.tree.structure(after) == jax.tree.structure(state)
    gradient_steps = int(after.updates) - int(state.updates)
    assert int(after.copies.critics.target_count.fired) - before == gradient_steps // 3
    again, _ = update(dataclasses.replace(agent, target_period=3), state, random_rollout(agent), KEY)
    assert not equal(again.copies.critics.target, after.copies.critics.target)


@pytest.mark.slow
def test_training_that_diverges_is_diagnosed():
    agent = make("sac", learning_rate=1e38, max_skipped_updates=2)
    state, metrics = updated(agent, [random_rollout(agent, seed=i, reward=lambda x: x * 1e30) for i in range(4)])
    assert "consecutive updates were skipped" in agent.diagnose(metrics)
    assert all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(state.copies) if jnp.issubdtype(x.dtype, jnp.floating))


@every_train_step
def test_the_target_interval_counts_across_calls_with_one_gradient_step_each(name):
    """Stable-Baselines3's SAC counts within a call, so that its interval is always 1."""
    agent = make(name, num_steps=1, updates_per_step=0.5, target_period=3, tau=1.0)
    state = agent.init(KEY)
    fired = []
    for number in range(7):
        state, _ = updated(agent, [random_rollout(agent, seed=number)], state)
        fired.append(int(state.copies.critics.target_count.fired))
    assert fired == [0, 0, 1, 1, 1, 2, 2]
    online, target = state.copies.critics.online.params, state.copies.critics.target.params
    assert not equal(online, target)


@every_agent
def test_weights_count_in_every_loss_of_as_many_samples_as_action_numbers(name):
    """TF-Agents' DDPG multiplies an actor loss [B, A] by weights [B]."""
    agent = make(name)
    copies = agent.init(KEY).copies
    actor, critics, alpha = copies.actor.online, copies.critics.online, jnp.array(0.3)
    two, is_soft = jax.tree.map(lambda x: x[:2], batch()), name in ("sac", "tqc")
    of_actor = {"alpha": alpha, "key": KEY} if is_soft else {}
    of_critics = {"actor": actor, "alpha": alpha} if is_soft else {"target_actor": actor}

    @jax.jit
    def losses(weight):
        rows = dataclasses.replace(two, weight=weight)
        found = [
            agent.actor_loss(actor.params, rows, actor=actor, critics=critics, **of_actor)[0],
            agent.critic_loss(critics.params, rows, critics=critics, target=critics, key=KEY, **of_critics)[0],
        ]
        return jnp.stack(found + ([agent.temperature_loss(alpha, rows, actor=actor, key=KEY)[0]] if is_soft else []))

    first, second, mixed = (losses(jnp.array(weight)) for weight in ([1.0, 0.0], [0.0, 1.0], [0.25, 0.75]))
    np.testing.assert_allclose(mixed, 0.25 * first + 0.75 * second, rtol=1e-5)
    assert float(jnp.abs(first - second).min()) > 1e-6


def params_of(copies):
    """By network, in NumPy; with α where there is one."""
    found = {"critics": copies.critics.online.params, "actor": copies.actor.online.params}
    found |= {"alpha": copies.temperature.log_alpha} if isinstance(copies, SoftActorCopies) else {}
    return jax.tree.map(np.array, found)


@pytest.mark.slow
@every_train_step
def test_each_network_learns_at_its_own_rate(name):
    """The first step of Adam is as large as its rate, in every weight with a gradient."""
    rates = {"critics": 1e-3, "actor": 2e-3} | ({"alpha": 4e-3} if name == "sac" else {})
    own = {f"{network}_learning_rate": rate for network, rate in rates.items() if network != "critics"}
    own |= {"policy_delay": 1} if name == "td3" else {}
    agent = make(name, num_steps=1, learning_rate=rates["critics"], **own)
    before = params_of(agent.init(KEY).copies)
    state, _ = updated(agent, [random_rollout(agent)])
    steps = jax.tree.map(lambda new, old: np.abs(new - old).max(), params_of(state.copies), before)
    largest = {network: max(jax.tree.leaves(tree)) for network, tree in steps.items()}
    assert largest == pytest.approx(rates, rel=1e-2) and int(state.updates) == 1


@pytest.mark.slow
def test_the_actor_of_ddpg_learns_from_the_new_critic(monkeypatch):
    """The gradients by the action in TF-Agents' reference are clipped so much that those of old and new critic agree."""
    rows = batch()
    monkeypatch.setattr(polyak.UniformReplay, "sample", lambda *args, **kwargs: rows)
    agent = make("ddpg", num_steps=1, optimizer=optax.sgd(0.5))
    before, after = agent.init(KEY).copies, updated(agent, [random_rollout(agent)])[0].copies
    actor = before.actor.online

    @jax.jit
    def stepped(critics):
        gradient = jax.grad(agent.actor_loss, has_aux=True)(actor.params, rows, actor=actor, critics=critics.online)[0]
        return jax.tree.leaves(jax.tree.map(lambda x, g: x - 0.5 * g, actor.params, gradient))

    found = jax.tree.leaves(after.actor.online.params)
    errors = [
        max(float(jnp.abs(a - b).max()) for a, b in zip(found, stepped(x), strict=True))
        for x in (after.critics, before.critics)
    ]
    assert errors[0] < 1e-6 and errors[1] > 1e-2


@every_agent
def test_evaluation_is_greedy(name):
    agent = make(name)
    policy = agent.policy(agent.init(KEY))
    steps = first_steps(jnp.ones((3, 3)))
    actions = [policy.action(steps, policy.initial_state(3), jax.random.key(i)).action for i in range(2)]
    np.testing.assert_array_equal(*actions)


@pytest.mark.slow
@of_the_bases
def test_an_average_of_the_actor_follows_every_gradient_step_and_is_evaluated(name):
    agent, plain = make(name, num_steps=1, ema_tau=0.25), make(name, num_steps=1)
    state, without = agent.init(KEY), plain.init(KEY)
    expected = jax.tree.map(np.array, state.copies.actor.online.params)
    for number in range(3):
        rollout = random_rollout(agent, seed=number)
        state, without = (updated(one, [rollout], then)[0] for one, then in ((agent, state), (plain, without)))
        online = state.copies.actor.online.params
        expected = jax.tree.map(lambda old, new: old + 0.25 * (np.asarray(new) - old), expected, online)
        got = agent.policy(state).policy.variables.params
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), got, expected)
    assert not equal(got, online) and equal(online, without.copies.actor.online.params)
    explorer = agent.collect_policy(state).policy
    assert equal((explorer if name in ("sac", "tqc") else explorer.policy).variables.params, online)
    assert equal(plain.policy(without).policy.variables.params, online)
    assert equal(plain.policy(state).policy.variables.params, online), "without ema_tau the average is not evaluated"
    for one, then, message in (
        (agent, without, "ema_tau=None but the agent sets"),
        (plain, state, "ema_tau but the agent has"),
    ):
        with pytest.raises(ValueError, match=f"this state was created with {message}"):
            one.update(then, rollout, KEY)


@pytest.mark.parametrize("scale", [0.1, 2.0, 50.0])
def test_entropy_is_that_of_unit_actions_whatever_the_units_of_the_environment(scale):
    """TF-Agents' SAC takes log-probabilities in the environment's units, which shifts the target by Σ log half-range."""
    wide = EnvSpec(OBS, Box([-scale] * 2, [scale] * 2), action_scaling="rescale")
    losses = []
    for spec in (SPEC, wide):
        agent = make("sac", spec)
        state = agent.init(KEY)
        log_alpha = state.copies.temperature.log_alpha
        loss = partial(agent.temperature_loss, batch=batch(), actor=state.copies.actor.online, key=KEY)
        losses.append(jax.grad(loss, has_aux=True)(log_alpha)[0])
    np.testing.assert_array_equal(*losses)


class Probe:
    """Critics that return something of their inputs."""

    def __init__(self, q):
        self.q = q

    def init(self, key, spec):
        return Variables({"none": jnp.zeros(())}, {})

    def apply(self, variables, obs, carry=(), *, train=False, key=None):
        return (self.q(*obs, train) + 0.0 * variables.params["none"], None), carry, {}


def test_td3_asks_critics_only_for_actions_within_the_bounds():
    """TF-Agents adds noise to the target action and does not clip it."""
    outside = Probe(lambda obs, action, train: jnp.repeat(jnp.max(jnp.abs(action), axis=1, keepdims=True), 2, axis=1))
    agent = make("td3", critics=outside, target_noise=5.0, target_noise_clip=5.0)
    state = agent.init(KEY)
    targets = agent.td_target(
        batch(reward=jnp.zeros(6), discount=jnp.ones(6)),
        target=state.copies.critics.variables("target"),
        target_actor=state.copies.actor.variables("target"),
        key=KEY,
    )
    assert float(targets.max()) == 1.0


@pytest.mark.slow
def test_the_target_actor_is_never_in_its_training_phase():
    """TF-Agents runs TD3's target actor with dropout on."""

    class Actor(polyak.Actor):
        def apply(self, variables, obs, carry=(), *, train=False, key=None):
            assert not train and key is None, "train"
            return super().apply(variables, obs, carry, train=train, key=key)

    for name in ("ddpg", "td3"):
        agent = make(name, actor=Actor((8,), std="fixed"))
        actor, critics = agent.init(KEY).copies.actor, agent.init(KEY).copies.critics
        args = {"target": critics.variables("target"), "target_actor": actor.variables("target"), "key": KEY}
        assert np.isfinite(agent.td_target(batch(), **args)).all()
        with pytest.raises(AssertionError, match="train"):
            agent.actor_loss(actor.online.params, batch(), actor=actor.online, critics=critics.online, key=KEY)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "delay"), [("td3", 2), ("sac", 3)])
def test_the_actor_steps_once_per_policy_delay_however_updates_are_cut(name, delay):
    for ratio, updates in ((0.5, 7), (2.0, 2)):
        agent = make(name, num_steps=1, updates_per_step=ratio, policy_delay=delay)
        state = agent.init(KEY)
        for number in range(updates):
            before = params_of(state.copies)
            state, _ = updated(agent, [random_rollout(agent, seed=number)], state)
            copies, steps = state.copies, int(state.updates)
            trained = [copies.actor.optimizer_state] + ([copies.temperature.optimizer_state] if name != "td3" else [])
            assert steps == (number + 1) * 2 * ratio
            assert [int(optax.tree.get(one, "count")) for one in trained] == [steps // delay] * len(trained)
            is_turn = steps // delay > (steps - 2 * ratio) // delay
            changed = {network: not equal(tree, before[network]) for network, tree in params_of(copies).items()}
            assert changed.pop("critics") and set(changed.values()) == {is_turn}


def test_updates_of_td3_without_an_actor_step_leave_its_loss_out_of_the_mean():
    agent = make("td3", num_steps=1, updates_per_step=0.5)
    state, losses = agent.init(KEY), []
    for number in range(4):
        state, metrics = updated(agent, [random_rollout(agent, seed=number)], state)
        losses.append(metrics["train/actor_loss"])
    assert [float(loss.count) for loss in losses] == [0.0, 1.0, 0.0, 1.0]
    assert [float(loss.total) for loss in losses[::2]] == [0.0, 0.0] and float(losses[1].total) != 0.0


@pytest.mark.parametrize(("name", "settings"), [("td3", {}), ("ddpg", {}), ("ddpg", {"exploration": "gaussian"})])
def test_no_exploration_noise_collects_greedily(name, settings):
    agent = make(name, exploration_noise=0.0, **settings)
    state, steps = agent.init(KEY), first_steps(jnp.ones((3, 3)))
    policies = agent.collect_policy(state), agent.policy(state)
    collected, greedy = (policy.action(steps, policy.initial_state(3), KEY).action for policy in policies)
    np.testing.assert_allclose(collected, greedy, rtol=1e-6)
    with pytest.raises(ValueError, match=r"exploration_noise must be a number in \[0, inf\)"):
        make(name, exploration_noise=-0.1, **settings)


def test_sac_target_of_known_numbers(monkeypatch):
    agent = make(
        "sac", critics=Probe(lambda obs, action, train: jnp.tile(jnp.array([[5.0, 4.0]]), (obs.shape[0], 1))), alpha=0.2
    )
    state = agent.init(KEY)
    monkeypatch.setattr(TanhNormal, "sample_and_log_prob", lambda self, *, seed: (jnp.zeros_like(self.loc), jnp.full(6, -1.5)))
    copies = state.copies
    targets = agent.td_target(
        batch(discount=jnp.full(6, 0.99)),
        target=copies.critics.variables("target"),
        actor=copies.actor.online,
        alpha=jnp.array(0.2),
        key=KEY,
    )
    np.testing.assert_allclose(targets, 5.257, rtol=1e-6)


@pytest.mark.slow
def test_a_learned_temperature_moves_the_entropy_towards_its_target():
    agent = make("sac", learning_rate=1e-2, target_entropy=-1.0, updates_per_step=8.0)
    state, metrics = updated(agent, [random_rollout(agent, seed=i) for i in range(12)])
    assert abs(float(metrics["train/entropy"]) + 1.0) < 0.5
    assert metrics["train/learning_rate"] == np.float32(1e-2)
    fixed = make("sac", alpha=0.25)
    state, metrics = updated(fixed, [random_rollout(fixed)])
    assert float(metrics["train/alpha"]) == 0.25 and float(state.copies.temperature.log_alpha) == 0.0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sac", "td3"])
def test_a_subset_of_critics_is_drawn_for_each_target(name):
    values = jnp.arange(5.0)
    ensemble = Probe(lambda obs, action, train: jnp.tile(values[None], (obs.shape[0], 1)))
    agent = make(name, critics=ensemble, num_target_critics=2)
    copies = agent.init(KEY).copies
    online, actor, target = copies.critics.online, copies.actor.online, copies.critics.variables("target")
    is_soft = name == "sac"
    args = {"actor": actor, "alpha": jnp.array(0.0)} if is_soft else {"target_actor": actor}
    rows = batch(reward=jnp.zeros(6), discount=jnp.ones(6))
    targets = jax.vmap(lambda key: agent.td_target(rows, target=target, **args, key=key))(jax.random.split(KEY, 200))
    assert float(jnp.ptp(targets, axis=1).max()) == 0.0
    # The smaller of two different numbers out of 0..4 is k with probability (4 - k) / 10.
    found = np.bincount(np.asarray(targets[:, 0], int), minlength=4)
    np.testing.assert_allclose(found / 200, [0.4, 0.3, 0.2, 0.1], atol=0.1)
    own = {"alpha": jnp.array(0.0), "key": KEY} if is_soft else {}
    for count, wanted in ((2, 2.0), (None, 0.0)):
        one = dataclasses.replace(agent, num_target_critics=count)
        loss, _ = one.actor_loss(actor.params, rows, actor=actor, critics=online, **own)
        np.testing.assert_allclose(loss, -wanted, rtol=1e-6)
    with pytest.raises(ValueError, match="num_target_critics must be at most the number of critics, 2, got 3"):
        make(name, num_target_critics=3).init(KEY)


@pytest.mark.parametrize("num_critics", [10, 2], ids=["redq", "droq"])
def test_losses_of_redq_and_droq_beside_numpy(num_critics, monkeypatch):
    """A minimum of two critics in the target, the mean of all for the actor; both with dropout on."""
    slopes = np.random.default_rng(0).normal(size=num_critics)
    by_hand = Probe(lambda obs, action, train: obs[:, :1] + action[:, :1] * jnp.asarray(slopes[None], "f4") + 10.0 * train)
    agent = make("sac", critics=by_hand, num_target_critics=2, reward_scale=3.0)
    copies, rows, alpha = agent.init(KEY).copies, batch(weight=jnp.array([0.3, 0.1, 0.0, 0.2, 0.15, 0.25])), 0.2
    action, log_prob = np.random.default_rng(1).normal(size=(6, 2)), np.linspace(-2.0, 1.0, 6)
    draw = jnp.asarray(action, jnp.float32), jnp.asarray(log_prob, jnp.float32)
    monkeypatch.setattr(TanhNormal, "sample_and_log_prob", lambda self, *, seed: draw)
    args = {"actor": copies.actor.online, "alpha": jnp.float32(alpha), "key": KEY}

    next_q, q = (np.asarray(obs)[:, :1] + action[:, :1] * slopes + 10.0 for obs in (rows.next_obs, rows.obs))
    pairs = [np.minimum(next_q[:, i], next_q[:, j]) for i in range(num_critics) for j in range(i)]
    possible = [3.0 * rows.reward + rows.discount * (smaller - alpha * log_prob) for smaller in pairs]
    targets = agent.td_target(rows, target=copies.critics.variables("target"), **args)
    assert sum(np.allclose(targets, wanted, rtol=1e-5) for wanted in possible) == 1
    loss, _ = agent.actor_loss(copies.actor.online.params, rows, critics=copies.critics.online, **args)
    np.testing.assert_allclose(loss, np.sum(np.asarray(rows.weight) * (alpha * log_prob - q.mean(1))), rtol=1e-5)


@pytest.mark.slow
def test_dropout_and_layer_norm_of_critics_are_on_while_training_only():
    agent = make("sac", critics=polyak.Critics((8,), num_critics=3, dropout=0.5, norm="layer"))
    state = agent.init(KEY)
    copies = state.copies

    @jax.jit
    def critic_loss(key):
        args = {"critics": copies.critics.online, "target": copies.critics.variables("target"), "actor": copies.actor.online}
        return agent.critic_loss(copies.critics.online.params, batch(), **args, alpha=jnp.array(0.0), key=key)[0]

    assert float(critic_loss(KEY)) != float(critic_loss(jax.random.key(1)))
    assert int(updated(agent, [random_rollout(agent)])[0].updates) == 4


def test_the_gradient_of_ddpgs_actor_is_that_of_q_clipped_by_number():
    slopes = jnp.array([3.0, -0.1])
    linear = Probe(lambda obs, action, train: action @ slopes[:, None])
    agent = make("ddpg", critics=linear, max_dqda=0.5)
    actor = agent.init(KEY).copies.actor.online

    def gradient(agent):
        def loss(params):
            return agent.actor_loss(params, batch(), actor=actor, critics=agent.init(KEY).copies.critics.online)[0]

        return jax.grad(loss)(actor.params)["policy"]["linear"]["bias"]

    free, clipped = gradient(make("ddpg", critics=linear)), gradient(agent)
    np.testing.assert_allclose(clipped / free, [0.5 / 3.0, 1.0], rtol=1e-5)


@pytest.mark.slow
def test_no_copy_of_the_replay_in_the_compiled_update():
    agent = make("sac", replay=polyak.UniformReplay(65_536), learning_starts=64, n_step=3)
    state, rollout = agent.init(KEY), random_rollout(agent)

    def several(state, key):
        return jax.lax.scan(lambda state, key: (agent.update(state, rollout, key)[0], None), state, jax.random.split(key, 3))[0]

    text = jax.jit(several, donate_argnums=0).lower(state, KEY).compile().as_text()
    assert "65536" in text and not [line for line in text.splitlines() if " copy(" in line and "[65536" in line]


@pytest.fixture(scope="module")
def pendulum():
    return polyak.envs.make("jax/Pendulum-v1", num_envs=4, action_scaling="rescale")


def make_for_loops(name, env):
    replay = polyak.UniformReplay(4096)
    return make(name, env.spec, learning_starts=64, replay=replay, updates_per_step=0.25, policy_delay=2, ema_tau=0.1)


@pytest.mark.slow
def test_host_and_compiled_loop_learn_the_same_and_two_seeds_of_one_program_are_two_single_runs(pendulum):
    agent, keys = make_for_loops("sac", pendulum), jax.random.split(KEY, 2)
    alone = [loops.compiled(agent, pendulum, env_steps=192, key=key) for key in keys]
    assert not equal(*(one.state.copies.actor.online.params for one in alone)) and int(alone[0].state.updates) == 36
    others = [*loops.compiled_seeds(agent, pendulum, env_steps=192, keys=keys)]
    others.append(loops.host(agent, pendulum, env_steps=192, key=keys[0]))
    for one, other in zip([*alone, alone[0]], others, strict=True):
        for a, b in zip(jax.tree.leaves(one.state), jax.tree.leaves(other.state), strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-3, atol=1e-3)


@pytest.mark.slow
@of_the_bases
def test_two_devices_learn_the_same_weights(name, pendulum):
    split = loops.compiled(make_for_loops(name, pendulum), pendulum, env_steps=512, key=KEY, devices=2)
    assert int(split.state.updates) == 116
    for weights in (split.state.copies.critics.online.params, split.state.copies.average.params):
        assert equal(*(shard.data for shard in jax.tree.leaves(weights)[0].addressable_shards))


@pytest.mark.slow
def test_actions_in_a_tree():
    spec = EnvSpec(OBS, Dict({"a": Box([-1.0], [1.0]), "b": Box([[-1.0, -1.0]], [[1.0, 1.0]])}))
    for name in ("td3", "sac"):
        agent = make(name, spec, num_steps=2)
        flat = random_rollout(agent)
        actions = {"a": flat.actions[..., :1], "b": jnp.stack([flat.actions], axis=-2)}
        state, _ = updated(agent, [dataclasses.replace(flat, actions=actions)])
        assert int(state.updates) == 2


@pytest.mark.parametrize(
    ("action", "message"),
    [
        (MultiBinary((2,)), "actions must be Boxes.*, got .*MultiBinary.*PPO"),
        (Box([0], [3], dtype=np.int32), r"got Box\(0, 3, .*int32\); PPO, A2C and IMPALA take Boxes of integers$"),
        (Box([-2.0], [2.0]), r"actions must lie in \[-1, 1\], got .*action_scaling='rescale'"),
        (Box([-2.0], [np.inf]), r"a Box needs finite bounds, got Box\(-2.*; give .*TransformAction\)$"),
        (Dict({"a": Box([-1.0], [1.0]), "b": Discrete(2)}), "at action 'b'"),
    ],
)
@every_agent
def test_actions_must_be_unit_boxes(name, action, message):
    with pytest.raises(ValueError, match=message):
        AGENTS[name](EnvSpec(OBS, action))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"actor": polyak.LSTM(head=polyak.PolicyAndValue())}, "replay must be a SequenceReplay with a recurrent actor"),
        ({"actor": polyak.MLP(head=polyak.QValues())}, "actor must return .* got MLP"),
        ({"actor": polyak.MLP()}, "actor must return .* got MLP"),
        ({"actor": polyak.Critics()}, "actor must return .* got Critics"),
        ({"critics": polyak.MLP(head=polyak.PolicyAndValue())}, r"critics must return \(q, None\) .* got "),
        ({"critics": polyak.Actor()}, r"critics must return \(q, None\) .* got Actor"),
        ({"critics": polyak.MLP()}, r"critics must return \(q, None\) .* got "),
        ({"actor": "mlp"}, "actor must have init and apply"),
        ({"critics": "mlp"}, "critics must have init and apply"),
        ({"actor": polyak.Actor(squash_mean=True)}, "squash_mean must be False"),
        ({"gamma": 2.0}, "gamma"),
        ({"tau": 0.0}, "tau"),
        ({"optimizer": optax.sgd(0.1), "learning_rate": 2e-3}, r"learning_rate has no effect with optimizer=\.\.\."),
    ],
)
@every_agent
def test_settings_are_checked(name, settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make(name, **settings).init(KEY)


@pytest.mark.slow
def test_rewards_are_summed_over_n_steps():
    def td_errors(gamma):
        agents = [make("sac", gamma=gamma, n_step=n) for n in (1, 3)]
        return [float(updated(agent, [random_rollout(agent)])[1]["train/td_error"]) for agent in agents]

    one, three = td_errors(0.0)
    assert one == three  # γ = 0 leaves the first reward of the sum
    one, three = td_errors(0.9)
    assert abs(one - three) > 1e-3


@pytest.mark.slow
def test_actions_of_half_precision_are_learned_from():
    agent = make("td3", EnvSpec(OBS, Box([-1.0] * 2, [1.0] * 2, dtype=np.float16)))
    state, metrics = updated(agent, [random_rollout(agent)])
    assert int(state.updates) == 4 and np.isfinite(float(metrics["train/td_error"]))
    # Those that a data set has are taken too.
    halves = random_rollout(agent)
    state = agent.add(state, Rollout(halves.time_steps, halves.actions.astype(jnp.float16)))
    assert state.replay.rows.action.dtype == jnp.float32 and int(state.replay.dropped) == 0


def test_ddpg_takes_one_critic():
    with pytest.raises(ValueError, match=r"critics must be one critic, .*got 2; TD3 takes several"):
        make("ddpg", critics=polyak.Critics((8,))).init(KEY)


@pytest.mark.slow
@every_agent
def test_prioritized_replay_learns_and_gives_new_priorities(name):
    agent = make(name, replay=polyak.PrioritizedReplay(512))
    state, metrics = updated(agent, [random_rollout(agent, seed=i) for i in range(3)])
    assert int(state.updates) == 12 and int(metrics["replay/rejected_priorities"]) == 0
    assert 0 < float(metrics["train/importance_weight"]) < 1
    # A TD error is not the 1 of new rows.
    assert abs(float(metrics["replay/mean_priority"]) - 1.0) > 1e-3


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("sac", {"alpha": 0.2, "target_entropy": -3.0}, "target_entropy has no effect with a fixed alpha"),
        ("sac", {"optimizer": optax.sgd(0.1), "alpha_learning_rate": 1e-5}, "alpha_learning_rate has no effect"),
        ("ddpg", {"exploration": "gaussian", "theta": 0.5}, "theta has no effect"),
    ],
)
def test_settings_without_effect_are_rejected(name, settings, message):
    with pytest.raises(ValueError, match=message):
        make(name, **settings)


def test_a_target_entropy_above_that_of_random_actions_is_rejected():
    with pytest.raises(ValueError, match=r"SAC: target_entropy must be at most \d log 2 = \d\.\d+, .* got 5$"):
        make("sac", target_entropy=5.0)


def test_the_largest_target_entropy_may_be_rounded_to_float32():
    for dimensions in (3, 47, 376):
        spec = EnvSpec(OBS, Box([-1.0] * dimensions, [1.0] * dimensions))
        largest = np.float32(dimensions * np.log(2.0))
        assert make("sac", spec, target_entropy=largest).target_entropy == largest
        with pytest.raises(ValueError, match="target_entropy must be at most"):
            make("sac", spec, target_entropy=1.00001 * float(largest))


@pytest.mark.parametrize("name", ["sac", "tqc"])
def test_the_default_target_entropy_of_boxes_is_minus_the_number_of_action_numbers(name):
    """TF-Agents has half of it, and its docstring the whole (defect 8)."""
    tree = EnvSpec(OBS, Dict({"a": Box([-1.0], [1.0]), "b": Box([[-1.0, -1.0]], [[1.0, 1.0]])}))
    for spec, numbers in ((SPEC, 2), (tree, 3)):
        found = make(name, spec).default_target_entropy(None)
        assert found.dtype == jnp.float32
        np.testing.assert_array_equal(found, [-float(numbers)])
    actor = make(name).init(KEY).copies.actor.online
    args = {"batch": batch(), "actor": actor, "key": KEY}
    losses = [make(name, target_entropy=x).temperature_loss(jnp.array(0.3), **args)[0] for x in (None, -2.0)]
    np.testing.assert_array_equal(*losses)


@pytest.mark.parametrize("name", ["sac", "tqc"])
def test_an_automatic_target_entropy_is_the_default(name):
    assert make(name, target_entropy="auto") == make(name) and make(name, target_entropy="auto", alpha=0.2).alpha == 0.2
    with pytest.raises(TypeError, match=r"target_entropy must be a number in \(-inf, inf\) or 'auto' or None, got 'Auto'"):
        make(name, target_entropy="Auto")


def test_target_entropies_of_a_batch_of_agents_are_checked():
    agents = jax.tree.map(lambda *values: jnp.array(values), *(make("sac", target_entropy=x) for x in (-1.0, -2.0)))
    changed = dataclasses.replace(agents, num_steps=2)
    np.testing.assert_array_equal(changed.target_entropy, [-1.0, -2.0])
    assert make("sac", target_entropy=np.array([-1.0])).target_entropy.shape == (1,)
    with pytest.raises(ValueError, match=r"SAC: target_entropy must be at most 2 log 2 = 1\.386, .* got 5$"):
        make("sac", target_entropy=jnp.array([-1.0, 5.0, 6.0]))


class BrokenActor(polyak.Actor):
    """Its output is finite, and its gradient is not."""

    def apply(self, variables, obs, carry=(), *, train=False, key=None):
        (params, value), carry, stats = super().apply(variables, obs, carry, train=train, key=key)
        return ({**params, "loc": params["loc"] + jnp.sqrt(0.0 * params["loc"])}, value), carry, stats


def test_an_actor_that_fails_in_every_step_is_diagnosed():
    schedule = polyak.Linear(1e-3, env_steps=100)
    agent = make("ddpg", actor=BrokenActor((8,), std="fixed"), max_skipped_updates=3, learning_rate=schedule)
    state, metrics = updated(agent, [random_rollout(agent, seed=i) for i in range(3)])
    # Two rollouts of 8 transitions came before.
    assert float(metrics["train/learning_rate"]) == pytest.approx(0.84e-3)
    assert "'gradient'" in agent.diagnose(metrics) and int(state.guard.consecutive_skipped_updates) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("name", "delay"), [("td3", 2), ("sac", 1), ("tqc", 3)])
def test_an_actor_that_fails_whenever_it_is_its_turn_is_diagnosed_in_time(name, delay):
    std = "fixed" if name == "td3" else "state"
    # Rollouts of one step in two environments: one gradient step for each.
    agent = make(name, actor=BrokenActor((8,), std=std), max_skipped_updates=3, policy_delay=delay, num_steps=1)
    state, rows = agent.init(KEY), []
    for number in range(4 * delay):
        state, metrics = update(agent, state, random_rollout(agent, seed=number), jax.random.fold_in(KEY, number))
        rows.append(int(state.guard.consecutive_skipped_updates))
    assert rows == [number // delay for number in range(1, 4 * delay + 1)]
    assert "4 consecutive updates were skipped by a network" in agent.diagnose(metrics)
    assert "'gradient'" in agent.diagnose(metrics)
    # The critics learn on, and it is their steps that are counted.
    assert int(metrics["train/n_updates"]) == 4 * delay and int(metrics["train/skipped_steps"]) == 4


def test_a_row_of_failures_ends_when_every_network_took_a_step_and_not_before():
    def after(guard, skipped, applied, *, valid=4, dropped=0):
        bad = jnp.stack([flag_quantities({"gradient": jnp.any(jnp.array(step))}) for step in skipped])
        log = StepLog({}, bad, jnp.array(applied), jnp.array(skipped))
        bad_data = flag_quantities({"obs": jnp.array(dropped > 0)})
        return count_skips(guard, log, jnp.uint32(dropped), jnp.uint32(valid), bad_data)

    critics_fail, actor_fails = [[True, False]], [[False, True]]
    none, critics_only, both = [[False, False]], [[True, False]], [[True, True]]
    guard = after(after(Guard.init(), critics_fail, none), actor_fails, critics_only)
    assert int(guard.consecutive_skipped_updates) == 2
    for kept in (after(guard, none, critics_only), after(guard, none, none, valid=0)):
        assert int(kept.consecutive_skipped_updates) == 2
    for ended in (after(guard, none, both), after(guard, none, none), after(guard, [*none, *critics_fail], [*both, *none])):
        assert int(ended.consecutive_skipped_updates) == 0
    assert int(after(guard, none, both, dropped=4).consecutive_skipped_updates) == 3
    assert int(guard.skipped) == 2


@pytest.mark.parametrize("name", ["td3", "ddpg"])
def test_a_policy_without_a_distribution_samples_its_mode(name):
    agent = make(name)
    state, obs = agent.init(KEY), np.ones((5, 3), np.float32)
    for policy in (agent.policy(state), agent.policy(state).policy):
        mode = policy.predict(obs)[0]
        np.testing.assert_allclose(policy.predict(obs, deterministic=False, key=KEY)[0], mode, rtol=1e-6)
        step = policy.action(first_step(obs), (), KEY)
        np.testing.assert_allclose(step.action, mode, rtol=1e-6)
    sampled = make("sac").policy(make("sac").init(KEY)).predict(obs, deterministic=False, key=KEY)[0]
    assert not np.allclose(sampled, make("sac").policy(make("sac").init(KEY)).predict(obs)[0], atol=1e-2)


def first_step(obs):
    no = jnp.zeros(len(obs), bool)
    return TimeStep(jnp.asarray(obs), jnp.zeros(len(obs)), no, no, ~no)


@pytest.mark.parametrize("deterministic", [True, False])
def test_acting_in_numpy_samples_what_jax_samples(deterministic, unchecked):
    policy = dataclasses.replace(make("td3").policy(make("td3").init(KEY)).policy, is_deterministic=deterministic)
    obs = np.ones((2, 3), np.float32)
    actor = numpy_actor(policy, 2)
    noise, act = actor.noise(policy, KEY, 2), actor.start(jax.tree.map(np.asarray, policy))
    in_jax = policy.action(first_step(obs), (), KEY).action
    np.testing.assert_allclose(act(first_step(obs), (), np.asarray(noise)).action, in_jax, rtol=1e-5)
    assert deterministic == bool(np.allclose(in_jax, policy.predict(obs)[0], rtol=1e-5))


@of_the_bases
def test_a_state_with_another_replay_is_rejected(name):
    agent = make(name)
    state = agent.init(KEY)
    created = r"\.update: this state was created with "
    with pytest.raises(ValueError, match=created + "capacity=512 but the agent has 1024"):
        update(dataclasses.replace(agent, replay=polyak.UniformReplay(1024)), state, random_rollout(agent), KEY)
    prioritized = dataclasses.replace(agent, replay=polyak.PrioritizedReplay(512))
    with pytest.raises(ValueError, match=created + "replay.priorities=True but the agent has False"):
        update(agent, prioritized.init(KEY), random_rollout(agent), KEY)
    with pytest.raises(ValueError, match=created + "replay.priorities=False but the agent has True"):
        update(prioritized, state, random_rollout(agent), KEY)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("ddpg", {"exploration": "ou", "ema_tau": 0.1}),
        ("td3", {"replay": polyak.PrioritizedReplay(512), "normalize_reward": "return"}),
        ("sac", {"sde_sample_freq": 2, "actor": polyak.Actor((8,), std="sde"), "normalize_obs": True}),
    ],
)
def test_states_are_in_32_bits_where_jax_has_64(name, settings, unchecked):
    env = polyak.envs.make("jax/Pendulum-v1", num_envs=2, action_scaling="rescale")
    with jax.enable_x64(True):
        agent = make(name, env.spec, **settings)
        result = loops.compiled(agent, env, env_steps=40, key=jax.random.key(0))
    wide = {str(x.dtype) for x in jax.tree.leaves(result.state)} & {"float64", "int64", "uint64"}
    assert not wide and int(result.state.updates) > 0


@pytest.mark.slow
def test_states_of_tqc_are_in_32_bits_where_jax_has_64(unchecked):
    """In the loops it is SAC but for its loss."""
    agent = make("tqc", replay=polyak.PrioritizedReplay(512))
    with jax.enable_x64(True):
        state, _ = jax.eval_shape(agent.update, jax.eval_shape(agent.init, KEY), random_rollout(agent), KEY)
    assert not {str(x.dtype) for x in jax.tree.leaves(state)} & {"float64", "int64", "uint64"}


def test_a_state_of_another_optimizer_is_rejected():
    for name in ("td3", "sac"):
        state = make(name).init(KEY)
        agent = make(name, optimizer=optax.sgd(0.1))
        with pytest.raises(ValueError, match="created with another optimizer"):
            agent.update(state, random_rollout(agent), KEY)


class Transposed(polyak.Critics):
    """Two critics, whose values of two observations have the right shape."""

    def apply(self, variables, obs, carry=(), *, train=False, key=None):
        (q, none), carry, stats = super().apply(variables, obs, carry, train=train, key=key)
        return (q.T, none), carry, stats


class TransposedActor(polyak.Actor):
    """Likewise, for two actions."""

    def apply(self, variables, obs, carry=(), *, train=False, key=None):
        (params, value), carry, stats = super().apply(variables, obs, carry, train=train, key=key)
        return (jax.tree.map(jnp.transpose, params), value), carry, stats


@pytest.mark.slow
def test_networks_whose_outputs_are_transposed_are_rejected():
    with pytest.raises(ValueError, match=r"q of B = 97 observations must have shape \[B, N\], got \[2, 97\]"):
        make("sac", critics=Transposed((8,))).init(KEY)
    with pytest.raises(ValueError, match="the actor's action_params do not fit Box"):
        make("sac", actor=TransposedActor((8,))).init(KEY)
