"""CQL and BC against TF-Agents 0.19: losses and gradients on the same batch, weights and drawn actions.

`reference/tf_agents_offline.npz` is from `benchmarks/tf_agents_offline_reference.py`. Allowances: TF-Agents' errors have no
half, and its second term is a mean over the two critics, of the log of a sum instead of a mean; so its loss is twice ours, with
a quarter of its weight, and a constant. It draws no actions in s': the samples and their densities are its own. Its BC of Boxes
takes the mean squared error of a deterministic network, which is a Gaussian with a fixed standard deviation.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import polyak
from polyak.agents.soft_actor import ActionDraw
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.struct import struct
from polyak.core.types import Variables
from polyak.ops.schedules import StepCount
from polyak.replay.replay import Transition

FILE = np.load(Path(__file__).parent / "reference" / "tf_agents_offline.npz")
NEAR = {"rtol": 1e-5, "atol": 1e-5}
KEY = jax.random.key(0)
OBS = Box([-99.0] * 3, [99.0] * 3)
BOX = EnvSpec(OBS, Box([-1.0] * 2, [1.0] * 2))
REPLAY = polyak.UniformReplay(64)
CQL_ALPHA, TAU = float(FILE["cql_alpha"]), float(FILE["tau"])
LOG_SAMPLES = np.log(8)


def tree(prefix):
    """The arrays below a path, as nested dicts."""
    out = {}
    for name in FILE.files:
        if name.startswith(f"{prefix}/"):
            *parents, leaf = name.removeprefix(f"{prefix}/").split("/")
            node = out
            for parent in parents:
                node = node.setdefault(parent, {})
            node[leaf] = jnp.asarray(FILE[name])
    return out


def layers(params, x):
    hidden = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"][None])
    return hidden @ params["out"]["kernel"] + params["out"]["bias"][None]


class Critics:
    """Each a tanh layer and a linear head."""

    def init(self, key, spec):
        return Variables(tree("cql/critics"), {})

    def apply(self, variables, obs_and_action, carry=(), *, train=False, key=None):
        row = jnp.concatenate(obs_and_action, axis=1)
        q = jnp.concatenate([layers(params, row) for _, params in sorted(variables.params.items())], axis=1)
        return (q, None), carry, {}


class Clone:
    """A tanh layer and the parameters of a distribution."""

    def __init__(self, case):
        self.case = case

    def init(self, key, spec):
        return Variables(tree(f"{self.case}/weights"), {})

    def apply(self, variables, obs, carry=(), *, train=False, key=None):
        out = layers(variables.params, obs)
        return (
            (out if self.case == "bc_discrete" else {"loc": jnp.tanh(out), "log_scale": jnp.zeros_like(out)}, None),
            carry,
            {},
        )


@struct
class Recorded(polyak.CQL):
    """CQL with the actions that TF-Agents drew in the file's case `cql` or `cql_entropy`."""

    @property
    def case(self):
        return "cql_entropy" if self.entropy_in_target else "cql"

    def draw_actions(self, actor, obs, mask, key, *, train=False):
        drawn = tree(f"{self.case}/next")
        return ActionDraw(drawn["action"], drawn["log_prob"], None), None

    def sample_actions(self, actor, batch, key):
        samples, uniform = tree(f"{self.case}/samples"), jnp.asarray(FILE[f"{self.case}/uniform"])
        density = jnp.full(uniform.shape[:2], -2 * np.log(2), jnp.float32)
        actions = jnp.concatenate([samples["action"], uniform], axis=1), jnp.concatenate([samples["log_prob"], density], axis=1)
        return jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), actions)


def batch_of(case, dtype=jnp.float32):
    batch = tree(f"{case}/batch")
    n = len(batch["reward"])
    return Transition(
        obs=batch["obs"],
        action=batch["action"].astype(dtype),
        action_mask=None,
        reward=batch["reward"],
        discount=float(FILE["gamma"]) * batch["discount"],
        next_obs=batch["next_obs"],
        next_action_mask=None,
        weight=jnp.full(n, 1 / n),
        index=jnp.arange(n, dtype=jnp.int32),
    )


def check(loss, params, wanted_loss, wanted_gradient, factor=1.0):
    (got, _), gradient = jax.value_and_grad(loss, has_aux=True)(params)
    np.testing.assert_allclose(factor * got, wanted_loss, **NEAR)
    leaves = jax.tree_util.tree_leaves_with_path(gradient), jax.tree.leaves(wanted_gradient)
    for (path, x), y in zip(*leaves, strict=True):
        np.testing.assert_allclose(factor * x, y, rtol=1e-5, atol=2e-5, err_msg=jax.tree_util.keystr(path))
        assert np.abs(y).max() > 1e-3


@pytest.mark.parametrize("entropy", [False, True])
def test_the_critics_loss_of_cql(entropy):
    agent = Recorded(BOX, polyak.Actor((5,)), Critics(), replay=REPLAY, cql_weight=CQL_ALPHA / 4, entropy_in_target=entropy)
    copies, case = agent.init(KEY).copies, agent.case
    online, target = (Variables(tree(f"{case}/{name}"), {}) for name in ("critics", "target"))
    arguments = {"critics": online, "target": target, "actor": copies.actor.online, "key": KEY}
    arguments["alpha"] = jnp.exp(jnp.asarray(float(FILE["log_alpha"]), jnp.float32))
    loss, gradient = tree(f"{case}/loss"), tree(f"{case}/gradient")
    wanted = loss["td"] + CQL_ALPHA * (loss["gap"] - LOG_SAMPLES)
    wanted_gradient = jax.tree.map(lambda td, gap: td + CQL_ALPHA * gap, gradient["td"], gradient["gap"])
    check(lambda p: agent.critic_loss(p, batch_of(case), **arguments), online.params, wanted, wanted_gradient, 2.0)


def test_the_step_of_a_learned_weight_of_cql():
    settings = {"cql_weight": CQL_ALPHA, "target_gap": TAU - LOG_SAMPLES, "optimizer": optax.sgd(0.1)}
    agent = Recorded(BOX, polyak.Actor((5,)), Critics(), replay=REPLAY, **settings)
    copies, batch = agent.init(KEY).copies, batch_of("cql")
    step = {"env_steps": StepCount.of(0), "axis_name": None}
    after, _ = agent.train_step(copies, batch, KEY, jnp.array(True), **step)
    change = after.weight.log_alpha - copies.weight.log_alpha
    np.testing.assert_allclose(change, -0.1 * float(FILE["cql/loss/weight"]), **NEAR)


def test_bc_of_discrete_actions():
    agent = polyak.BC(EnvSpec(OBS, Discrete(4)), Clone("bc_discrete"), replay=REPLAY)
    online, batch = agent.init(KEY).copies.online, batch_of("bc_discrete", jnp.int32)
    wanted = float(FILE["bc_discrete/loss"]), tree("bc_discrete/gradient")
    check(lambda p: agent.loss(p, batch, online=online), online.params, *wanted)


def test_bc_of_boxes():
    agent = polyak.BC(BOX, Clone("bc_box"), replay=REPLAY)
    online, batch = agent.init(KEY).copies.online, batch_of("bc_box")
    wanted = float(FILE["bc_box/loss"]) + np.log(2 * np.pi), tree("bc_box/gradient")
    # With σ = 1 and two dimensions, -log π is their mean squared error and log 2π.
    check(lambda p: agent.loss(p, batch, online=online), online.params, *wanted)
