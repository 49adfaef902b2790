"""What holds for every agent of action values: DQN, C51, QR-DQN, bootstrapped DQN and IQN."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen

import polyak
from polyak.agents.bootstrapped_dqn import BootstrappedDQN
from polyak.agents.c51 import C51
from polyak.agents.dqn import DQN
from polyak.agents.iqn import IQN
from polyak.agents.qrdqn import QRDQN
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import Rollout, TimeStep
from polyak.networks.feedforward import MLP
from polyak.networks.heads import Quantiles
from polyak.ops.schedules import StepCount
from polyak.policies.q_policy import FreshNoise
from polyak.replay.uniform import Transition
from tests import probe_envs
from tests.selection import quick

KEY = jax.random.key(0)
SPEC = EnvSpec(Box([-9.0] * 3, [9.0] * 3), Discrete(4))
MASKED = dataclasses.replace(SPEC, has_action_mask=True)
SMALL = {"replay": polyak.UniformReplay(512), "batch_size": 16, "learning_starts": 8, "num_steps": 4, "updates_per_step": 0.5}
AGENTS = {
    "dqn": lambda spec=SPEC, noisy=False, **s: DQN(
        spec, network=polyak.MLP((8,), head=polyak.QValues(noisy=noisy)), **SMALL | s
    ),
    "c51": lambda spec=SPEC, noisy=False, **s: C51(
        spec, network=polyak.MLP((8,), head=polyak.QValues(noisy=noisy)), num_atoms=11, **SMALL | s
    ),
    "qrdqn": lambda spec=SPEC, noisy=False, **s: QRDQN(
        spec, network=polyak.MLP((8,), head=polyak.QValues(noisy=noisy)), **SMALL | s
    ),
    "bootstrapped": lambda spec=SPEC, noisy=False, **s: BootstrappedDQN(
        spec, network=polyak.MLP((8,), head=polyak.QValues(noisy=noisy)), num_heads=3, **SMALL | s
    ),
    "iqn": lambda spec=SPEC, noisy=False, **s: IQN(spec, network=MLP((8, 8), head=Quantiles(noisy=noisy)), **SMALL | s),
}
# The code of QAgent, for one agent with values and one with distributions.
of_the_base = pytest.mark.parametrize("make", [AGENTS["dqn"], AGENTS["c51"]], ids=["dqn", "c51"])
# What is each agent's own is quick for the same two.
every_agent = pytest.mark.parametrize("make", quick("dqn", "c51", of=AGENTS))


def transitions(size=6, *, masked=False, seed=0, **changes):
    random = np.random.default_rng(seed)
    obs, next_obs = (jnp.asarray(random.normal(size=(size, 3)), jnp.float32) for _ in range(2))
    mask = jnp.asarray(random.uniform(size=(size, 4)) < 0.5).at[:, 0].set(True) if masked else None
    batch = Transition(
        obs=obs,
        action=jnp.asarray(random.integers(0, 4, size), jnp.int32),
        action_mask=mask,
        reward=jnp.asarray(random.normal(size=size), jnp.float32),
        discount=jnp.full(size, 0.9),
        next_obs=next_obs,
        next_action_mask=mask,
        weight=jnp.full(size, 1 / size),
        index=jnp.arange(size, dtype=jnp.int32),
    )
    return dataclasses.replace(batch, **changes)


def variables(agent):
    """Online and target networks that differ."""
    return agent.init(KEY).copies.online, agent.init(jax.random.key(1)).copies.online


@jax.jit
def loss_of(agent, batch):
    online, target = variables(agent)
    return agent.loss(online.params, batch, online=online, target=target, key=KEY)


def rollout_of(agent, seed=0, num_envs=2, **changes):
    random = np.random.default_rng(seed)
    shape = agent.num_steps + 1, num_envs
    zeros = jnp.zeros(shape, bool)
    mask = jnp.asarray(random.uniform(size=(*shape, 4)) < 0.5).at[..., 0].set(True) if agent.spec.has_action_mask else None
    steps = TimeStep(
        jnp.asarray(random.normal(size=(*shape, 3)), jnp.float32),
        jnp.asarray(random.normal(size=shape), jnp.float32),
        zeros,
        zeros,
        zeros,
        mask,
    )
    actions = jnp.asarray(random.integers(0, 4, size=(agent.num_steps, num_envs)), jnp.int32)
    return Rollout(dataclasses.replace(steps, **changes), actions)


@every_agent
def test_weights_count_in_the_loss(make):
    """Importance weights of a prioritized replay; TF-Agents' C51 and Coach's QR-DQN leave them out (defect 5)."""
    agent, batch = make(), transitions()
    loss, aux = loss_of(agent, dataclasses.replace(batch, weight=jnp.zeros(6).at[2].set(1.0)))
    each = [loss_of(agent, dataclasses.replace(batch, weight=jnp.zeros(6).at[i].set(1.0)))[0] for i in range(6)]
    np.testing.assert_allclose(loss, each[2], rtol=1e-6)
    weight = jnp.array([0.1, 0.0, 0.5, 0.2, 0.05, 0.15])
    together, _ = loss_of(agent, dataclasses.replace(batch, weight=weight))
    np.testing.assert_allclose(together, np.dot(np.stack(each), weight), rtol=1e-5)
    priority = aux.terms["priority"]
    assert priority.shape == (6,) and float(priority.min()) >= 0


@every_agent
def test_a_row_of_weight_zero_reaches_neither_loss_nor_gradient(make):
    """Rows that only reset an environment: TF-Agents' C51 trains on them (defect 1)."""
    agent = make()
    online, target = variables(agent)

    @jax.jit
    def gradient(obs):
        weight = jnp.array([0.5, 0.5, 0.0, 0.0, 0.0, 0.0])
        batch = transitions(weight=weight)
        batch = dataclasses.replace(batch, obs=batch.obs.at[2:].set(obs), reward=batch.reward.at[2:].set(obs))
        return jax.grad(lambda p: agent.loss(p, batch, online=online, target=target, key=KEY)[0])(online.params)

    jax.tree.map(np.testing.assert_array_equal, gradient(0.5), gradient(-7.0))


