"""An actor and a critic that see different entries of the observation.

The oracle is an agent that sees everything, whose first layers have weights of 0 for the entries that are not seen.
"""

import dataclasses
from functools import partial
from operator import itemgetter

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.agents.a2c import A2C
from polyak.agents.ddpg import DDPG
from polyak.agents.impala import IMPALA
from polyak.agents.ppo import PPO
from polyak.agents.ppo_kl import PPOKL
from polyak.agents.sac import SAC
from polyak.agents.td3 import TD3
from polyak.agents.tqc import TQC
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec
from polyak.core.struct import static, struct
from polyak.core.types import TimeStep
from polyak.envs.autoreset import AutoReset
from polyak.envs.classic import CartPole
from polyak.export.write_policy import write_policy
from polyak.networks.actor import Actor
from polyak.networks.adapters import FlaxNNX
from polyak.networks.critics import Critics
from polyak.networks.feedforward import MLP
from polyak.networks.heads import PolicyOnly, ValueOnly
from polyak.networks.pair import ActorAndCritic
from polyak.networks.recurrent import GRU, LSTM
from polyak.networks.unroll import unroll
from polyak.replay.replay import Transition
from polyak.replay.uniform import UniformReplay
from tests.agents.rollouts import fresh, on_device, rollout, same_bits

STATE, HIDDEN = 3, 2
OBS = Dict({"hidden": Box(-np.ones(HIDDEN), np.ones(HIDDEN)), "state": Box(-np.ones(STATE), np.ones(STATE))})
SPEC = EnvSpec(OBS, Box(-np.ones(2), np.ones(2)), action_scaling="rescale")
VIEWS = {"actor_obs": "state", "critic_obs": ("hidden",)}
ON_POLICY = {A2C: {}, IMPALA: {}, PPO: {}, PPOKL: {}}
SMALL = {"replay": UniformReplay(64), "batch_size": 4, "actor": Actor((8,)), "critics": Critics((8,))}
OFF_POLICY = {
    SAC: SMALL,
    TQC: SMALL | {"critics": Critics((8,), num_critics=2)},
    TD3: SMALL | {"actor": Actor((8,), std="fixed")},
    DDPG: SMALL | {"actor": Actor((8,), std="fixed"), "critics": Critics((8,), num_critics=1)},
}
AGENTS = {cls: {"network": MLP((8,))} for cls in ON_POLICY} | OFF_POLICY
EACH = pytest.mark.parametrize("cls", AGENTS, ids=lambda cls: cls.__name__)
KEY = jax.random.key(3)


def make(cls, spec=SPEC, **settings):
    return cls(spec, **{**AGENTS[cls], **VIEWS, **settings})


def time_step(obs):
    flags = np.zeros(len(obs["state"]), bool)
    return jax.tree.map(jnp.asarray, TimeStep(obs, flags.astype(np.float32), flags, flags, ~flags))


def random_obs(rows=4, seed=0):
    rng = np.random.default_rng(seed)
    return {name: rng.uniform(-1, 1, (rows, space.shape[0])).astype(np.float32) for name, space in OBS.spaces.items()}


@EACH
def test_policy_needs_the_entries_of_the_actor_alone(cls):
    agent = make(cls, normalize_obs=True)
    state = jax.jit(agent.init)(KEY)
    policy, obs = agent.policy(state), random_obs()
    assert policy.spec.obs == Dict({"state": OBS.spaces["state"]})
    acted = policy.predict({"state": obs["state"]})[0]
    np.testing.assert_array_equal(acted, policy.predict(obs)[0])
    distribution = policy.distribution(time_step(obs), policy.initial_state(4))[0]
    np.testing.assert_allclose(acted, SPEC.native_action(distribution.mode()), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match="predict: obs must be a tree of 'state'; 'state' is missing"):
        policy.predict({"hidden": obs["hidden"]})
    # Nothing of the critic is in the policy.
    assert {leaf.shape[-2] for leaf in jax.tree.leaves(policy) if leaf.shape[-1:] == (8,) and leaf.ndim > 1} == {STATE}


