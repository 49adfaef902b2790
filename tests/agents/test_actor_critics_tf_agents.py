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
from polyak.agents.soft_actor import SoftActorAgent
from polyak.agents.td3 import TD3
from polyak.core.spaces import Box, EnvSpec
from polyak.core.types import Rollout, TimeStep, Variables
from polyak.replay.replay import Transition
from polyak.replay.uniform import UniformReplay

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


def agent_of(case, scale=None):
    """With a `scale`, it trains by `optimizer_there`."""
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
    settings = {
        "gamma": h["gamma"],
        "tau": h["tau"],
        "target_period": h["period"],
        "reward_scale": h["reward_scale"],
        "replay": UniformReplay(64),
    }
    settings |= {"learning_starts": 0} | ({} if scale is None else {"optimizer": optimizer_there(case, scale)})
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
        step = rate * (1 - beta_2**count) ** 0.5 / (1 - beta_1**count)
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


NETWORKS = ("critics", "actor", "alpha")


def optimizer_there(case, scale):
    """Of all networks: Keras' Adam or SGD, on gradients that are scaled and clipped as there.

    Args:
        scale: of the mean over the weights that count, which ours is, to theirs over all 8 rows.
    """
    h = hyper(case)
    critic_scale, actor_scale, alpha_scale = h.get("loss_weights", (1.0, 1.0, 1.0))
    # That of our SAC is half of the squared error; the mean of DDPG there is over the 2 numbers of an action too.
    own = {"sac": (2.0, 1.0), "td3": (1.0, 1.0), "ddpg": (1.0, 2.0 / 2)}[h["kind"]]
    factors = dict(zip(NETWORKS, (critic_scale * own[0], actor_scale * own[1], alpha_scale), strict=True))
    inner = optimizer_of(case)

    def init(params):
        return jnp.zeros((), jnp.int32), jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params)

    def update(gradient, state, params=None):
        network = "alpha" if not isinstance(gradient, dict) else "actor" if "out" in gradient else "critics"
        gradient = jax.tree.map(lambda g: g * factors[network] * scale(), gradient)
        if h["grad_clip"] is not None:
            gradient = jax.tree.map(lambda g: g * jnp.minimum(1.0, h["grad_clip"] / jnp.linalg.norm(g)), gradient)
        if h["opt"] == "sgd":
            return inner.update(gradient, inner.init(params))[0], state
        return inner.update(gradient, state)

    return optax.GradientTransformation(init, update)


@pytest.fixture
def one_call(monkeypatch):
    """`(case)` to the agent's compiled `update` on recorded rows and draws: `(state, batch, eps)` to the next state."""

    def compile_update(case):
        recorded, drawing = {}, []
        agent = agent_of(case, lambda: jnp.sum(recorded["batch"].weight))

        def during(what, function):
            def wrapped(*args, **kwargs):
                drawing.append(what)
                try:
                    return function(*args, **kwargs)
                finally:
                    drawing.pop()

            return wrapped

        def normal(key, shape=(), dtype=float):
            return recorded["eps"][drawing[-1]].reshape(shape)

        kind = AGENTS[hyper(case)["kind"]]
        monkeypatch.setattr(kind, "critic_loss", during("next", kind.critic_loss))
        monkeypatch.setattr(kind, "actor_loss", during("actor", kind.actor_loss))
        monkeypatch.setattr(SoftActorAgent, "temperature_loss", during("alpha", SoftActorAgent.temperature_loss))
        monkeypatch.setattr(UniformReplay, "sample", lambda *args, **kwargs: recorded["batch"])
        monkeypatch.setattr(jax.random, "normal", normal)

        @jax.jit
        def update(state, batch, eps):
            recorded.update(batch=batch, eps=eps)
            zeros = jnp.zeros((2, 1))
            steps = TimeStep(jnp.zeros((2, 1, 3)), zeros, *[zeros > 0] * 3)
            return agent.update(state, Rollout(steps, jnp.zeros((1, 1, 2))), KEY)[0]

        return agent, update

    return compile_update


def first_state(agent, case):
    """The agent's, with the weights of before the first call."""
    state = agent.init(KEY)
    h, copies = hyper(case), state.copies

    def with_weights(copies, of):
        names = [name for name in ("online", "target") if getattr(copies, name) is not None]
        found = {name: Variables(of("" if name == "online" else "target_"), {}) for name in names}
        return dataclasses.replace(copies, **found).with_optimizer_state(agent.optimizer)

    critics_then = with_weights(copies.critics, lambda prefix: critics(case, "w0", prefix))
    if h["kind"] == "td3":
        # There the actor steps in calls 1 and 3, here in every second one.
        critics_then = dataclasses.replace(critics_then, steps=jnp.uint32(1))
    new = {"critics": critics_then, "actor": with_weights(copies.actor, lambda prefix: weights(case, "w0", f"{prefix}actor"))}
    if h["kind"] == "sac":
        new["temperature"] = dataclasses.replace(copies.temperature, log_alpha=jnp.asarray(FILE[f"{case}/w0/log_alpha"]))
    return dataclasses.replace(state, copies=dataclasses.replace(copies, **new))


@pytest.mark.parametrize("case", CASES)
def test_updates_of_the_agent_train_its_networks_in_the_order_of_there(case, one_call):
    """Critics, actor against the new critics, α with the new actor, targets: the same weights after every call."""
    agent, update = one_call(case)
    state = first_state(agent, case)
    for call in CALLS:
        prefix = f"{case}/eps/{call}/"
        eps = {name.removeprefix(prefix): jnp.asarray(FILE[name]) for name in FILE.files if name.startswith(prefix)}
        state = update(state, batch_of(case, call), eps)
        actor, found = state.copies.actor, state.copies.critics
        assert_near(found.online.params, critics(case, f"w/{call}"))
        assert_near(found.target.params, critics(case, f"w/{call}", "target_"))
        assert_near(actor.online.params, weights(case, f"w/{call}", "actor"))
        if actor.target is not None:
            assert_near(actor.target.params, weights(case, f"w/{call}", "target_actor"))
        if hyper(case)["kind"] == "sac":
            assert_near(state.copies.temperature.log_alpha, weights_there(case, call, "alpha"))
    assert int(state.updates) == len(CALLS)