@every_agent
def test_a_terminal_transition_does_not_see_the_next_observation(make):
    agent = make()
    batch = transitions(discount=jnp.zeros(6))
    other = dataclasses.replace(batch, next_obs=batch.next_obs + 3.0)
    np.testing.assert_array_equal(loss_of(agent, batch)[0], loss_of(agent, other)[0])
    assert float(loss_of(agent, transitions())[0]) != float(loss_of(agent, transitions(next_obs=other.next_obs))[0])


# Of bootstrapped DQN each head has an a' of its own.
@pytest.mark.parametrize(
    "make", quick("dqn", "c51", of={name: make for name, make in AGENTS.items() if name != "bootstrapped"})
)
@pytest.mark.parametrize("double", [False, True])
def test_the_bootstrap_takes_allowed_actions_only(make, double):
    """TF-Agents' D3qnAgent takes the best of all actions (defect 15)."""
    agent = make(MASKED, double=double)
    online, target = variables(agent)
    batch = transitions(64, masked=True)
    only = jnp.zeros((64, 4), bool).at[:, 2].set(True)

    @jax.jit
    def target_of(batch):
        return agent.td_target(batch, online=online, target=target, key=KEY)

    # With one allowed action, the target is the same whatever the others are worth.
    forced = target_of(dataclasses.replace(batch, next_action_mask=only))
    free = target_of(dataclasses.replace(batch, next_action_mask=jnp.ones((64, 4), bool)))
    masked = target_of(batch)
    rows = lambda x: np.asarray(x).reshape(64, -1)  # noqa: E731
    each = [
        target_of(dataclasses.replace(batch, next_action_mask=jnp.zeros((64, 4), bool).at[:, a].set(True))) for a in range(4)
    ]
    near = np.stack([np.isclose(rows(masked), rows(x), atol=1e-5).all(axis=1) for x in each], axis=1)
    assert (near & np.asarray(batch.next_action_mask)).any(axis=1).all()
    assert (rows(forced) != rows(free)).any()


@of_the_base
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0}, {"noisy": True, "epsilon": 0.1}])
def test_acting_takes_allowed_actions_only(make, settings):
    agent = make(MASKED, learning_starts=16, **settings)
    state = agent.init(KEY)
    mask = jnp.asarray(np.random.default_rng(0).uniform(size=(512, 4)) < 0.4).at[:, 3].set(True)
    flags = jnp.zeros(512, bool)
    step = TimeStep(jnp.zeros((512, 3)), jnp.zeros(512), flags, flags, flags, mask)
    for env_steps in (0, 1_000):
        state = dataclasses.replace(state, env_steps=StepCount.of(env_steps))
        for policy in (agent.policy(state), agent.collect_policy(state)):
            action = policy.action(step, policy.initial_state(512), KEY).action
            assert bool(mask[jnp.arange(512), action].all())