@EACH
def test_loss_is_the_loss_of_an_agent_with_zero_weights_for_what_is_not_seen(cls):
    agent, full = make(cls), make(cls, actor_obs=None, critic_obs=None)
    got, wanted = (losses_of(each, variables) for each, variables in zip((agent, full), variables_of(agent, full), strict=True))
    assert set(got) == set(wanted) and len(got) >= 3
    # The weights of 0 have a gradient.
    for name, value in (term for term in wanted.items() if term[0] != "grad_norm"):
        np.testing.assert_allclose(got[name], value, rtol=2e-5, atol=1e-6, err_msg=name)


def variables_of(agent, full):
    """The networks' variables of an agent with views, and the same weights in an agent that sees everything."""
    if hasattr(agent, "network"):
        small = fresh(agent).copies.online
        actor, critic = small.params["actor"], small.params["critic"]
        params = {
            "actor": widen(actor["actor"], "dense/layers/0/kernel", before=HIDDEN),
            "critic": widen(critic["critic"], "dense/layers/0/kernel", after=STATE),
            "policy": actor["policy"],
            "value": critic["value"],
        }
        shapes = jax.eval_shape(lambda key: full.network.init(key, full.spec), KEY)
        assert jax.tree.map(jnp.shape, params) == jax.tree.map(jnp.shape, shapes.params)
        return small, dataclasses.replace(shapes, params=params)
    states = [jax.jit(each.init)(KEY).copies for each in (agent, full)]
    (actor, critics), (full_actor, full_critics) = [(copies.actor.online, copies.critics.online) for copies in states]
    actor_params = widen(actor.params, "actor/dense/layers/0/kernel", before=HIDDEN)
    critics_params = widen(critics.params, "layers/0/linear/kernel", after=STATE, behind=HIDDEN)
    wide = dataclasses.replace(full_actor, params=actor_params), dataclasses.replace(full_critics, params=critics_params)
    return (actor, critics), wide


def widen(params, path, before=0, after=0, behind=None):
    """A tree with rows of zeros in one kernel: before all, and after all or behind the first ones."""
    name, _, rest = path.partition("/")
    if rest:
        key = name if name in params else int(name)
        return {**params, key: widen(params[key], rest, before, after, behind)}
    kernel = params[name]
    behind = kernel.shape[-2] if behind is None else behind
    kernel = np.insert(kernel, [behind] * after, 0, axis=-2)
    return {**params, name: jnp.asarray(np.insert(kernel, [0] * before, 0, axis=-2))}


def losses_of(agent, variables):
    if hasattr(agent, "network"):
        state = fresh(agent)
        copies = dataclasses.replace(state.copies, online=variables)
        state = dataclasses.replace(state, copies=copies)
        data = on_device(rollout(SPEC, 0, num_steps=6, num_envs=4))
        if isinstance(agent, IMPALA):
            policy = agent.collect_policy(state)
            rows = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), data.time_steps)
            info = jax.jit(lambda rows: policy.action(rows, (), KEY).info)(rows)
            info = jax.tree.map(lambda x: x.reshape(7, 4, *x.shape[1:])[:-1], info)
            data = dataclasses.replace(data, info=info)
        if hasattr(agent, "gradients"):
            return jax.jit(agent.gradients)(state, data, KEY)[1].terms
        metrics = jax.jit(partial(ppo_losses, agent))(state, data)
        return metrics
    actor, critics = variables
    rng = np.random.default_rng(0)
    batch = Transition(
        obs=random_obs(seed=1),
        action=rng.uniform(-1, 1, (4, 2)).astype(np.float32),
        reward=rng.normal(size=4).astype(np.float32),
        next_obs=random_obs(seed=2),
        discount=np.full(4, 0.9, np.float32),
        weight=np.full(4, 0.25, np.float32),
        index=np.zeros(4, np.int32),
        action_mask=None,
        next_action_mask=None,
    )
    batch = jax.tree.map(jnp.asarray, batch)
    if isinstance(agent, SAC | TQC):
        alpha = jnp.float32(0.3)
        of_critics = agent.critic_loss(
            critics.params, batch, critics=critics, target=critics, actor=actor, alpha=alpha, key=KEY
        )
        of_actor = agent.actor_loss(actor.params, batch, actor=actor, critics=critics, alpha=alpha, key=KEY)
    else:
        of_critics = agent.critic_loss(critics.params, batch, critics=critics, target=critics, target_actor=actor, key=KEY)
        of_actor = agent.actor_loss(actor.params, batch, actor=actor, critics=critics, key=KEY)
    return {"critics": of_critics[0], "actor": of_actor[0]} | of_critics[1].terms | of_actor[1].terms


