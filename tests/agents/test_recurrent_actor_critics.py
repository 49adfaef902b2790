"""Recurrent SAC and TD3: losses along sequences, the state of critics, resuming, and a task that needs memory."""

import dataclasses
import itertools
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak import loops
from polyak.agents.resets import keep_layers
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec
from polyak.core.struct import struct
from polyak.core.types import Rollout, TimeStep
from polyak.envs.autoreset import AutoReset
from polyak.learning.actor_critic_updates import min_of_critics
from polyak.loops.collect import collect_rollouts
from polyak.networks.unroll import reset_carry
from polyak.ops.distributions import for_space
from polyak.replay import SequenceReplay
from tests.agents.resuming import check_resuming, in_both_loops
from tests.agents.test_actor_critics import equal
from tests.agents.test_dqn_recurrent import Recall

KEY = jax.random.key(0)
SMALL = {"num_steps": 4, "replay": SequenceReplay(256, 8, burn_in=2), "learning_starts": 32, "batch_size": 4, "n_step": 2}


@struct
class RecallSign(Recall):
    """`Recall` with a Box action: the last reward is action times sign."""

    @property
    def spec(self):
        return EnvSpec(super().spec.obs, Box([-1.0], [1.0]), "recall-sign", action_scaling="rescale")

    def step(self, state, action, key):
        sign, steps = state
        over = steps == 4
        return (sign, steps + 1), jnp.where(over, sign * action[:, 0], 0.0), over, jnp.zeros_like(over)


@struct
class CutRecall(RecallSign):
    """`RecallSign` whose episodes are cut short before the last step."""

    def step(self, state, action, key):
        state, reward, over, _ = super().step(state, action, key)
        return state, reward + action[:, 0], jnp.zeros_like(over), over


def make(name, env, width=4, before=(6,), hidden=(5,), **settings):
    """A recurrent agent, with layers before and after the actor's cell; `"discrete"` is SAC."""
    cls = polyak.TD3 if name == "td3" else polyak.SAC
    # No unit of tanh is dead from the start.
    head = polyak.Actor(hidden, std="fixed" if name == "td3" else "state", activation="tanh")
    actor = polyak.GRU(width, hidden=before, activation="tanh", head=head)
    critics = polyak.LSTM(width, hidden=(), head=polyak.Critics(hidden, activation="tanh"))
    return cls(env.spec, **{"actor": actor, "critics": critics} | SMALL | settings)


ENVS = {"sac": RecallSign, "discrete": Recall, "td3": CutRecall}


@pytest.fixture(scope="module", params=ENVS)
def case(request):
    """An agent, its state, rollouts, a function that draws a batch of them, and the losses with their gradients."""
    name = request.param
    env = AutoReset(ENVS[name](), 3)
    agent = make(name, env)
    state = agent.init(KEY)
    rollouts = list(itertools.islice(collect_rollouts(agent.collect_policy(state), env, 4, key=KEY), 8))
    # A target that differs from the online network.
    critics = dataclasses.replace(state.copies.critics, target=jax.tree.map(lambda x: 0.5 * x, state.copies.critics.target))
    copies = dataclasses.replace(state.copies, critics=critics)
    add = jax.jit(agent.replay.add)
    sample = jax.jit(partial(agent.replay.sample, batch_size=8, num_envs=3, n_step=2, gamma=0.9))

    def draw(rollouts):
        replay = state.replay
        for rollout in rollouts:
            replay = add(replay, rollout)
        batch = sample(replay, KEY)
        assert (np.asarray(batch.weight) == 0).any() and np.asarray(batch.obs.first)[3:8].any()
        return replay, dataclasses.replace(batch, weight=batch.weight / batch.weight.sum())

    gradients = jax.jit(lambda batch: of_both(losses(name, agent, copies, batch, KEY), copies))
    return Case(name, agent, copies, rollouts, draw, gradients)


@dataclasses.dataclass
class Case:
    name: Any
    agent: Any
    copies: Any
    rollouts: Any
    draw: Any
    gradients: Any