@of_the_base
@pytest.mark.parametrize("settings", [{}, {"temperature": 1e-6}, {"noisy": True, "epsilon": 0.0}])
def test_actions_are_random_until_learning_starts(make, settings):
    agent = make(learning_starts=16, epsilon=0.0) if not settings else make(learning_starts=16, **settings)
    state = agent.init(KEY)
    step = _first(4_000)
    counts = np.bincount(agent.collect_policy(state).action(step, (), KEY).action, minlength=4)
    assert counts.min() > 900
    state = dataclasses.replace(state, env_steps=StepCount.of(16))
    actions = np.asarray(agent.collect_policy(state).action(step, (), KEY).action)
    greedy = np.asarray(agent.policy(state).action(step, (), KEY).action)
    # Equal observations: one action, unless the network has noise.
    assert (actions != greedy).any() if settings.get("noisy") else (actions == greedy).all()


def _first(size):
    flags = jnp.zeros(size, bool)
    return TimeStep(jnp.zeros((size, 3)), jnp.zeros(size), flags, flags, flags)


@of_the_base
def test_each_environment_explores_by_itself(make):
    """Stable-Baselines3 throws one coin for all environments (defect 11)."""
    agent = make(epsilon=0.5, learning_starts=0)
    step = _first(4_000)
    policy, greedy = agent.collect_policy(agent.init(KEY)), agent.policy(agent.init(KEY))
    differs = np.asarray(policy.action(step, (), KEY).action) != np.asarray(greedy.action(step, (), KEY).action)
    assert abs(differs.mean() - 0.5 * 3 / 4) < 0.03


@every_agent
def test_a_noisy_network_explores_with_noise_and_is_evaluated_without(make):
    agent = make(noisy=True, epsilon=0.0, learning_starts=0)
    state = agent.init(KEY)
    assert isinstance(agent.collect_policy(state), FreshNoise)
    obs = jnp.broadcast_to(jnp.array([[0.3, -1.0, 2.0]]), (512, 3))
    step = dataclasses.replace(_first(512), obs=obs)
    explorer = agent.collect_policy(state)
    explored = np.asarray(explorer.action(step, explorer.initial_state(512), KEY).action)
    assert len(set(explored.tolist())) > 1
    greedy = [np.asarray(agent.policy(state).action(step, (), jax.random.key(i)).action) for i in range(2)]
    np.testing.assert_array_equal(*greedy)
    assert len(set(greedy[0].tolist())) == 1


@every_agent
def test_noise_reaches_the_loss_and_its_scale_is_learned(make):
    agent = make(noisy=True)
    online, target = variables(agent)

    @jax.jit
    @jax.value_and_grad
    def loss(params, key):
        return agent.loss(params, transitions(), online=online, target=target, key=key)[0]

    (first, gradient), (second, _) = (loss(online.params, jax.random.key(i)) for i in (1, 2))
    assert float(first) != float(second)
    stds = [x for path, x in jax.tree_util.tree_leaves_with_path(gradient) if "std" in jax.tree_util.keystr(path)]
    assert stds and all(float(jnp.abs(x).max()) > 0 for x in stds)


@pytest.mark.slow
@every_agent
def test_the_update_takes_steps_and_the_target_follows(make):
    agent = make(learning_starts=0, target_period=1, tau=0.5)
    state, metrics = jax.jit(agent.update)(agent.init(KEY), rollout_of(agent), KEY)
    assert int(state.updates) == 4 and int(state.copies.target_count.fired) == 4
    assert {"train/loss", "train/td_error", "train/q", "train/grad_norm", "rollout/exploration_rate"} <= set(metrics)
    assert agent.diagnose(metrics) is None and "train/priority" not in metrics


@every_agent
def test_priorities_of_what_was_drawn_become_those_of_the_loss(make):
    """TF-Agents' C51 returns none, so its prioritized replay is never updated (defect 5)."""
    agent = make(learning_starts=0, replay=polyak.PrioritizedReplay(512), noisy=False)
    update = jax.jit(agent.update)
    state, _ = update(agent.init(KEY), rollout_of(agent), KEY)
    state, metrics = update(state, rollout_of(agent, seed=1), jax.random.key(1))
    assert int(state.updates) == 8 and int(metrics["replay/rejected_priorities"]) == 0
    assert 0 < float(metrics["train/importance_weight"]) < 1
    # A loss is not the 1 of new rows.
    assert abs(float(metrics["replay/mean_priority"]) - 1.0) > 1e-3


