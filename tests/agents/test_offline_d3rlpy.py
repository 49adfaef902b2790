"""BC, IQL, TD3+BC and discrete CQL against d3rlpy 2.8: losses and gradients on the same batch and weights.

`reference/d3rlpy.npz` is from `benchmarks/d3rlpy_reference.py`. Allowances: d3rlpy's log σ of IQL is a sigmoid of a parameter,
so the gradient there is divided by its slope; target actions of TD3+BC have no noise; the mean of squared errors of d3rlpy's BC
is 2 / dim A times the loss here with a standard deviation of 1, but for a constant; gradients are within 1e-5 of the largest
number of each array, as both sum in float32.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import Variables
from polyak.replay.replay import Transition

FILE = np.load(Path(__file__).parent / "reference" / "d3rlpy.npz")
NEAR = {"rtol": 1e-5, "atol": 1e-5}
KEY = jax.random.key(0)
OBS = Box([-99.0] * 3, [99.0] * 3)
BOX = EnvSpec(OBS, Box([-1.0] * 2, [1.0] * 2))
REPLAY = polyak.UniformReplay(64)


def at(path):
    return jnp.asarray(FILE[path])


def scalar(path):
    return float(FILE[path])


def batch_of(case):
    batch = {name: at(f"{case}/batch/{name}") for name in ("obs", "action", "reward", "next_obs", "terminal")}
    n = len(batch["reward"])
    action = batch["action"][:, 0].astype(jnp.int32) if case == "discrete_cql" else batch["action"]
    return Transition(
        obs=batch["obs"],
        action=action,
        action_mask=None,
        reward=batch["reward"][:, 0],
        discount=scalar("gamma") * (1 - batch["terminal"][:, 0]),
        next_obs=batch["next_obs"],
        next_action_mask=None,
        weight=jnp.full(n, 1 / n),
        index=jnp.arange(n, dtype=jnp.int32),
    )


def critics(path):
    """The critics of `Critics((6,))`: a leading axis of both."""
    both = [{leaf: at(f"{path}/critic{i}/{leaf}") for leaf in LEAVES} for i in range(2)]
    stacked = {leaf: jnp.stack([critic[leaf] for critic in both]) for leaf in LEAVES}
    hidden = {"kernel": stacked["hidden/kernel"], "bias": stacked["hidden/bias"][:, None]}
    head = {"kernel": stacked["out/kernel"], "bias": stacked["out/bias"][:, None]}
    return {"head": head, "layers": {0: {"linear": hidden}}}


LEAVES = ("hidden/kernel", "hidden/bias", "out/kernel", "out/bias")


def dense(path, part):
    return {"kernel": at(f"{path}/{part}/kernel"), "bias": at(f"{path}/{part}/bias")}


def actor(path):
    params = {"actor": {"dense": {"layers": {0: dense(path, "hidden")}}}, "policy": {"linear": dense(path, "out")}}
    if f"{path}/log_std" in FILE.files:
        params["policy"]["log_std"] = {"all": at(f"{path}/log_std")}
    return params


def value(path):
    return {"critic": {"dense": {"layers": {0: dense(path, "hidden")}}}, "value": dense(path, "out")}


def q_network(path):
    return {"dense": {"layers": {0: dense(path, "hidden")}}, "head": {"advantage": dense(path, "out")}}


def with_params(variables, params):
    assert jax.tree.map(jnp.shape, variables.params) == jax.tree.map(jnp.shape, params)
    return Variables(params, variables.stats, variables.graph)


def check(loss, params, wanted_loss, wanted_gradient):
    (got, _), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    np.testing.assert_allclose(got, wanted_loss, **NEAR)
    for (path, x), y in zip(jax.tree_util.tree_leaves_with_path(gradient), jax.tree.leaves(wanted_gradient), strict=True):
        largest = max(1.0, float(np.abs(np.asarray(y)).max()))
        np.testing.assert_allclose(x, y, rtol=0, atol=1e-5 * largest, err_msg=jax.tree_util.keystr(path))
        assert np.abs(np.asarray(y)).max() > 1e-4


def test_bc_with_a_fixed_standard_deviation_minimizes_the_squared_errors_of_d3rlpy():
    agent = polyak.BC(BOX, polyak.Actor((6,), std="fixed", squash_mean=True), replay=REPLAY)
    online, batch, dims = with_params(agent.init(KEY).copies.online, actor("bc/actor")), batch_of("bc"), 2
    constant = dims * 0.5 * np.log(2 * np.pi)

    def squared_error(params):
        loss, aux = agent.loss(params, batch, online=online)
        return 2 / dims * (loss - constant), aux

    check(squared_error, online.params, scalar("bc/loss/actor"), actor("bc/gradient/actor"))


@pytest.fixture(scope="module")
def iql():
    settings = {name: scalar(f"iql/settings/{name}") for name in ("expectile", "inverse_temperature", "max_weight")}
    agent = polyak.IQL(
        BOX,
        polyak.Actor((6,), std="free", squash_mean=True),
        polyak.Critics((6,)),
        value=polyak.MLP((6,), activation="relu", orthogonal=False),
        replay=REPLAY,
        **settings,
    )
    copies = agent.init(KEY).copies
    there = {
        "critics": with_params(copies.critics.online, critics("iql/critics")),
        "target": with_params(copies.critics.online, critics("iql/target")),
        "value": with_params(copies.value.online, value("iql/value")),
        "actor": with_params(copies.actor.online, actor("iql/actor")),
    }
    return agent, there, batch_of("iql")


def test_the_value_loss_of_iql(iql):
    agent, there, batch = iql
    wanted = scalar("iql/loss/value"), value("iql/gradient/value")
    check(lambda p: agent.value_loss(p, batch, value=there["value"], target=there["target"]), there["value"].params, *wanted)


def test_the_critics_loss_of_iql(iql):
    agent, there, batch = iql
    wanted = scalar("iql/loss/critic"), critics("iql/gradient/critics")
    arguments = {"critics": there["critics"], "value": there["value"], "key": KEY}
    check(lambda p: agent.critic_loss(p, batch, **arguments), there["critics"].params, *wanted)


def test_the_actors_loss_of_iql(iql):
    agent, there, batch = iql
    wanted = scalar("iql/loss/actor"), actor("iql/gradient/actor")
    check(lambda p: agent.actor_loss(p, batch, **there), there["actor"].params, *wanted)


def test_td3_bc():
    agent = polyak.TD3BC(
        BOX,
        polyak.Actor((6,), std="fixed"),
        polyak.Critics((6,)),
        replay=REPLAY,
        target_noise=0.0,
        q_weight=scalar("td3_bc/settings/alpha"),
    )
    copies, batch = agent.init(KEY).copies, batch_of("td3_bc")
    online = with_params(copies.critics.online, critics("td3_bc/critics"))
    target = with_params(copies.critics.online, critics("td3_bc/target"))
    of_actor, target_actor = (with_params(copies.actor.online, actor(f"td3_bc/{x}")) for x in ("actor", "target_actor"))
    arguments = {"critics": online, "target": target, "target_actor": target_actor, "key": KEY}
    wanted = scalar("td3_bc/loss/critic"), critics("td3_bc/gradient/critics")
    check(lambda p: agent.critic_loss(p, batch, **arguments), online.params, *wanted)
    wanted = scalar("td3_bc/loss/actor"), actor("td3_bc/gradient/actor")
    check(lambda p: agent.actor_loss(p, batch, actor=of_actor, critics=online), of_actor.params, *wanted)


def test_discrete_cql():
    spec = EnvSpec(OBS, Discrete(4))
    alpha = scalar("discrete_cql/settings/alpha")
    agent = polyak.DQN(spec, polyak.MLP((6,)), replay=REPLAY, cql_weight=alpha)
    variables = agent.init(KEY).copies.online
    online, target = (with_params(variables, q_network(f"discrete_cql/{x}/critic0")) for x in ("critics", "target"))
    wanted = scalar("discrete_cql/loss/critic"), q_network("discrete_cql/gradient/critics/critic0")
    check(lambda p: agent.loss(p, batch_of("discrete_cql"), online=online, target=target), online.params, *wanted)