def of_both(functions, copies):
    """The critics' loss and its gradient, and the actor's."""
    of_critics, of_actor = map(jax.value_and_grad, functions)
    return of_critics(copies.critics.online.params), of_actor(copies.actor.online.params)


def states_before(advance, network, obs, first, carry, burn_in=0):
    """The carry before each of the time steps, by a loop; no gradient flows into the burn-in."""
    carries = []
    for t in range(len(first)):
        carry = jax.lax.stop_gradient(carry) if t == burn_in else carry
        carries.append(reset_carry(network, carry, first[t]))
        carry = advance(jax.tree.map(lambda x, t=t: x[t], obs), carries[-1])
    return jax.tree.map(lambda *x: jnp.stack(x), *carries)


def of_actor(agent, variables):
    return lambda obs, carry: agent.actor.apply(variables, obs, carry)[1]


def of_critics(agent, variables):
    """The action that is given counts for no state."""
    action = lambda obs: None if isinstance(agent.spec.action, Discrete) else jnp.full((len(obs), 1), jnp.nan)  # noqa: E731
    return lambda obs, carry: agent.critics.apply(variables, (obs, action(obs)), carry)[1]


def rows(tree, index):
    """The steps of the batch's transitions."""
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:])[index], tree)


def slow_actor(agent, variables, obs):
    """The parameters of the actor's distribution for the batch's transitions, each computed by itself."""
    advance = of_actor(agent, variables)
    carries = states_before(advance, agent.actor, obs.obs, obs.first, obs.carry["actor"], obs.burn_in)
    return agent.actor.apply(variables, *rows((obs.obs, carries), obs.index))[0][0]


def slow_critics(agent, variables, obs, action):
    """The values of the batch's transitions with these actions, each computed by itself."""
    advance = of_critics(agent, variables)
    carries = states_before(advance, agent.critics, obs.obs, obs.first, obs.carry["critic"], obs.burn_in)
    seen, carry = rows((obs.obs, carries), obs.index)
    return agent.critics.apply(variables, (seen, action), carry)[0][0]


def slow_losses(name, agent, copies, batch, key):
    """The critics' and the actor's loss, as functions of their parameters, of the step-by-step outputs."""
    target, key = copies.critics.variables("target"), jax.random.split(key)[0]

    def with_params(variables, params):
        return dataclasses.replace(variables, params=params)

    def draw(variables, obs, key):
        distribution = for_space(agent.spec.action, slow_actor(agent, variables, obs), squash=True)
        if name == "sac":
            return distribution.sample_and_log_prob(seed=key)
        return (distribution.mode(), 0.0) if name == "td3" else (None, distribution.log_probs())

    def soft_value(q, log_prob, alpha):
        return jnp.sum(jnp.exp(log_prob) * (q - alpha * log_prob), axis=1) if name == "discrete" else q - alpha * log_prob

    def critic_loss(params):
        actor = copies.actor.variables("target") if name == "td3" else copies.actor.online
        action_key = jax.random.split(key, 3)[0]
        action, log_prob = draw(actor, batch.next_obs, action_key)
        action = agent._smooth(action, action_key) if name == "td3" else action
        next_q = min_of_critics(slow_critics(agent, target, batch.next_obs, action), None, key)
        y = batch.reward + batch.discount * soft_value(next_q, log_prob, 0.0 if name == "td3" else 1.0)
        q = slow_critics(agent, with_params(copies.critics.online, params), batch.obs, batch.action)
        if name == "discrete":
            q = jnp.take_along_axis(q, batch.action[:, None, None], axis=2)[..., 0]
        scale = 1.0 if name == "td3" else 0.5
        error = scale * jnp.square(jax.lax.stop_gradient(y)[:, None] - q).sum(axis=1)
        return jnp.sum(jnp.where(batch.weight > 0, error, 0.0) * batch.weight)

    def actor_loss(params):
        action, log_prob = draw(with_params(copies.actor.online, params), batch.obs, KEY)
        q = slow_critics(agent, copies.critics.online, batch.obs, action)
        q = q[:, 0] if name == "td3" else jnp.min(q, axis=1)
        value = soft_value(q, log_prob, 0.0 if name == "td3" else 1.0)
        return -jnp.sum(jnp.where(batch.weight > 0, value, 0.0) * batch.weight)

    return critic_loss, actor_loss


