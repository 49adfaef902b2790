"""DDPG, TD3 and SAC against TF-Agents 0.19: losses, gradients, optimizer steps and target updates of four small problems.

`reference/tf_agents_actor_critics.npz` holds their data, weights, results and random draws. TF-Agents takes means over
all 8 rows of a batch, and for SAC squared errors without a half.
"""

import dataclasses
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from polyak.agents.ddpg import DDPG
from polyak.agents.sac import SAC
from polyak.agents.td3 import TD3
from polyak.copies.follow import Follow
from polyak.core.spaces import Box, EnvSpec
from polyak.core.types import Variables
from polyak.replay.uniform import Transition

FILE = np.load(Path(__file__).parent / "reference" / "tf_agents_actor_critics.npz")
CASES = sorted({name.split("/")[0] for name in FILE.files})
CALLS = range(1, 5)
NEAR = {"rtol": 1e-5, "atol": 1e-5}
KEY = jax.random.key(0)
AGENTS = {"ddpg": DDPG, "td3": TD3, "sac": SAC}


class ActorNet:
    """A tanh layer and a linear head: the mean, and where there are twice as many outputs log σ."""

    def init(self, key, spec):
        return Variables(weights("ddpg_sgd", "w0", "actor"), {})

    def apply(self, variables, obs, carry=(), *, train=False, key=None):
        out = layers(variables.params, obs)
        loc, log_scale = (out[:, :2], out[:, 2:]) if out.shape[1] == 4 else (out, jnp.zeros_like(out))
        return ({"loc": loc, "log_scale": log_scale}, None), carry, {}


class CriticsNet:
    """Each a tanh layer and a linear head."""

    def init(self, key, spec):
        return Variables(critics("ddpg_sgd", "w0"), {})

    def apply(self, variables, obs_and_action, carry=(), *, train=False, key=None):
        row = jnp.concatenate(obs_and_action, axis=1)
        q = jnp.concatenate([layers(params, row) for _, params in sorted(variables.params.items())], axis=1)
        return (q, None), carry, {}


def layers(params, x):
    hidden = jnp.tanh(x @ params["hidden"]["kernel"] + params["hidden"]["bias"][None])
    return hidden @ params["out"]["kernel"] + params["out"]["bias"][None]


def weights(case, when, network):
    """`when` is `w0`, `w/K` or `g/K`."""
    prefix = f"{case}/{when}/{network}/"
    tree = {}
    for name in FILE.files:
        if name.startswith(prefix):
            layer, leaf = name.removeprefix(prefix).split("/")
            tree.setdefault(layer, {})[leaf] = jnp.asarray(FILE[name])
    return tree


def critics(case, when, prefix=""):
    names = [name for name in ("critic1", "critic2") if f"{case}/w0/{name}/out/bias" in FILE]
    return {name: weights(case, when, prefix + name) for name in names}


def at(case, call):
    """The weights before a call."""
    return "w0" if call == 1 else f"w/{call - 1}"


def hyper(case):
    return json.loads(str(FILE[f"{case}/hyper"]))


def agent_of(case):
    h = hyper(case)
    own = {
        "ddpg": lambda: {"huber_delta": 1.0, "max_dqda": h["dqda_clip"]},
        "td3": lambda: {"target_noise": h["noise"], "target_noise_clip": h["noise_clip"], "policy_delay": h["actor_period"]},
        "sac": lambda: {
            "target_entropy": h["target_entropy_used"],
            "alpha_loss": "log_alpha" if h["log_form"] else "alpha",
        },
    }[h["kind"]]()
    obs = Box([-9.0] * 3, [9.0] * 3)
    spec = EnvSpec(obs, Box([-1.0] * 2, [1.0] * 2))
    settings = {"gamma": h["gamma"], "tau": h["tau"], "period": h["period"], "reward_scale": h["reward_scale"], "capacity": 64}
    agent = AGENTS[h["kind"]](spec, actor=ActorNet(), critics=CriticsNet(), **settings, **own)
    # Bounds that do not bite: there target actions are not clipped to them.
    object.__setattr__(agent, "spec", EnvSpec(obs, Box([-9.0] * 2, [9.0] * 2)))
    return agent


def batch_of(case, call):
    """The 8 rows, with weights of a mean over all of them."""
    rows, h = FILE[f"{case}/batch/{call}"], hyper(case)
    data = {name.split("/in/")[1]: FILE[name][rows] for name in FILE.files if name.startswith(f"{case}/in/")}
    return Transition(
        obs=jnp.asarray(data["obs"]),
        action=jnp.asarray(data["action"]),
        action_mask=None,
        reward=jnp.asarray(data["reward"]),
        discount=jnp.asarray(data["discount"]) * h["gamma"],
        next_obs=jnp.asarray(data["next_obs"]),
        next_action_mask=None,
        weight=jnp.asarray(data.get("weight", np.ones(8)) / 8.0, jnp.float32),
        index=jnp.arange(8, dtype=jnp.int32),
    )


def keras_adam(rate, *, beta_1, beta_2, epsilon):
    """Adam with ε added before the bias correction, as Keras has it."""

    def init(params):
        zeros = jax.tree.map(jnp.zeros_like, params)
        return 0, zeros, zeros

    def update(gradient, state, params=None):
        count, m, v = state
        count += 1
        m = jax.tree.map(lambda m, g: beta_1 * m + (1 - beta_1) * g, m, gradient)
        v = jax.tree.map(lambda v, g: beta_2 * v + (1 - beta_2) * g * g, v, gradient)
        step = float(rate * np.sqrt(1 - beta_2**count) / (1 - beta_1**count))
        return jax.tree.map(lambda m, v: -step * m / (jnp.sqrt(v) + epsilon), m, v), (count, m, v)

    return optax.GradientTransformation(init, update)


