"""BC and FQL with flows: the loss of BC, and what both learn from multimodal actions."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec
from polyak.envs.autoreset import AutoReset
from polyak.networks.flow import sample_noise
from polyak.networks.heads import PolicyOnly
from polyak.replay.replay import Transition
from tests.agents.maze import BOX_SPEC, BoxMaze, recorded

KEY = jax.random.key(0)
REPLAY = polyak.UniformReplay(64)
UNIT = Box([0.0], [1.0])


def test_the_loss_of_bc_is_that_of_the_flow_in_units_of_half_ranges():
    """In NumPy and float64, with the noise and times of the agent's keys and weights that differ."""
    spec = EnvSpec(Box([-9.0] * 3, [9.0] * 3), Box([-2.0, 0.0], [6.0, 1.0]))  # middles 2 and 0.5, half ranges 4 and 0.5
    agent = polyak.BC(spec, polyak.MLP((5,), activation="relu"), flow_steps=10, replay=REPLAY)
    online, rng = agent.init(KEY).copies.online, np.random.default_rng(0)
    obs, weight = rng.normal(size=(8, 3)), rng.dirichlet(np.ones(8))
    action = np.stack([rng.uniform(-2, 6, 8), rng.uniform(0, 1, 8)], axis=1)
    rows = {"obs": obs, "next_obs": obs, "action": action, "weight": weight, "reward": 0 * weight, "discount": 0 * weight}
    fields = {name: jnp.asarray(x, jnp.float32) for name, x in rows.items()}
    batch = Transition(action_mask=None, next_action_mask=None, index=jnp.arange(8, dtype=jnp.int32), **fields)
    loss, _ = agent.loss(online.params, batch, online=online, key=KEY)
    noise_key, time_key, _ = jax.random.split(KEY, 3)
    start = np.float64(sample_noise(spec.action, 8, noise_key))
    time = np.float64(jax.random.uniform(time_key, (8, 1), jnp.float32))
    unit = (action - [2, 0.5]) / [4, 0.5]
    params = jax.tree.map(np.float64, online.params)
    hidden, head = params["actor"]["dense"]["layers"][0], params["policy"]["linear"]
    row = np.concatenate([obs, (1 - time) * start + time * unit, time], axis=1)
    velocity = np.maximum(row @ hidden["kernel"] + hidden["bias"], 0) @ head["kernel"] + head["bias"]
    np.testing.assert_allclose(loss, np.sum(weight * np.mean((velocity - (unit - start)) ** 2, axis=1)), rtol=1e-5)
    with pytest.raises(ValueError, match="BC: key must be given with flow_steps"):
        agent.loss(online.params, batch, online=online)


@pytest.mark.parametrize(
    ("action", "network", "message"),
    [
        (Discrete(2), None, r"BC: actions of a flow must be Boxes of floats, got Discrete"),
        (Box([0], [9], dtype=np.int32), None, r"BC: actions of a flow must be Boxes of floats, got Box"),
        (Dict({"a": Box([0.0], [1.0]), "b": Discrete(2)}), None, r"Boxes of floats, got Discrete\(.*\) at action 'b'"),
        (Dict({"a": UNIT, "b": Box([0.0], [np.inf])}), None, r"needs finite bounds, got Box\(.*\) at action 'b'"),
        (Box([-np.inf], [np.inf]), None, r"BC: a flow of actions needs finite bounds, got Box\(-inf, inf"),
        (UNIT, polyak.MLP(head=PolicyOnly(squash_mean=True, std="fixed")), r"BC: network must have .* squash_mean=False"),
        (UNIT, polyak.MLP(head=PolicyOnly()), r"BC: network must have std='fixed' .* for a flow, got PolicyOnly"),
        (UNIT, polyak.Actor(std="fixed", clip_mean=1.0), r"BC: network must have clip_mean=None for a flow, got Actor"),
    ],
)
def test_flows_that_do_not_fit_are_errors(action, network, message):
    with pytest.raises(ValueError, match=message):
        polyak.BC(EnvSpec(Box([0.0], [1.0]), action), network, flow_steps=10, replay=REPLAY)


def test_a_flow_has_no_recurrent_network():
    replay = polyak.SequenceReplay(1_000, sequence_length=10)
    with pytest.raises(ValueError, match="BC: network must not be recurrent for a flow"):
        polyak.BC(EnvSpec(Box([0.0], [1.0]), Box([0.0], [1.0])), polyak.GRU(4), flow_steps=10, replay=replay)


@pytest.mark.slow
@pytest.mark.parametrize(("flow_steps", "clones"), [(None, False), (10, True)])
def test_a_flow_clones_two_modes_and_a_gaussian_does_not(flow_steps, clones):
    """Demonstrations in one state, half of them at -0.7 and half at 0.7."""
    rng, n = np.random.default_rng(0), 2_000
    spec = EnvSpec(Box([-1.0], [1.0]), Box([-1.0], [1.0]), action_scaling="rescale")
    actions = np.where(rng.random((n, 1)) < 0.5, -0.7, 0.7) + 0.05 * rng.normal(size=(n, 1))
    arrays = {"observations": np.zeros((n, 1)), "actions": actions, "rewards": np.zeros(n), "terminations": np.ones(n)}
    network, rate = polyak.MLP((128, 128), activation="relu"), polyak.Linear(3e-3, 0.0, 2_000)
    agent = polyak.BC(spec, network, flow_steps=flow_steps, learning_rate=rate)
    data = polyak.data.load(arrays, spec=spec)
    policy = polyak.train.offline(agent, data, gradient_steps=2_000, progress=False).policy
    samples, _ = policy.predict(np.zeros((2_000, 1), np.float32), deterministic=False, key=KEY)
    is_near = np.abs(np.abs(samples) - 0.7) < 0.2
    assert bool(np.mean(is_near) >= 0.9) is clones
    if clones:
        assert 0.4 < np.mean(samples > 0) < 0.6  # both modes
    else:
        assert np.mean(is_near) < 0.4
    greedy, _ = policy.predict(np.zeros(1, np.float32))
    assert bool(abs(abs(greedy[0]) - 0.7) < 0.05) is clones  # a Gaussian's mean is between the modes


@pytest.mark.slow
@pytest.mark.parametrize(("agent", "solves"), [("fql", True), ("bc", False)])
def test_parts_of_episodes_are_joined_and_modes_are_not_averaged(agent, solves):
    """No episode of the data leads from the start to the goal; at the crossing, one action in five leads to the goal."""
    settings = {"learning_rate": 3e-3, "batch_size": 64, "flow_steps": 10}
    networks = {"critics": polyak.Critics((32,)), "actor": polyak.Actor((32, 32), std="fixed")}
    settings |= networks | {"gamma": 0.9, "distill_weight": 1.0} if agent == "fql" else {"network": polyak.MLP((32, 32))}
    env, data = AutoReset(BoxMaze(), num_envs=2), recorded(BOX_SPEC)
    result = polyak.train.offline(
        agent, data, gradient_steps=1_500, settings=settings, env=env, eval_episodes=2, progress=False
    )
    assert (result.evaluation.mean_return == 1.0) is solves