def ppo_losses(agent, state, data):
    weight = data.valid.astype(jnp.float32)
    batch, _ = agent._make_batch(state, data, weight, None)
    batch = dataclasses.replace(batch, weight=batch.weight / batch.weight.sum())
    loss, aux = agent.loss(state.copies.online.params, batch, state)
    return {"loss": loss, "advantage": batch.advantage, **aux.terms}


PAIRS = {
    "both": ActorAndCritic(LSTM(4, hidden=(5,)), GRU(3, hidden=())),
    "actor": ActorAndCritic(GRU(4, hidden=(5,)), MLP((6, 6))),
    "critic": ActorAndCritic(None, LSTM(4, hidden=(5,))),
}


@pytest.mark.parametrize("name", PAIRS)
def test_recurrent_halves_in_one_unroll_are_as_step_by_step(name):
    agent = make(PPO, network=PAIRS[name])
    network, rng = agent.network, np.random.default_rng(0)
    variables = fresh(agent).copies.online
    obs = jax.tree.map(lambda *rows: jnp.stack(rows), *[random_obs(seed=t) for t in range(6)])
    first = jnp.asarray(rng.random((6, 4)) < 0.3)
    carry = jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), network.initial_carry(4))
    policy = agent.collect_policy(dataclasses.replace(fresh(agent), copies=fresh(agent).copies))
    assert jax.tree.structure(policy.initial_state(4)) == jax.tree.structure(carry)
    (params, value), after = jax.jit(partial(unroll, network))(variables, obs, first, carry)

    @jax.jit
    def one(obs, first, carry):
        fresh_carry = network.initial_carry(4)
        carry = jax.tree.map(lambda new, old: jnp.where(first[:, None], new, old), fresh_carry, carry)
        return network.apply(variables, obs, carry)[:2]

    for t in range(6):
        now = jax.tree.map(itemgetter(t), obs)
        (each_params, each_value), carry = one(now, first[t], carry)
        np.testing.assert_allclose(params["loc"][t], each_params["loc"], rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(value[t], each_value, rtol=1e-5, atol=1e-6)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), after, carry)


def test_greedy_policy_of_a_recurrent_pair_carries_the_actor_alone():
    agent = make(PPO, network=PAIRS["both"])
    policy, obs = agent.policy(fresh(agent)), random_obs()
    action, carry = policy.predict({"state": obs["state"]})
    assert set(carry) == {"actor"}
    assert not np.array_equal(action, policy.predict({"state": obs["state"]}, carry)[0])


@pytest.mark.slow
@pytest.mark.parametrize("cls", [PPO, SAC], ids=["PPO", "SAC"])
def test_files_of_the_policy_need_the_entry_of_the_actor_alone(cls, tmp_path):
    agent = make(cls, normalize_obs=True)
    state = jax.jit(agent.init)(KEY)
    policy, obs = agent.policy(state), {"state": random_obs()["state"]}
    for kind in ("numpy", "stablehlo"):
        path, *_ = write_policy(policy, agent.spec, kind, tmp_path / kind, {})
        loaded = polyak.load_policy(path)
        assert loaded.spec.obs == policy.spec.obs
        np.testing.assert_allclose(loaded.predict(obs)[0], policy.predict(obs)[0], rtol=1e-5, atol=1e-6)


