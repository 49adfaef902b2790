"""DQN and C51 against TF-Agents 0.19: losses, TD errors, gradients, optimizer steps and target updates of seven problems.

`reference/tf_agents_dqn.npz` holds their data, weights and results. TF-Agents takes means over all 8 rows of a batch, also
those that only reset; ours are over the rows that count. Its n-step returns run over truncated ends into the next episode: such
rows are given to the loss as it has them, and all others come from the replay.
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from polyak.agents.c51 import C51
from polyak.agents.dqn import DQN
from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.struct import static, struct
from polyak.core.types import Rollout, TimeStep, Variables
from polyak.ops.losses import huber
from polyak.ops.schedules import StepCount
from polyak.replay.replay import Transition
from polyak.replay.uniform import UniformReplay

FILE = np.load(Path(__file__).parent / "reference" / "tf_agents_dqn.npz")
CASES = sorted({name.split("/")[0] for name in FILE.files})
EVERY_STEP = pytest.mark.parametrize(("case", "step"), [(case, k) for case in CASES for k in range(1, 5)])
NEAR = {"rtol": 1e-5, "atol": 1e-5}
LAST = 2


@dataclasses.dataclass(frozen=True)
class Net:
    """A tanh layer, and one linear head or two; for C51 with the logits of all atoms."""

    case: str

    def init(self, key, spec):
        return Variables(weights(self.case, "w0", "q"), {})

    def apply(self, variables, obs, carry=(), *, train=False, key=None):
        p = variables.params
        hidden = jnp.tanh(linear(p["hidden"], obs))
        if "adv" in p:
            q = linear(p["adv"], hidden)
            q = linear(p["value"], hidden) + q - q.mean(axis=1, keepdims=True)
        else:
            q = linear(p["out"], hidden)
        if is_c51(self.case):
            return q.reshape(-1, 4, hyper(self.case)["atoms"]), carry, {}
        return (q, q.max(axis=1)), carry, {}


def is_c51(case):
    return hyper(case)["kind"] == "c51"


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
    shared = {name: h[name] for name in ("double", "gamma", "tau", "reward_scale")} | {"target_period": h["period"]}
    shared |= {"network": Net(case), "optimizer": optimizer_of(h)}
    if is_c51(case):
        return C51(spec, num_atoms=h["atoms"], v_min=h["vmin"], v_max=h["vmax"], **shared)
    return DQN(spec, huber_delta=1.0 if h["loss"] == "huber" else None, **shared)


def optimizer_of(h):
    """As theirs: gradients clipped variable by variable, and Adam with Keras' ε, added before the bias correction."""
    clip = optax.identity() if h["grad_clip"] is None else optax.stateless(clip_each(h["grad_clip"]))
    return optax.chain(clip, optax.sgd(h["lr"]) if h["opt"] == "sgd" else keras_adam(h["lr"], **h["adam"]))


def clip_each(limit):
    return lambda updates, _: jax.tree.map(lambda g: g * jnp.minimum(1.0, limit / jnp.linalg.norm(g)), updates)


def keras_adam(lr, beta_1, beta_2, epsilon):
    def init(params):
        return jnp.float32(0.0), jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)

    def update(gradient, state, params=None):
        t, m, v = state
        t = t + 1
        m = jax.tree.map(lambda m, g: beta_1 * m + (1 - beta_1) * g, m, gradient)
        v = jax.tree.map(lambda v, g: beta_2 * v + (1 - beta_2) * g * g, v, gradient)
        rate = lr * jnp.sqrt(1 - beta_2**t) / (1 - beta_1**t)
        return jax.tree.map(lambda m, v: -rate * m / (jnp.sqrt(v) + epsilon), m, v), (t, m, v)

    return optax.GradientTransformation(init, update)


