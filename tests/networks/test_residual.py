"""Residual blocks of actors and critics against a slow forward pass in NumPy, and trained by the agents that take them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import polyak
from tests.agents.test_actor_critics import SPEC, random_rollout, updated

KEY = jax.random.key(0)
OBS, ACTION = jnp.split(4.0 * jax.random.normal(KEY, (6, 5)), [3], axis=1)


def random_params(network):
    """Variables whose biases and scales of normalizations are not 0 and 1."""
    variables = network.init(KEY, SPEC)
    leaves, tree = jax.tree.flatten(variables.params)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    leaves = [x + 0.3 * jax.random.normal(key, x.shape) for key, x in zip(keys, leaves, strict=True)]
    return dataclasses.replace(variables, params=jax.tree.unflatten(tree, leaves))


def linear(weights, x):
    return x @ np.asarray(weights["kernel"], float) + np.asarray(weights["bias"], float)


def normalize(weights, x, norm):
    axis, eps = {"layer": (1, 1e-6), "batch": (0, 1e-5), "batch_renorm": (0, 1e-3)}[norm]
    normal = (x - x.mean(axis, keepdims=True)) / np.sqrt(x.var(axis, keepdims=True) + eps)
    return normal * np.asarray(weights["scale"], float) + np.asarray(weights["bias"], float)


def features(weights, x, kind, norm):
    """The features of SimBa (pre_norm) and of BRO (post_norm), layer by layer as in the papers."""
    x = linear(weights["first"], x)
    if kind == "post_norm":
        x = np.maximum(normalize(weights["first_norm"], x, norm), 0)
    for block in weights["blocks"].values():
        if kind == "pre_norm":
            assert block["inner"]["kernel"].shape == (8, 32), "the inner layer is four times as wide"
            y = np.maximum(linear(block["inner"], normalize(block["inner_norm"], x, norm)), 0)
            x = x + linear(block["outer"], y)
        else:
            y = np.maximum(normalize(block["inner_norm"], linear(block["inner"], x), norm), 0)
            x = x + normalize(block["outer_norm"], linear(block["outer"], y), norm)
    return normalize(weights["last_norm"], x, norm) if kind == "pre_norm" else x


def of_critic(weights, i):
    """The parameters of critic i of 3; `nnx.BatchNorm`, under a `"norm"`, has all critics' features side by side."""
    if not isinstance(weights, dict):
        return np.asarray(weights.reshape(3, -1)[i] if weights.ndim == 1 else weights[i])
    weights = weights["norm"] if set(weights) == {"norm"} else weights
    return {name: of_critic(value, i) for name, value in weights.items()}


@pytest.mark.parametrize("norm", [None, "batch", "batch_renorm"])
@pytest.mark.parametrize("kind", ["pre_norm", "post_norm"])
def test_actor_and_critics_compute_the_blocks_of_the_papers(kind, norm):
    settings = {"hidden": (8, 8), "residual": kind, "norm": norm, "norm_inputs": norm == "batch"}
    actor = polyak.Actor(**settings)
    variables = random_params(actor)
    dense = variables.params["actor"]["dense"]
    x = np.asarray(OBS, float)
    x = normalize(dense["input_norm"], x, "batch") if norm == "batch" else x
    wanted = linear(variables.params["policy"]["linear"], features(dense["residual"], x, kind, norm or "layer"))
    params = actor.apply(variables, OBS, train=True)[0][0]
    np.testing.assert_allclose(params["loc"], wanted, rtol=1e-3, atol=1e-3)
    critics = polyak.Critics(**settings, num_critics=3)
    variables = random_params(critics)
    q = critics.apply(variables, (OBS, ACTION), train=True)[0][0]
    for i in range(3):
        weights = of_critic(variables.params, i)
        x = np.c_[np.asarray(OBS, float), np.asarray(ACTION, float)]
        x = normalize(weights["input_norm"], x, "batch") if norm == "batch" else x
        wanted = linear(weights["head"], features(weights["layers"][0], x, kind, norm or "layer"))
        np.testing.assert_allclose(q[:, i], wanted[:, 0], rtol=1e-3, atol=1e-3)


def on_sphere(x):
    return x / np.linalg.norm(x, axis=1, keepdims=True)


def on_hypersphere(weights, x):
    """The features of SimbaV2, with the scales and steps as in the authors' code: a parameter times a constant."""

    def scaled(part, x, factor=1.0):
        return x @ np.asarray(part["linear"]["kernel"], float) * np.asarray(part["scale"]["scale"], float) * factor

    x = on_sphere(scaled(weights["first"], on_sphere(np.c_[x, np.full(len(x), 3.0)])))
    for block in weights["blocks"].values():
        y = np.maximum(scaled(block["inner"], x), 0) + 1e-8
        y = on_sphere(y @ np.asarray(block["outer"]["kernel"], float))
        # α starts at 1 / (2 + 1), as a parameter of size 1 / √8.
        x = on_sphere(x + np.asarray(block["step"]["scale"], float) * np.sqrt(8) / 3 * (y - x))
    return scaled(weights["last"], x)