def test_runs_are_loaded_resumed_and_evaluated_with_their_views(tmp_path):
    env = AutoReset(Distracted(), 4)
    settings = {"num_steps": 8, "network": MLP((4,)), "num_epochs": 1, "num_minibatches": 1, "actor_obs": "state"}
    run = partial(polyak.train.run, "ppo", env, settings=settings, eval_episodes=2)
    run(env_steps=100, run_dir=tmp_path / "parts")
    resumed = polyak.resume(tmp_path / "parts", env=env, env_steps=200)
    whole = run(env_steps=200, run_dir=tmp_path / "whole")
    assert same_bits(resumed.state, whole.state)
    policy = polyak.load_policy(tmp_path / "parts")
    assert policy.spec.obs == Dict({"state": Discrete(16)})
    assert len(polyak.evaluate(policy, env, episodes=2, key=KEY).returns) == 2
    with pytest.raises(ValueError, match="evaluate: obs of the policy's spec is"):
        polyak.evaluate(policy, AutoReset(CartPole(), 2), episodes=2, key=KEY)


def test_default_networks_are_chosen_by_what_each_half_sees():
    image = Dict({"image": Box(0, 255, (36, 36, 3), np.uint8), "state": OBS.spaces["state"]})
    agent = PPO(EnvSpec(image, Discrete(2)), actor_obs="image", critic_obs="state")
    assert [type(network).__name__ for network in (agent.network.actor, agent.network.critic)] == ["NatureCNN", "MLP"]
    again = dataclasses.replace(agent, critic_obs=None)
    assert again.network.critic_obs is None and again.network.actor_obs == ("image",)


def test_a_built_in_network_is_split_with_the_sizes_of_each_half():
    head = polyak.PolicyAndValue(std="state", value_hidden=(7, 7), value_activation="silu")
    agent = make(PPO, network=MLP((5,), head=head))
    assert agent.network.actor == MLP((5,), head=PolicyOnly(std="state"))
    assert agent.network.critic == MLP((7, 7), activation="silu", head=ValueOnly())
    assert max(agent.network.layer_widths) == 7
    assert not ActorAndCritic().layer_widths


def test_networks_of_ones_own_see_their_entries_alone():
    seen = {}

    def make_half(name):
        from flax import nnx

        class Half(nnx.Module):
            def __init__(self, spec, rngs):
                self.linear = nnx.Linear(sum(leaf.shape[0] for leaf in spec.obs.spaces.values()), 2, rngs=rngs)

            def __call__(self, obs):
                seen[name] = sorted(obs)
                x = self.linear(jnp.concatenate(jax.tree.leaves(obs), axis=-1))
                return {"loc": x, "log_scale": jnp.zeros_like(x)}, x[:, 0]

        return FlaxNNX(Half)

    agent = make(PPO, network=ActorAndCritic(make_half("actor"), make_half("critic")), critic_obs=None)
    state = jax.jit(agent.init)(KEY)
    jax.eval_shape(lambda obs: agent.network.apply(state.copies.online, obs), random_obs())
    assert seen == {"actor": ["state"], "critic": ["hidden", "state"]}
    seen.clear()
    agent.policy(state).predict(random_obs())
    assert seen == {"actor": ["state"]}


def test_layers_of_training_in_either_half_are_warned_of():
    from flax import nnx

    class Half(nnx.Module):
        def __init__(self, spec, rngs):
            self.linear, self.norm = nnx.Linear(STATE, 2, rngs=rngs), nnx.BatchNorm(2, rngs=rngs)

        def __call__(self, obs):
            x = self.norm(self.linear(obs["state"]))
            return {"loc": x, "log_scale": jnp.zeros_like(x)}, x[:, 0]

    agent = make(PPO, network=ActorAndCritic(MLP((4,)), FlaxNNX(Half)), critic_obs="state")
    with pytest.warns(UserWarning, match="PPO: the network is always in evaluation mode.*BatchNorm norm"):
        agent.init(KEY)


@pytest.mark.parametrize(
    ("settings", "error", "said"),
    [
        ({"actor_obs": "stat"}, ValueError, "actor_obs: unknown observation entry 'stat'; did you mean 'state'? (observation "),
        ({"critic_obs": ()}, ValueError, "critic_obs must be names of entries of the observation, each once, got ()"),
        ({"critic_obs": ("state", "state")}, ValueError, "critic_obs must be names of entries of the observation, each once"),
        ({"critic_obs": 3}, TypeError, "critic_obs must be names of entries of the observation, or None, got 3"),
        (
            {"actor_obs": ("state", 3)},
            TypeError,
            "actor_obs must be names of entries of the observation, or None, got ('state', 3)",
        ),
    ],
)
@pytest.mark.parametrize("cls", [PPO, SAC], ids=["PPO", "SAC"])
def test_a_wrong_view_is_named(cls, settings, error, said):
    with pytest.raises(error) as info:
        make(cls, **settings)
    assert str(info.value).startswith(f"{cls.__name__}: ") and said in str(info.value)