def transitions(case):
    """All 16 rows."""
    h, data = hyper(case), {name.split("/in/")[1]: FILE[name] for name in FILE.files if name.startswith(f"{case}/in/")}
    if h["n"] > 1:
        return n_step_transitions(case, data, h)
    counts = (data["step_type"] != LAST) * data.get("weight", 1.0)
    return Transition(
        *(jnp.asarray(data[name]) for name in ("obs", "action")),
        None if "mask" not in data else jnp.asarray(data["mask"]),
        jnp.asarray(data["reward"]),
        jnp.asarray(data["discount"]) * h["gamma"],
        jnp.asarray(data["next_obs"]),
        None if "next_mask" not in data else jnp.asarray(data["next_mask"]),
        jnp.asarray(counts, jnp.float32),
        jnp.arange(16, dtype=jnp.int32),
    )


def n_step_transitions(case, data, h):
    """The rows as 16 environments, drawn from a replay, but for those that TF-Agents computes wrongly."""
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
    replay = UniformReplay(16 * 2 * steps)
    state = replay.init(jnp.zeros(3), jnp.zeros((), jnp.int32), num_steps=steps)
    state = replay.add(state, Rollout(time_steps, jnp.asarray(time_major["action"][:steps])))
    drawn = replay.sample(state, jax.random.key(0), 4096, num_envs=16, n_step=steps, gamma=h["gamma"])
    found = [int(np.flatnonzero((np.asarray(drawn.obs) == row).all(axis=1))[0]) for row in data["obs"][:, 0]]
    rows = jax.tree.map(lambda x: x[jnp.asarray(found)], drawn)
    for row in np.flatnonzero(~data["right"]):
        rows = with_their_row(rows, row, {name: x[row] for name, x in data.items()}, h)
    return rows


def with_their_row(rows, row, data, h):
    """A transition as TF-Agents has it, whose n steps run over a truncated end: the rewards of the next episode are added."""
    discounts = np.cumprod(np.concatenate([[1.0], h["gamma"] * data["discount"][: h["n"]]]))
    reward = np.sum(discounts[:-1] * data["reward"][: h["n"]])
    assert abs(reward - float(rows.reward[row])) > 0.01 and not np.isclose(discounts[-1], float(rows.discount[row]))
    return dataclasses.replace(
        rows,
        reward=rows.reward.at[row].set(reward),
        discount=rows.discount.at[row].set(discounts[-1]),
        next_obs=rows.next_obs.at[row].set(data["obs"][h["n"]]),
    )


def batch_of(case, step):
    rows = jnp.asarray(FILE[f"{case}/batch/{step}"])
    return jax.tree.map(lambda x: x[rows], transitions(case))


def loss_and_gradient(case, step):
    """By the mean over all 8 rows, as there."""
    agent, batch = agent_of(case), batch_of(case, step)
    online, target = (Variables(before(case, step, name), {}) for name in ("q", "target_q"))
    batch = dataclasses.replace(batch, weight=batch.weight / 8.0)
    return jax.value_and_grad(lambda params: agent.loss(params, batch, online=online, target=target)[0])(online.params)


@pytest.mark.slow
@pytest.mark.parametrize(("case", "step"), [(case, k) for case in CASES for k in range(1, 5) if not is_c51(case)])
def test_td_errors_and_losses_of_each_row(case, step):
    agent, batch = agent_of(case), batch_of(case, step)
    online, target = (Variables(before(case, step, name), {}) for name in ("q", "target_q"))
    q = agent.network.apply(online, batch.obs)[0][0]
    got = agent.td_target(batch, online=online, target=target) - q[jnp.arange(8), batch.action]
    counts = np.asarray(batch.weight) > 0
    assert counts.sum() >= (8 if hyper(case)["n"] > 1 else 4)
    for name, values in (("td_error", got), ("td_loss", huber(got, agent.huber_delta))):
        np.testing.assert_allclose(np.asarray(values)[counts], FILE[f"{case}/step/{step}/{name}"][counts], **NEAR)


