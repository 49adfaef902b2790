"""DQN against TF-Agents 0.19: losses, TD errors, gradients, optimizer steps and target updates of five small problems.

`reference/tf_agents_dqn.npz` holds their data, weights and results. TF-Agents takes means over all 8 rows of a batch, also
those that only reset; ours are over the rows that count.
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.agents.dqn import DQN
from polyak.copies.follow import Follow
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import Rollout, TimeStep, Variables
from polyak.replay.uniform import Replay, Transition

FILE = np.load(Path(__file__).parent / "reference" / "tf_agents_dqn.npz")
CASES = sorted({name.split("/")[0] for name in FILE.files})
EVERY_STEP = pytest.mark.parametrize(("case", "step"), [(case, k) for case in CASES for k in range(1, 5)])
NEAR = {"rtol": 1e-5, "atol": 1e-5}
LAST = 2


class Net:
    """A tanh layer, and one linear head or two."""

    def init(self, key, spec):
        return Variables(weights("dqn_huber_sgd", "w0", "q"), {})

    def apply(self, variables, obs, carry=(), *, train=False, key=None):
        p = variables.params
        hidden = jnp.tanh(linear(p["hidden"], obs))
        if "out" in p:
            q = linear(p["out"], hidden)
        else:
            q = linear(p["adv"], hidden)
            q = linear(p["value"], hidden) + q - q.mean(axis=1, keepdims=True)
        return (q, q.max(axis=1)), carry, {}


def linear(layer, x):
    return x @ layer["kernel"] + layer["bias"][None]


def weights(case, when, network):
    """`when` is `w0`, `w/K` or `g/K`."""
    prefix = f"{case}/{when}/{network}/"
    tree = {}
    for name in FILE.files:
        if name.startswith(prefix):
            layer, leaf = name.removeprefix(prefix).split("/")
            tree.setdefault(layer, {})[leaf] = jnp.asarray(FILE[name])
    return tree


def before(case, step, network):
    return weights(case, "w0" if step == 1 else f"w/{step - 1}", network)


def hyper(case):
    return json.loads(str(FILE[f"{case}/hyper"]))


def agent_of(case):
    h = hyper(case)
    spec = EnvSpec(Box([-9.0] * 3, [9.0] * 3), Discrete(4))
    delta = 1.0 if h["loss"] == "huber" else None
    return DQN(spec, network=Net(), double=h["double"], huber_delta=delta, gamma=h["gamma"], tau=h["tau"], period=h["period"])


def transitions(case):
    """All 16 rows."""
    h, data = hyper(case), {name.split("/in/")[1]: FILE[name] for name in FILE.files if name.startswith(f"{case}/in/")}
    if h["n"] > 1:
        return n_step_transitions(case, data, h)
    counts = (data["step_type"] != LAST) * data.get("weight", 1.0)
    return Transition(
        *(jnp.asarray(data[name]) for name in ("obs", "action")),
        None if "mask" not in data else jnp.asarray(data["mask"]),
        jnp.asarray(data["reward"]) * h["reward_scale"],
        jnp.asarray(data["discount"]) * h["gamma"],
        jnp.asarray(data["next_obs"]),
        None if "next_mask" not in data else jnp.asarray(data["next_mask"]),
        jnp.asarray(counts, jnp.float32),
        jnp.arange(16, dtype=jnp.int32),
    )


def n_step_transitions(case, data, h):
    """The rows as 16 environments, drawn from a replay; `right` of the file tells which ones TF-Agents computes correctly."""
    steps = h["n"]
    time_major = {name: np.swapaxes(x, 0, 1) for name, x in data.items() if name != "right"}

    def after(x, dtype):
        return jnp.asarray(np.concatenate([np.zeros_like(x[:1]), x[:steps]]), dtype)

    ended = time_major["next_step_type"][:steps] == LAST
    terminal = ended & (time_major["discount"][:steps] == 0)
    time_steps = TimeStep(
        jnp.asarray(time_major["obs"]),
        after(time_major["reward"], jnp.float32),
        after(terminal, bool),
        after(ended & ~terminal, bool),
        jnp.zeros((steps + 1, 16), bool),
    )
    replay = Replay(16 * 2 * steps, steps)
    state = replay.init(jnp.zeros(3), jnp.zeros((), jnp.int32))
    state = replay.add(state, Rollout(time_steps, jnp.asarray(time_major["action"][:steps])))
    drawn = replay.sample(state, jax.random.key(0), 4096, num_envs=16, n_step=steps, gamma=h["gamma"])
    found = [int(np.flatnonzero((np.asarray(drawn.obs) == row).all(axis=1))[0]) for row in data["obs"][:, 0]]
    rows = jax.tree.map(lambda x: x[jnp.asarray(found)], drawn)
    return dataclasses.replace(rows, weight=jnp.asarray(data["right"], jnp.float32))


def batch_of(case, step):
    rows = jnp.asarray(FILE[f"{case}/batch/{step}"])
    return jax.tree.map(lambda x: x[rows], transitions(case))


def loss_and_gradient(case, step):
    """By the mean over all 8 rows, as there."""
    agent, batch = agent_of(case), batch_of(case, step)
    online, target = (Variables(before(case, step, name), {}) for name in ("q", "target_q"))
    count = float(np.sum(batch.weight)) if hyper(case)["n"] > 1 else 8.0
    batch = dataclasses.replace(batch, weight=batch.weight / count)
    # Without κ ours is half of the squared error.
    scale = 1.0 if hyper(case)["loss"] == "huber" else 2.0

    def loss(params):
        return scale * agent.loss(params, batch, online=online, target=target)[0]

    return jax.value_and_grad(loss)(online.params)


@EVERY_STEP
def test_td_errors(case, step):
    agent, batch = agent_of(case), batch_of(case, step)
    online, target = (Variables(before(case, step, name), {}) for name in ("q", "target_q"))
    q = Net().apply(online, batch.obs)[0][0]
    got = agent.td_target(batch, online=online, target=target) - q[jnp.arange(8), batch.action]
    counts = np.asarray(batch.weight) > 0
    assert counts.sum() >= 4
    np.testing.assert_allclose(np.asarray(got)[counts], FILE[f"{case}/step/{step}/td_error"][counts], **NEAR)


@EVERY_STEP
def test_loss_and_gradient(case, step):
    loss, gradient = loss_and_gradient(case, step)
    batch = batch_of(case, step)
    if bool((batch.weight > 0).all()) or hyper(case)["n"] == 1:
        np.testing.assert_allclose(loss, FILE[f"{case}/step/{step}/loss"], **NEAR)
        clip = hyper(case)["grad_clip"]
        wanted = weights(case, f"g/{step}", "q")
        for got, expected in zip(jax.tree.leaves(gradient), jax.tree.leaves(wanted), strict=True):
            norm = jnp.linalg.norm(got)
            got = got if clip is None else got * jnp.minimum(1.0, clip / norm)
            np.testing.assert_allclose(got, expected, **NEAR)
    else:
        td_loss = np.asarray(FILE[f"{case}/step/{step}/td_loss"])
        np.testing.assert_allclose(loss, td_loss[np.asarray(batch.weight) > 0].mean(), **NEAR)


@EVERY_STEP
def test_target_update(case, step):
    follow = Follow(tau=hyper(case)["tau"], period=hyper(case)["period"])
    state = follow.init()
    # The count goes on from call to call; the target of before is the file's.
    for _ in range(step - 1):
        _, state = follow.step(state, {}, {})
    online, target = weights(case, f"w/{step}", "q"), before(case, step, "target_q")
    got, _ = follow.step(state, online, target)
    wanted = weights(case, f"w/{step}", "target_q")
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **NEAR), got, wanted)