def optimizer_of(case):
    h = hyper(case)
    return optax.sgd(h["lr"]) if h["opt"] == "sgd" else keras_adam(h["lr"], **h["adam"])


def assert_near(got, wanted):
    assert jax.tree.structure(got) == jax.tree.structure(wanted)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, **NEAR), got, wanted)


def draws(monkeypatch, case, call, what):
    """Every normal draw is the recorded one."""
    name = f"{case}/eps/{call}/{what}"
    if name in FILE:
        monkeypatch.setattr(jax.random, "normal", lambda key, shape=(), dtype=float: jnp.asarray(FILE[name]).reshape(shape))


def losses(case, call, monkeypatch):
    """By network: `(loss_fn(params), params)`, scaled as there, with what a call has trained before."""
    agent, batch, h = agent_of(case), batch_of(case, call), hyper(case)
    before, after = at(case, call), f"w/{call}"
    online, target = critics(case, before), critics(case, before, "target_")
    actor = weights(case, before, "actor")
    own, actor_own = {"target_actor": Variables(weights(case, before, "target_actor"), {})}, {}
    critic_scale, actor_scale, alpha_scale = h.get("loss_weights", (1.0, 1.0, 1.0))
    if h["kind"] == "sac":
        log_alpha = FILE[f"{case}/{before}/log_alpha"]
        own = {"actor": Variables(actor, {}), "alpha": jnp.exp(log_alpha)}
        actor_own = {"alpha": jnp.exp(log_alpha), "key": KEY}
    # That of our SAC is half of the squared error.
    critic_scale *= 2.0 if h["kind"] == "sac" else 1.0

    def critic_loss(params):
        draws(monkeypatch, case, call, "next")
        loss, _ = agent.critic_loss(params, batch, critics=Variables(online, {}), target=Variables(target, {}), key=KEY, **own)
        return critic_scale * loss

    def actor_loss(params):
        draws(monkeypatch, case, call, "actor")
        critics_then = Variables(critics(case, after), {})
        loss, _ = agent.actor_loss(params, batch, actor=Variables(actor, {}), critics=critics_then, **actor_own)
        # There the mean is over the numbers of an action too.
        return (actor_scale if h["kind"] != "ddpg" else 2.0 / 2) * loss

    def alpha_loss(log_alpha):
        draws(monkeypatch, case, call, "alpha")
        stepped = Variables(weights(case, after, "actor"), {})
        return alpha_scale * agent.temperature_loss(log_alpha, batch, actor=stepped, key=KEY)[0]

    found = {"critic": (critic_loss, online), "actor": (actor_loss, actor)}
    return found | ({"alpha": (alpha_loss, jnp.asarray(FILE[f"{case}/{before}/log_alpha"]))} if h["kind"] == "sac" else {})


def gradient_there(case, call, network):
    """None where the network was not trained in this call."""
    if network == "alpha":
        return jnp.asarray(FILE[f"{case}/g/{call}/log_alpha"])
    found = critics(case, f"g/{call}") if network == "critic" else weights(case, f"g/{call}", "actor")
    return found or None


def weights_there(case, call, network):
    if network == "alpha":
        return jnp.asarray(FILE[f"{case}/w/{call}/log_alpha"])
    return critics(case, f"w/{call}") if network == "critic" else weights(case, f"w/{call}", "actor")


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("case", CASES)
def test_losses(case, call, monkeypatch):
    for network, (loss_fn, params) in losses(case, call, monkeypatch).items():
        if hyper(case)["kind"] == "ddpg" and network == "actor":
            continue  # there the value is that of (dq/da)^2
        if gradient_there(case, call, network) is not None:
            np.testing.assert_allclose(loss_fn(params), FILE[f"{case}/step/{call}/{network}_loss"], **NEAR, err_msg=network)


@pytest.mark.parametrize("case", CASES)
def test_gradients_and_optimizer_steps(case, monkeypatch):
    optimizer, states = optimizer_of(case), {}
    for call in CALLS:
        for network, (loss_fn, params) in losses(case, call, monkeypatch).items():
            wanted = gradient_there(case, call, network)
            if wanted is None:
                assert_near(params, weights_there(case, call, network))
                continue
            gradient = jax.grad(loss_fn)(params)
            bound = hyper(case)["grad_clip"]
            if bound is not None:
                # Each variable by itself.
                gradient = jax.tree.map(lambda g, bound=bound: g * jnp.minimum(1.0, bound / jnp.linalg.norm(g)), gradient)
            assert_near(gradient, wanted)
            updates, states[network] = optimizer.update(gradient, states.get(network, optimizer.init(params)))
            assert_near(optax.apply_updates(params, updates), weights_there(case, call, network))


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("case", CASES)
def test_target_updates(case, call):
    follow = Follow(tau=hyper(case)["tau"], period=hyper(case)["period"])
    state = dataclasses.replace(follow.init(), elapsed=jnp.uint32((call - 1) % hyper(case)["period"]))
    pairs = [(critics(case, f"w/{call}"), critics(case, at(case, call), "target_"))]
    wanted = [critics(case, f"w/{call}", "target_")]
    if hyper(case)["kind"] != "sac":
        pairs.append((weights(case, f"w/{call}", "actor"), weights(case, at(case, call), "target_actor")))
        wanted.append(weights(case, f"w/{call}", "target_actor"))
    for (online, target), expected in zip(pairs, wanted, strict=True):
        assert_near(follow.step(state, online, target)[0], expected)
