"""FQL against the authors' code: losses and gradients on the same batch, weights and noise.

`reference/fql.npz` is from `benchmarks/fql_reference.py`. Allowances: the networks there have no layer normalization, which the
authors put after the activation and `Critics` before it; gradients are within 1e-5 of the largest number of each array, as both
sum in float32.
"""

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.agents import fql
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import Variables
from polyak.learning import flow_matching
from polyak.networks.heads import PolicyOnly
from polyak.ops.schedules import StepCount
from polyak.replay.replay import Transition

FILE = np.load(Path(__file__).parent / "reference" / "fql.npz")
KEY = jax.random.key(0)
SPEC = EnvSpec(Box([-99.0] * 3, [99.0] * 3), Box([-1.0] * 2, [1.0] * 2))
REPLAY = polyak.UniformReplay(64)
CASES = {
    "default": {"distill_weight": 10.0},
    "min": {"distill_weight": 3.0, "q_aggregation": "min", "normalize_q": True, "flow_steps": 4},
}


def make_agent(spec=SPEC, **settings):
    networks = {"actor": polyak.Actor((6,), activation="gelu", std="fixed"), "critics": polyak.Critics((6,), activation="gelu")}
    return polyak.FQL(spec, **networks | {"replay": REPLAY} | settings)


def dense(path):
    return {name: jnp.asarray(FILE[f"{path}/{name}"]) for name in ("bias", "kernel")}


def of_actor(path):
    mlp = f"{path}/mlp"
    return {"actor": {"dense": {"layers": {0: dense(f"{mlp}/Dense_0")}}}, "policy": {"linear": dense(f"{mlp}/Dense_1")}}


def of_critics(path):
    hidden, head = (dense(f"{path}/value_net/Dense_{i}") for i in range(2))
    hidden, head = ({"bias": x["bias"][:, None], "kernel": x["kernel"]} for x in (hidden, head))
    return {"head": head, "layers": {0: {"linear": hidden}}}


def with_params(variables, params):
    assert jax.tree.map(jnp.shape, variables.params) == jax.tree.map(jnp.shape, params)
    return Variables(params, variables.stats, variables.graph)


@pytest.fixture(params=CASES)
def there(request, monkeypatch):
    """The agent, its variables, the batch, and the losses and gradients of the authors' code, with its noise."""
    case = request.param
    noise = {name: jnp.asarray(FILE[f"{case}/noise/{name}"]) for name in ("next", "start", "distill")}
    time = jnp.asarray(FILE[f"{case}/time"])
    monkeypatch.setattr(flow_matching, "sample_noise", lambda *_: noise["start"])
    monkeypatch.setattr("jax.random.uniform", lambda *_: time)
    agent = make_agent(**CASES[case])
    copies, weights = agent.init(KEY).copies, f"{case}/params/modules"
    variables = {
        "actor": with_params(copies.actor.online, of_actor(f"{weights}_actor_onestep_flow")),
        "flow": with_params(copies.flow.online, of_actor(f"{weights}_actor_bc_flow")),
        "critics": with_params(copies.critics.online, of_critics(f"{weights}_critic")),
        "target": with_params(copies.critics.online, of_critics(f"{weights}_target_critic")),
    }
    array = {name: jnp.asarray(FILE[f"{case}/batch/{name}"]) for name in ("observations", "actions", "rewards", "masks")}
    batch = Transition(
        obs=array["observations"],
        action=array["actions"],
        action_mask=None,
        reward=array["rewards"],
        discount=float(FILE["gamma"]) * array["masks"],
        next_obs=jnp.asarray(FILE[f"{case}/batch/next_observations"]),
        next_action_mask=None,
        weight=jnp.full(16, 1 / 16),
        index=jnp.arange(16, dtype=jnp.int32),
    )
    return agent, variables, batch, noise, case


def check(loss, params, wanted_loss, wanted_gradient):
    (got, aux), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    np.testing.assert_allclose(got, wanted_loss, rtol=1e-5)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(gradient), jax.tree.leaves(wanted_gradient), strict=True):
        largest = max(1.0, float(np.abs(np.asarray(y)).max()))
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * largest, err_msg=jax.tree_util.keystr(path))
        assert np.abs(np.asarray(y)).max() > 1e-4
    return aux


def test_the_critics_loss_is_the_authors(there, monkeypatch):
    agent, variables, batch, noise, case = there
    monkeypatch.setattr(fql, "sample_noise", lambda *_: noise["next"])
    arguments = {name: variables[name] for name in ("critics", "target", "actor")}
    check(
        lambda p: agent.critic_loss(p, batch, key=KEY, **arguments),
        variables["critics"].params,
        FILE[f"{case}/loss/critic"],
        of_critics(f"{case}/gradient/modules_critic"),
    )