def losses(name, agent, copies, batch, key):
    """The agent's losses, as functions of the parameters."""
    if name == "td3":
        of_critics = {"target": copies.critics.variables("target"), "target_actor": copies.actor.variables("target")}
        of_actor = {}
    else:
        of_critics = {"target": copies.critics.variables("target"), "actor": copies.actor.online, "alpha": jnp.ones(())}
        of_actor = {"alpha": jnp.ones(())}
    critic = partial(agent.critic_loss, batch=batch, critics=copies.critics.online, key=key, **of_critics)
    actor = partial(
        agent.actor_loss, batch=batch, actor=copies.actor.online, critics=copies.critics.online, key=KEY, **of_actor
    )
    return lambda params: critic(params)[0], lambda params: actor(params)[0]


@pytest.mark.slow
def test_losses_and_gradients_are_those_of_one_step_after_the_other(case):
    _, batch = case.draw(case.rollouts)
    slow = slow_losses(case.name, case.agent, case.copies, batch, KEY)
    got, wanted = case.gradients(batch), jax.jit(lambda: of_both(slow, case.copies))()
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=2e-4, atol=1e-6)
    assert all(np.any(leaf) for _, gradient in got for leaf in jax.tree.leaves(gradient["stack"]["cell"]))


@pytest.mark.slow
def test_the_stored_states_are_those_of_actor_and_critics_along_the_episodes(case):
    replay, _ = case.draw(case.rollouts)
    agent, copies = case.agent, case.copies
    obs, first = (jnp.concatenate([getattr(rollout, name) for rollout in case.rollouts]) for name in ("obs", "first"))
    networks = {"actor": (agent.actor, of_actor(agent, copies.actor.online))}
    networks["critic"] = agent.critics, of_critics(agent, copies.critics.online)
    for name, (network, advance) in networks.items():
        carries = states_before(jax.jit(advance), network, obs, first, network.initial_carry(3))
        stored = jax.tree.map(lambda x: x[: len(case.rollouts) * 3], replay.carries[name])
        for a, b in zip(jax.tree.leaves(carries), jax.tree.leaves(stored), strict=True):
            # Where an episode begins, the carry is reset only when it is used.
            begins = np.asarray(first[::4]).ravel()[:, None]
            np.testing.assert_allclose(np.where(begins, 0.0, a[::4].reshape(b.shape)), np.where(begins, 0.0, b), atol=1e-6)
            assert np.any(np.asarray(b))