@EVERY_STEP
def test_loss_and_gradient(case, step):
    loss, gradient = loss_and_gradient(case, step)
    np.testing.assert_allclose(loss, FILE[f"{case}/step/{step}/loss"], **NEAR)
    clip = hyper(case)["grad_clip"]
    near(gradient if clip is None else clip_each(clip)(gradient, None), weights(case, f"g/{step}", "q"))


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_optimizer_steps_and_target_updates(case):
    """All four calls in a row."""
    agent = agent_of(case)
    state = agent.init(jax.random.key(0))
    copies = dataclasses.replace(state.copies, target=Variables(weights(case, "w0", "target_q"), {}))
    for step in range(1, 5):
        batch = batch_of(case, step)
        batch = dataclasses.replace(batch, weight=batch.weight / 8.0)
        copies, _ = agent.train_step(
            copies, batch, jax.random.key(step), jnp.array(True), env_steps=StepCount.of(0), axis_name=None
        )
        near(copies.online.params, weights(case, f"w/{step}", "q"))
        near(copies.target.params, weights(case, f"w/{step}", "target_q"))


@struct
class TheirBatch(UniformReplay):
    """A replay that draws the rows of TF-Agents' first batch."""

    case: str = static(default="")

    def draw(self, state, key, batch_size, num_envs):
        return jnp.asarray(FILE[f"{self.case}/batch/1"], jnp.int32)


def one_step_rollout(case):
    """The 16 rows as one step of 16 environments; those that only reset begin with a time step that is the last."""
    data = {name.split("/in/")[1]: FILE[name] for name in FILE.files if name.startswith(f"{case}/in/")}
    resets, ended = data["step_type"] == LAST, (data["step_type"] != LAST) & (data["next_step_type"] == LAST)
    terminal, none = data["discount"] == 0, np.zeros(16, bool)
    time_steps = TimeStep(
        *(jnp.asarray(np.stack(pair)) for pair in ((data["obs"], data["next_obs"]), (0 * data["reward"], data["reward"]))),
        *(jnp.asarray(np.stack(pair)) for pair in ((resets, ended & terminal), (none, ended & ~terminal), (none, resets))),
        jnp.asarray(np.stack([data["mask"], data["next_mask"]])) if "mask" in data else None,
    )
    return Rollout(time_steps, jnp.asarray(data["action"])[None])


@pytest.mark.parametrize("case", [case for case in CASES if case.endswith("_sgd")])
def test_an_update_through_the_replay_is_theirs_over_the_rows_that_count(case):
    replay = TheirBatch(capacity=32, case=case)
    one_step = {"num_steps": 1, "batch_size": 8, "updates_per_step": 1 / 16, "learning_starts": 1, "replay": replay}
    agent = agent_of(case)
    spec = dataclasses.replace(agent.spec, has_action_mask=f"{case}/in/mask" in FILE.files)
    agent = dataclasses.replace(agent, spec=spec, **one_step)
    state = agent.init(jax.random.key(0))
    target = Variables(weights(case, "w0", "target_q"), {})
    state = dataclasses.replace(state, copies=dataclasses.replace(state.copies, target=target))
    state, metrics = jax.jit(agent.update)(state, one_step_rollout(case), jax.random.key(1))
    # There the mean is over all 8 rows, here over those of a transition; the step of SGD is in proportion.
    ratio = 1 / float(np.mean(FILE[f"{case}/in/step_type"][FILE[f"{case}/batch/1"]] != LAST))
    assert int(state.updates) == 1
    np.testing.assert_allclose(metrics["train/loss"], FILE[f"{case}/step/1/loss"] * ratio, **NEAR)
    first, theirs = (weights(case, when, "q") for when in ("w0", "w/1"))
    near(state.copies.online.params, jax.tree.map(lambda a, b: a + (b - a) * ratio, first, theirs))


def near(got, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **NEAR), got, wanted)