def test_the_flows_loss_is_the_authors(there):
    agent, variables, batch, _, case = there
    check(
        lambda p: agent.flow_loss(p, batch, flow=variables["flow"], key=KEY),
        variables["flow"].params,
        FILE[f"{case}/loss/flow"],
        of_actor(f"{case}/gradient/modules_actor_bc_flow"),
    )


def test_the_actors_loss_is_the_authors(there, monkeypatch):
    agent, variables, batch, noise, case = there
    monkeypatch.setattr(fql, "sample_noise", lambda *_: noise["distill"])
    arguments = {name: variables[name] for name in ("actor", "flow", "critics")}
    aux = check(
        lambda p: agent.actor_loss(p, batch, key=KEY, **arguments),
        variables["actor"].params,
        FILE[f"{case}/loss/actor"],
        of_actor(f"{case}/gradient/modules_actor_onestep_flow"),
    )
    np.testing.assert_allclose(aux.terms["distill_loss"], FILE[f"{case}/loss/distill"], rtol=1e-5)


def random_batch():
    rng = np.random.default_rng(0)
    arrays = {name: rng.normal(size=(8, 3)) for name in ("obs", "next_obs")}
    arrays |= {"action": rng.uniform(-1, 1, (8, 2)), "reward": rng.normal(size=8)}
    arrays |= {"weight": np.full(8, 1 / 8), "discount": np.full(8, 0.9)}
    fields = {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}
    return Transition(action_mask=None, next_action_mask=None, index=jnp.arange(8, dtype=jnp.int32), **fields)


@pytest.fixture(scope="module")
def trained():
    """The agent, its first copies, and a function that takes a gradient step from them."""
    agent = make_agent(tau=0.25, ema_tau=0.5)
    copies = agent.init(KEY).copies
    step = jax.jit(
        lambda batch: agent.train_step(copies, batch, KEY, jnp.array(True), env_steps=StepCount.of(0), axis_name=None)
    )
    return agent, copies, step


def test_a_gradient_step_trains_all_networks_and_moves_the_target(trained):
    _, copies, step = trained
    new, log = step(random_batch())
    assert np.asarray(log.applied).tolist() == [True] * 3
    assert {"critic_loss", "flow_loss", "actor_loss", "distill_loss", "td_error"} <= log.terms.keys()
    for name in ("actor", "flow", "critics"):
        before, after = (getattr(x, name).online.params for x in (copies, new))
        assert any(not np.array_equal(x, y) for x, y in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)), name
    old, online, target = (jax.tree.leaves(x.params) for x in (copies.critics.online, new.critics.online, new.critics.target))
    for x, y, z in zip(old, online, target, strict=True):
        np.testing.assert_allclose(z, 0.75 * x + 0.25 * y, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(("field", "applied"), [("reward", [False, True, True]), ("obs", [False] * 3)])
def test_the_average_follows_the_steps_of_the_actor(trained, field, applied):
    """With a NaN reward only the critics' step is skipped; with a NaN observation all are."""
    agent, copies, step = trained
    batch = random_batch()
    new, log = step(dataclasses.replace(batch, **{field: getattr(batch, field).at[0].set(jnp.nan)}))
    assert np.asarray(log.applied).tolist() == applied
    evaluated = agent.policy(dataclasses.replace(agent.init(KEY), copies=new)).policy.variables
    x, y, z = (jax.tree.leaves(variables.params) for variables in (copies.actor.online, new.actor.online, evaluated))
    assert applied[2] is not all(np.array_equal(a, b) for a, b in zip(x, y, strict=True))
    for a, b, average in zip(x, y, z, strict=True):
        np.testing.assert_allclose(average, (a + b) / 2, rtol=0, atol=1e-7)


@pytest.mark.parametrize(
    ("spec", "settings", "message"),
    [
        (EnvSpec(SPEC.obs, Discrete(3)), {}, r"FQL: actions must be Boxes"),
        (SPEC, {"flow": polyak.Critics((6,))}, r"FQL: flow must return"),
        (SPEC, {"flow": polyak.GRU(4, head=PolicyOnly())}, r"FQL: flow must not be recurrent"),
        (SPEC, {"flow": polyak.Actor((6,))}, r"FQL: flow must have std='fixed' and squash_mean=False for a flow, got Actor"),
        (SPEC, {"actor": polyak.Actor((6,), std="fixed", clip_mean=1.0)}, r"FQL: actor must have clip_mean=None for a flow"),
        (SPEC, {"flow_steps": 0}, r"FQL: flow_steps must be an integer in \[1, 100\], got 0"),
        (SPEC, {"q_aggregation": "max"}, r"FQL: q_aggregation must be"),
        (SPEC, {"shared_encoder": True}, r"FQL: shared_encoder must be False"),
    ],
)
def test_wrong_settings_are_errors(spec, settings, message):
    with pytest.raises((TypeError, ValueError), match=message):
        make_agent(spec, **settings)