@pytest.mark.slow
def test_what_is_hidden_changes_no_bit(case):
    def hide(rollout):
        last = rollout.time_steps.last[:-1]
        is_float = rollout.actions.dtype == jnp.float32
        actions = jnp.where(last[..., None], jnp.nan, rollout.actions) if is_float else jnp.where(last, 1, rollout.actions)
        reward = rollout.time_steps.reward.at[1:].set(jnp.where(last, jnp.nan, rollout.reward))
        return dataclasses.replace(rollout, actions=actions, time_steps=dataclasses.replace(rollout.time_steps, reward=reward))

    _, batch = case.draw(case.rollouts)
    _, hidden = case.draw(map(hide, case.rollouts))
    wanted = case.gradients(batch)
    assert equal(case.gradients(hidden), wanted)
    # The transitions of one episode alone: what was before it in a sequence, and what comes after it, does not count.
    t = np.asarray(batch.obs.index) // 8
    begin = np.argmax(np.asarray(batch.obs.first)[3:7], axis=0) + 3
    has_begun = np.asarray(batch.obs.first)[begin, np.arange(8)]
    is_learned = (t == begin[np.asarray(batch.obs.index) % 8]) & has_begun[np.asarray(batch.obs.index) % 8]
    after = np.asarray(batch.next_obs.index) // 8
    steps = np.arange(9)[:, None]
    seen = np.zeros((9, 8), bool)
    for row in np.flatnonzero(is_learned & (np.asarray(batch.weight) > 0)):
        seen[:, row % 8] = (steps[:, 0] >= t[row]) & (steps[:, 0] <= after[row])
    assert seen.any() and not seen.all()
    weight = jnp.where(is_learned, batch.weight, 0.0)
    other = dataclasses.replace(
        batch.obs,
        obs=jnp.where(seen[..., None], batch.obs.obs, 3.0),
        carry=jax.tree.map(lambda x: x + 1.0, batch.obs.carry),
    )
    alone = dataclasses.replace(batch, weight=weight)
    changed = dataclasses.replace(alone, obs=other, next_obs=dataclasses.replace(other, index=batch.next_obs.index))
    assert equal(case.gradients(changed), case.gradients(alone))
    assert not equal(case.gradients(alone), wanted)


@pytest.mark.slow
@in_both_loops
def test_a_recurrent_run_resumes_to_the_bit(loop, devices, tmp_path):
    name = {"compiled": "sac", "host": "td3"}[loop]
    agent_for = lambda spec: make(name, SimpleNamespace(spec=spec))  # noqa: E731
    check_resuming(agent_for, "Pendulum-v1", loop, devices, tmp_path, action_scaling="rescale")


LEARNING = {
    "num_steps": 5,
    "updates_per_step": 0.1,
    "learning_starts": 500,
    "learning_rate": 5e-3,
    "tau": 0.05,
    "batch_size": 32,
    "n_step": 1,
}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["sac", "discrete", "td3", "plain"])
def test_only_recurrent_networks_solve_a_task_that_needs_memory(name):
    env = AutoReset((Recall if name == "discrete" else RecallSign)(), 16)
    exploration = {"alpha": 0.05}
    if name == "td3":
        exploration = {"exploration_noise": 0.5, "learning_starts": 1_000, "actor_learning_rate": 1e-3}
    agent = make(name, env, width=16, before=(), hidden=(16,), **LEARNING | exploration | {"replay": SequenceReplay(8_000, 10)})
    if name == "plain":
        networks = {"actor": agent.actor.head, "critics": agent.critics.head, "replay": polyak.UniformReplay(8_000)}
        agent = dataclasses.replace(agent, **networks)
    result = loops.compiled(agent, env, env_steps=7_000, key=KEY)
    mean = np.mean(polyak.evaluate(agent.policy(result.state), env, episodes=200, key=KEY).returns)
    assert abs(mean) < 0.2 if name == "plain" else mean > 0.9, mean


def test_predict_carries_the_actors_state_alone():
    agent = make("sac", AutoReset(RecallSign(), 3))
    state = agent.init(KEY)
    policy, obs = agent.policy(state), np.array([[0.5, -0.5], [0.2, 0.3]], np.float32)
    carry, got = agent.actor.initial_carry(2), None
    for _ in range(2):
        params, carry, _ = agent.actor.apply(state.copies.actor.online, jnp.asarray(obs), carry)
        action, got = policy.predict(obs, got)
        np.testing.assert_allclose(action, jnp.tanh(params[0]["loc"]), rtol=1e-5)
        np.testing.assert_allclose(got, carry, rtol=1e-5)


VIEWS = EnvSpec(Dict({"seen": Box([-1.0], [1.0]), "hidden": Box([-1.0], [1.0])}), Box([-1.0], [1.0]), action_scaling="rescale")