def test_actor_and_critics_compute_the_hyperspheres_of_the_paper():
    settings = {"hidden": (8, 8), "residual": "hypersphere"}
    actor = polyak.Actor(**settings)
    start = actor.init(KEY, SPEC).params["actor"]["dense"]["residual"]
    sizes = [start["first"]["scale"], start["blocks"][0]["inner"]["scale"], start["last"]["scale"], start["blocks"][1]["step"]]
    for part, size in zip(sizes, (np.sqrt(2 / 8), np.sqrt(2 / 32), 1.0, 1 / np.sqrt(8)), strict=True):
        np.testing.assert_allclose(part["scale"], size, rtol=1e-6)
    variables = random_params(actor)
    features = on_hypersphere(variables.params["actor"]["dense"]["residual"], np.asarray(OBS, float))
    wanted = linear(variables.params["policy"]["linear"], features)
    np.testing.assert_allclose(actor.apply(variables, OBS)[0][0]["loc"], wanted, rtol=1e-3, atol=1e-3)
    critics = polyak.Critics(**settings, num_critics=3)
    variables = random_params(critics)
    q = critics.apply(variables, (OBS, ACTION))[0][0]
    for i in range(3):
        weights = of_critic(variables.params, i)
        x = np.c_[np.asarray(OBS, float), np.asarray(ACTION, float)]
        wanted = linear(weights["head"], on_hypersphere(weights["layers"][0], x))
        np.testing.assert_allclose(q[:, i], wanted[:, 0], rtol=1e-3, atol=1e-3)


def test_hyperspheres_need_unit_weights_and_have_no_other_normalization():
    blocks = {"residual": "hypersphere"}
    with pytest.raises(ValueError, match="Actor: norm must be None with residual='hypersphere', got 'layer'"):
        polyak.Actor((8,), norm="layer", **blocks)
    with pytest.raises(ValueError, match=r"Critics: dropout must be 0 with residual='hypersphere', got 0\.1"):
        polyak.Critics((8,), dropout=0.1, **blocks)
    for agent, std in ((polyak.SAC, "state"), (polyak.TD3, "fixed")):
        with pytest.raises(ValueError, match=rf"{agent.__name__}: actor with residual='hypersphere' needs weight_norm=True"):
            agent(SPEC, polyak.Actor((8,), std=std, **blocks), replay=polyak.UniformReplay(64))
    with pytest.raises(ValueError, match="BC: network with residual='hypersphere' needs weight_norm=True, a setting of SAC"):
        polyak.BC(SPEC, polyak.Actor((8,), **blocks))
    with pytest.raises(ValueError, match="IQL: critics with residual='hypersphere' needs weight_norm=True, a setting of SAC"):
        polyak.IQL(SPEC, critics=polyak.Critics((8,), **blocks))
    with pytest.raises(ValueError, match="FQL: flow with residual='hypersphere' needs weight_norm=True, a setting of SAC"):
        polyak.FQL(SPEC, flow=polyak.Actor((8,), std="fixed", **blocks))
    with pytest.raises(ValueError, match="PPO: actor with residual='hypersphere' needs weight_norm=True, a setting of SAC"):
        polyak.PPO(SPEC, polyak.ActorAndCritic(polyak.Actor((8,), **blocks)))
    with pytest.raises(ValueError, match="Actor: orthogonal must be False with residual='hypersphere', got True"):
        polyak.Actor((8,), orthogonal=True, **blocks)


def test_blocks_have_layer_normalization_and_one_width():
    assert polyak.Actor((8,), residual="pre_norm") == polyak.Actor((8,), residual="pre_norm", norm="layer")
    for hidden in ((8, 16), ()):
        with pytest.raises(
            ValueError, match=r"Critics: hidden must have one width for all residual blocks, such as \(512, 512\)"
        ):
            polyak.Critics(hidden, residual="post_norm")
    with pytest.raises(ValueError, match=r"Actor: residual must be .*, got 'simba'"):
        polyak.Actor((8,), residual="simba")
    with pytest.warns(UserWarning, match="norm_inputs=True has no effect with norm=None"):
        polyak.Critics((8,), norm_inputs=True)


def test_units_of_blocks_are_dropped_in_training():
    critics = polyak.Critics((8, 8), residual="pre_norm", dropout=0.5)
    variables = critics.init(KEY, SPEC)

    def q(train, key):
        return np.asarray(critics.apply(variables, (OBS, ACTION), train=train, key=jax.random.key(key))[0][0])

    np.testing.assert_array_equal(q(False, 1), q(False, 2))
    assert not np.array_equal(q(True, 1), q(True, 2))


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["CrossQ", "SAC", "TD3", "DDPG"])
def test_agents_train_every_layer_of_the_blocks(algorithm):
    norm = {"norm": "batch_renorm", "norm_before": "linear"} if algorithm == "CrossQ" else {}
    single = {"num_critics": 1} if algorithm == "DDPG" else {}
    std = {"std": "fixed"} if algorithm in ("DDPG", "TD3") else {}
    agent = getattr(polyak, algorithm)(
        SPEC,
        polyak.Actor((8,), residual="pre_norm", **std, **norm),
        polyak.Critics((8, 8), residual="post_norm", **single, **norm),
        replay=polyak.UniformReplay(64), learning_starts=0, batch_size=8, num_steps=8, updates_per_step=0.5,
    )  # fmt: skip
    before = agent.init(KEY)
    after, _ = updated(agent, [random_rollout(agent, seed=i) for i in range(2)])
    for name in ("actor", "critics"):
        old, new = (getattr(state.copies, name).online.params for state in (before, after))
        changed = jax.tree.map(lambda x, y: bool(jnp.any(x != y)), old, new)
        assert all(jax.tree.leaves(changed)), changed