def test_what_views_do_not_go_with_is_named():
    with pytest.raises(ValueError, match="PPO: actor_obs must be None unless the observation is a Dict"):
        PPO(EnvSpec(OBS.spaces["state"], Discrete(2)), actor_obs="state")
    with pytest.raises(ValueError, match="actor and critic that see different observations share no torso"):
        make(PPO, network=MLP((8,), head=polyak.PolicyAndValue(shared_torso=True)))
    with pytest.raises(ValueError, match="PPO: network must be built-in, or an ActorAndCritic"):
        make(PPO, network=FlaxNNX(lambda spec, rngs: None))
    for network in (ActorAndCritic(LSTM(4), MLP((4,))), ActorAndCritic()):
        with pytest.raises(ValueError, match="ActorAndCritic: actor must be a network without recurrent state outside of"):
            network.init(KEY, SPEC)
    seen = ("state",)
    with pytest.raises(ValueError, match="PPO: actor_obs and critic_obs are set in the agent, not in the network, got"):
        PPO(SPEC, ActorAndCritic(MLP((4,)), MLP((4,)), actor_obs=seen))
    with pytest.raises(ValueError, match="PPO: values_when must be 'update' with sde_sample_freq and an ActorAndCritic, got"):
        make(PPO, sde_sample_freq=4, values_when="collect")
    with pytest.raises(ValueError, match="SAC: shared_encoder must be False unless actor_obs and critic_obs are equal"):
        make(SAC, shared_encoder=True)


@struct
class Distracted:
    """One step, in which ±0.05 is paid for the parity of a number, and luck that only `hidden` shows."""

    num_numbers: int = static(default=16)

    @property
    def spec(self):
        spaces = {"hidden": Box(-np.ones(1) * 9, np.ones(1) * 9), "state": Discrete(self.num_numbers)}
        return EnvSpec(Dict(spaces), Discrete(2), "distracted")

    def reset(self, key, num_envs):
        keys = jax.random.split(key)
        numbers = jax.random.randint(keys[0], (num_envs,), 0, self.num_numbers)
        return {"hidden": jax.random.normal(keys[1], (num_envs, 1)), "state": numbers}

    def step(self, state, action, key):
        paid = jnp.where(action == state["state"] % 2, 0.05, -0.05)
        ends = jnp.ones(action.shape, bool)
        return state, paid + 3.0 * state["hidden"][:, 0], ends, ~ends

    def observe(self, state):
        return state


@pytest.mark.slow
def test_critic_that_sees_the_luck_learns_what_the_symmetric_agent_does_not():
    env = AutoReset(Distracted(), 16)
    settings = {
        "num_steps": 32,
        "network": MLP((16,)),
        "num_minibatches": 2,
        "learning_rate": 3e-3,
        "gamma": 0.0,
        "num_epochs": 4,
    }

    def shares_of_right_actions(critic_obs):
        agent = PPO(env.spec, actor_obs="state", critic_obs=critic_obs, **settings)
        results = polyak.loops.compiled_seeds(agent, env, env_steps=20_000, keys=jax.random.split(KEY, 3), devices=1)
        numbers = jnp.arange(16)
        step = time_step({"state": numbers, "hidden": jnp.zeros((16, 1))})
        distributions = [agent.policy(result.state).policy.distribution(step)[0] for result in results]
        return [float(jnp.mean(jnp.exp(each.log_prob(numbers % 2)))) for each in distributions]

    privileged, symmetric = shares_of_right_actions(("hidden", "state")), shares_of_right_actions("state")
    assert min(privileged) > 0.9 and max(symmetric) < 0.75, (privileged, symmetric)