def test_critics_of_the_whole_state_need_no_memory():
    agent = polyak.SAC(
        VIEWS, actor=polyak.GRU(4, hidden=()), critics=polyak.Critics((5,)), actor_obs="seen", critic_obs="hidden", **SMALL
    )
    assert agent.actor.head == polyak.Actor() and agent.initial_carry()["critic"] == ()

    def outputs():
        state = agent.init(KEY)
        batch = agent.replay.sample(state.replay, KEY, 4, num_envs=3, gamma=0.9)
        q = agent.q_values(state.copies.critics.online, batch.obs, batch.action)
        return q, agent.draw_actions(state.copies.actor.online, batch.obs, None, KEY)[0].action

    q, action = jax.eval_shape(outputs)
    assert q.shape == (24, 2) and action.shape == (24, 1)


def test_actor_and_critics_carry_what_they_see():
    networks = {"actor": polyak.GRU(4, hidden=()), "critics": polyak.LSTM(3, hidden=())}
    agent = polyak.SAC(VIEWS, actor_obs="seen", normalize_obs=True, normalize_reward="return", **networks, **SMALL)

    def acted():
        policy = agent.collect_policy(agent.init(KEY))
        rewards, flags = jnp.zeros(3), jnp.ones(3, bool)
        step = TimeStep({name: jnp.zeros((3, 1)) for name in ("seen", "hidden")}, rewards, ~flags, ~flags, flags)
        return policy.action(step, policy.initial_state(3), KEY).carry

    carry, _ = jax.tree.map(lambda x: x.shape, jax.eval_shape(acted))
    assert carry == {"actor": (3, 4), "critic": ((3, 3), (3, 3))}


def test_critics_beside_a_recurrent_actor_have_its_cell_unless_they_are_set():
    actor = polyak.GRU(4, hidden=(3,), activation="tanh")
    agent = polyak.TQC(RecallSign().spec, actor=actor, num_quantiles=7, **SMALL)
    assert agent.critics == dataclasses.replace(actor, head=polyak.Critics(num_critics=5, num_quantiles=7))
    assert dataclasses.replace(agent, gamma=0.9).critics == agent.critics


@dataclasses.dataclass(frozen=True)
class OwnRecurrentActor:
    """A user's actor, which counts its steps."""

    init = polyak.Actor((4,)).init

    def initial_carry(self, batch_size):
        return jnp.zeros((batch_size, 1))

    def apply(self, variables, obs, carry=(), *, train=False, key=None):
        out, _, stats = polyak.Actor((4,)).apply(variables, obs)
        return out, carry + 1, stats


@pytest.mark.parametrize("networks", [{"actor": OwnRecurrentActor(), "critics": None}, {"critics": polyak.Critics((5,))}])
def test_critics_that_remember_nothing_are_warned_of(networks):
    with pytest.warns(UserWarning, match="SAC: critics without a recurrent state see no more than the recurrent actor"):
        make("sac", RecallSign(), **networks)