@pytest.mark.slow
@of_the_base
def test_a_masked_environment_and_several_devices(make):
    agent = make(MASKED, learning_starts=0, batch_size=16, optimizer=optax.adam(1e-3))
    state, _ = jax.jit(agent.update)(agent.init(KEY), rollout_of(agent), KEY)
    assert int(state.updates) == 4 and state.replay.rows.action_mask.shape == (512, 4)
    agent.check(2, 2)


@pytest.mark.slow
@every_agent
def test_values_of_probe_environments(make):
    network = MLP((32, 32), head=Quantiles()) if make is AGENTS["iqn"] else polyak.MLP((32,), head=polyak.QValues())
    settings = {
        "replay": polyak.UniformReplay(4_096),
        "batch_size": 64,
        "num_steps": 4,
        "updates_per_step": 1 / 16,
        "learning_starts": 256,
    }
    settings |= {"gamma": 0.9, "target_period": 20, "learning_rate": 5e-3, "epsilon": 0.3, "n_step": 2, "network": network}
    # Few samples of the distribution: the pairs of 200 quantiles would take minutes.
    few = {"c51": {"v_min": -2.0, "v_max": 12.0}, "qrdqn": {"num_quantiles": 16}, "iqn": {"num_tau": 8, "num_target_tau": 8}}
    settings |= next((few[name] for name in few if make is AGENTS[name]), {})
    agent = type(make())(probe_envs.probe(1).spec, **settings)
    probes, values = zip(
        (probe_envs.settings(pays="action"), 1.0),
        (probe_envs.settings(sees="step", pays="at the end", length=2), 0.9),
        # A time limit is no terminal state: 1 + 0.9 + 0.81 + ... (defect 2).
        (probe_envs.settings(length=4, terminates=False), 10.0),
        strict=True,
    )
    states = probe_envs.train_in(agent, probes, 16, 256)
    step = dataclasses.replace(_first(1), obs=jnp.zeros((1, 1)))
    for state, value in zip(states, values, strict=True):
        np.testing.assert_allclose(agent.policy(state).policy.value(step), value, rtol=0.12, atol=0.12)
    assert int(agent.policy(states[0]).action(step, (), KEY).action[0]) == 1


def test_boltzmann_exploration_that_has_cooled_down_is_greedy():
    agent = DQN(
        SPEC, polyak.MLP((8,)), temperature=polyak.Linear(1.0, 0.0, 100), learning_starts=50, replay=polyak.UniformReplay(512)
    )
    state = dataclasses.replace(agent.init(KEY), env_steps=StepCount.of(200))
    step = _first(16)
    explored, greedy = (make(state).action(step, (), KEY).action for make in (agent.collect_policy, agent.policy))
    np.testing.assert_array_equal(explored, greedy)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: C51(SPEC, v_min=1.0, v_max=1.0), "C51: v_min=1.0 must be below v_max=1.0"),
        (lambda: C51(SPEC, num_atoms=1), r"C51: num_atoms must be an integer in \[2, 2147483647\]"),
        (lambda: QRDQN(SPEC, huber_delta=-1.0), "QRDQN: huber_delta must be a number"),
        (
            lambda: IQN(SPEC, network=polyak.MLP(head=polyak.QValues())),
            r"IQN: network must have the head Quantiles, got QValues\(\)",
        ),
        (
            lambda: IQN(SPEC, network=polyak.FlaxLinen(linen.Dense(5))),
            r"IQN: network must have quantiles, such as MLP\(\), got Fl",
        ),
        (lambda: IQN(EnvSpec(Box([-1.0], [1.0]), Box([-1.0], [1.0]))), "IQN: actions must be Discrete"),
        (
            lambda: C51(SPEC, network=polyak.MLP(head=polyak.PolicyAndValue())),
            "C51: network must have the head QValues, got Policy",
        ),
        (lambda: C51(SPEC, network=polyak.GRU()), "C51: network must not be recurrent, got GRU"),
        (
            lambda: C51(SPEC, network=polyak.FlaxLinen(linen.Dense(5))).init(KEY),
            r"must have shape \(97, 4, 51\), got \(97, 5\)",
        ),
    ],
)
def test_settings_are_checked(build, message):
    with pytest.raises((TypeError, ValueError), match=message):
        build()