@pytest.mark.parametrize("networks", [{"actor": polyak.GRU}, {"actor": polyak.GRU(4), "critics": polyak.LSTM}])
def test_a_class_is_no_network(networks):
    with pytest.raises(TypeError, match=r"SAC: (actor|critics) must have init and apply, such as MLP\(\), got <class"):
        make("sac", RecallSign(), **networks)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"replay": polyak.UniformReplay(256)},
            "SAC: replay must be a SequenceReplay with a recurrent actor",
        ),
        (
            {"actor": polyak.Actor(), "critics": None},
            "must be a SequenceReplay .* got replay=SequenceReplay.* actor=Actor",
        ),
        ({"actor": polyak.Actor(), "replay": polyak.UniformReplay(256)}, "critics must not be recurrent beside an actor that"),
        ({"actor": polyak.GRU(4, head=polyak.Critics())}, r"actor must return \(action_params, value\)"),
        ({"critics": polyak.GRU(4, head=polyak.Actor())}, r"critics must return \(q, None\)"),
        ({"critics": polyak.GRU(4, head=polyak.QValues())}, r"critics must return \(q, None\)"),
        ({"weight_norm": True}, "weight_norm must be False with recurrent networks"),
        ({"max_noise_repeats": 4}, "max_noise_repeats must be None with a recurrent actor"),
        ({"num_steps": 8}, "sequence_length - burn_in must be at least num_steps=8"),
        ({"critics": polyak.Critics((4,), norm="batch")}, "networks must have no batch normalization with a SequenceReplay"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*critics without a recurrent state")
def test_settings_are_checked(settings, message):
    with pytest.raises(ValueError, match=message):
        make("sac", RecallSign(), **settings).init(KEY)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        (polyak.Critics(dropout=0.1), "LSTM: dropout must be 0 in the critics of a recurrent network, got 0.1"),
        (polyak.Critics(norm="batch"), "LSTM: the head of a recurrent network must have neither batch normalization nor"),
        (polyak.Actor((8, 8), residual="hypersphere"), "LSTM: the head of a recurrent network must have neither batch"),
        (polyak.Critics((8, 8), residual="inverted"), "neither batch normalization nor 'hypersphere' or 'inverted' blocks"),
        (polyak.Actor(std="sde"), "LSTM: std must be 'free', 'state' or 'fixed' in a recurrent network, got 'sde'"),
    ],
)
def test_heads_are_checked(head, message):
    with pytest.raises(ValueError, match=message):
        polyak.LSTM(8, head=head)
    with pytest.raises(TypeError, match="MLP: head must be a head such as PolicyAndValue"):
        polyak.MLP((8,), head=head)


@pytest.mark.parametrize("algorithm", ["CrossQ", "XQC", "CQL", "TD3BC"])
def test_other_actor_critics_take_no_sequences(algorithm):
    cls = getattr(polyak, algorithm)
    with pytest.raises(ValueError, match=f"{algorithm}: actor must not be recurrent, .*SAC and TD3 train recurrent ones"):
        cls(RecallSign().spec, actor=polyak.GRU(4, head=polyak.Actor()))
    with pytest.raises(ValueError, match=f"{algorithm}: replay must draw transitions; sequences are for recurrent networks"):
        cls(RecallSign().spec, replay=SequenceReplay(256))


def test_noise_of_ddpg_is_not_stored():
    critics = polyak.GRU(4, head=polyak.Critics((5,), num_critics=1))
    settings = SMALL | {"actor": polyak.GRU(4, head=polyak.Actor(std="fixed")), "critics": critics}
    with pytest.raises(ValueError, match="DDPG: exploration must be 'gaussian' with a SequenceReplay"):
        polyak.DDPG(RecallSign().spec, **settings)
    assert polyak.DDPG(RecallSign().spec, exploration="gaussian", **settings).takes_sequences
    with pytest.raises(ValueError, match="DDPG: parameter_noise must be None with a recurrent actor"):
        polyak.DDPG(RecallSign().spec, parameter_noise=0.2, **settings)


def test_resets_keep_the_head_of_critics_and_not_all_that_follows_the_cell():
    agent = make("sac", RecallSign(), reset_period=8, reset_keeps="head")
    params = jax.eval_shape(lambda: agent.init(KEY)).copies.critics.online.params
    kept = keep_layers({"head"}, jax.tree.map(lambda x: True, params), jax.tree.map(lambda x: False, params))
    of_critics = {name: all(jax.tree.leaves(part)) for name, part in kept.pop("on_cell").items()}
    assert of_critics == {"layers": False, "head": True} and not any(jax.tree.leaves(kept))


def test_a_rollout_of_another_policy_is_named():
    agent = make("sac", RecallSign())
    rewards, flags = jnp.zeros((5, 3)), jnp.zeros((5, 3), bool)
    steps = TimeStep(jnp.zeros((5, 3, 2)), rewards, flags, flags, flags)

    def updated():
        state = agent.init(KEY)
        rollout = Rollout(steps, jnp.zeros((4, 3, 1)), {}, agent.policy(state).initial_state(3))
        return agent.update(state, rollout, KEY)

    with pytest.raises(ValueError, match=r"rollout.carry must have the recurrent states of collect_policy\(state\), got"):
        jax.eval_shape(updated)
