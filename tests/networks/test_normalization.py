"""Normalization of actors and critics: batch renormalization in closed form, and the places of the normalization."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import polyak
from polyak.core.spaces import Box, Dict, EnvSpec
from polyak.networks.normalization import BatchRenorm

SPEC = EnvSpec(Box([-9.0] * 3, [9.0] * 3), Box([-1.0] * 2, [1.0] * 2))
KEY = jax.random.key(0)
X = np.asarray(jax.random.normal(KEY, (2, 32, 5))) * np.array([0.1, 1.0, 10.0, 1.0, 1.0]) + np.array(
    [0.0, 0.5, 1.0, 30.0, -30.0]
)


def renorm(warmup, mean=0.0, var=1.0):
    """Batch renormalization of two critics whose running statistics are these, with a scale and a bias."""
    module = BatchRenorm((2, 1, 5), warmup)
    module.mean[...], module.var[...] = jnp.full((2, 1, 5), mean), jnp.full((2, 1, 5), var)
    module.scale[...] = jnp.linspace(0.5, 2.0, 10).reshape(2, 1, 5)
    module.bias[...] = jnp.linspace(-1.0, 1.0, 10).reshape(2, 1, 5)
    return module


def batch_statistics():
    return X.mean(1, keepdims=True), np.sqrt(X.var(1, keepdims=True) + 1e-3)


def test_during_the_warmup_it_is_batch_normalization_whose_running_statistics_advance():
    module, (mean, std) = renorm(warmup=2), batch_statistics()
    wanted = (X - mean) / std * np.asarray(module.scale[...]) + np.asarray(module.bias[...])
    for steps in (1, 2):
        np.testing.assert_allclose(module(jnp.asarray(X, jnp.float32)), wanted, rtol=1e-4, atol=1e-4)
        assert int(module.steps[...]) == steps
        np.testing.assert_allclose(module.mean[...], (1 - 0.99**steps) * mean, rtol=1e-4, atol=1e-6)
        var = 0.99**steps + (1 - 0.99**steps) * X.var(1, keepdims=True)
        np.testing.assert_allclose(module.var[...], var, rtol=1e-4)
    assert not np.allclose(module(jnp.asarray(X, jnp.float32)), wanted, atol=0.1)


def test_after_the_warmup_r_and_d_are_clipped():
    module, (mean, std) = renorm(warmup=0), batch_statistics()
    running_std = np.sqrt(1.001)
    r, d = np.clip(std / running_std, 1 / 3, 3), np.clip(mean / running_std, -5, 5)
    # Features whose r reaches each of its bounds, and d of its, and one between them.
    assert np.all(r[:, 0, 0] == 1 / 3) and np.all(r[:, 0, 2] == 3) and np.all(d[:, 0, 3:] == [5, -5])
    assert np.all(np.abs(r[:, 0, 1] - 1) < 0.4) and np.all(np.abs(d[:, 0, 1]) < 1)
    wanted = ((X - mean) / std * r + d) * np.asarray(module.scale[...]) + np.asarray(module.bias[...])
    np.testing.assert_allclose(module(jnp.asarray(X, jnp.float32)), wanted, rtol=1e-4, atol=1e-4)


def test_where_nothing_is_clipped_training_computes_what_evaluation_does():
    module = renorm(warmup=0, mean=0.2, var=1.3)
    x = jnp.asarray(X[..., 1:2] + np.linspace(-1, 1, 5), jnp.float32)
    module.eval()
    wanted = module(x)
    before = nnx.to_pure_dict(nnx.state(module, nnx.BatchStat))
    np.testing.assert_array_equal(before["mean"], np.full((2, 1, 5), 0.2, np.float32))
    assert int(before["steps"]) == 0
    module.train()
    np.testing.assert_allclose(module(x), wanted, rtol=1e-4, atol=1e-5)
    assert int(module.steps[...]) == 1


@pytest.mark.parametrize("warmup", [0, 10])
def test_the_gradient_flows_through_the_statistics_of_the_batch_and_not_through_r_and_d(warmup):
    weight, (mean, std) = np.asarray(jax.random.normal(KEY, X.shape)), batch_statistics()
    r = np.clip(std / np.sqrt(1.001), 1 / 3, 3) if warmup == 0 else np.ones_like(std)
    scale = np.asarray(renorm(warmup).scale[...])
    found = jax.grad(lambda x: jnp.sum(weight * renorm(warmup)(x)))(jnp.asarray(X, jnp.float32))
    g, normal = weight * scale * r, (X - mean) / std
    wanted = (g - g.mean(1, keepdims=True) - normal * (g * normal).mean(1, keepdims=True)) / std
    np.testing.assert_allclose(found, wanted, rtol=1e-3, atol=2e-4)


def normalize(x, eps):
    return (x - x.mean(0)) / np.sqrt(x.var(0) + eps)


@pytest.mark.parametrize(("norm", "eps"), [("batch", 1e-5), ("batch_renorm", 1e-3), ("layer", None)])
@pytest.mark.parametrize("place", ["activation", "linear"])
def test_actor_and_critics_normalize_in_the_place_of_the_setting(norm, eps, place):
    settings = {"hidden": (8, 6), "norm": norm, "norm_before": place}
    obs, action = jnp.split(jax.random.normal(KEY, (16, 5)), [3], axis=1)

    def hidden(x, kernels, biases):
        of = (lambda x: normalize(x.T, 1e-6).T) if eps is None else lambda x: normalize(x, eps)
        for kernel, bias in zip(kernels, biases, strict=True):
            x = of(x) if place == "linear" else x
            x = x @ kernel + bias
            x = np.maximum(of(x) if place == "activation" else x, 0)
        return of(x) if place == "linear" else x

    critics = polyak.Critics(**settings)
    variables = critics.init(KEY, SPEC)
    (q, _), _, stats = critics.apply(variables, (obs, action), train=True)
    weights = jax.tree.map(np.asarray, variables.params)
    layers = [weights["layers"][i]["linear"] for i in range(2)]
    for i in range(2):
        features = hidden(
            np.c_[np.asarray(obs), np.asarray(action)], *([layer[name][i] for layer in layers] for name in ("kernel", "bias"))
        )
        wanted = features @ weights["head"]["kernel"][i] + weights["head"]["bias"][i]
        np.testing.assert_allclose(q[:, i], wanted[:, 0], rtol=2e-3, atol=1e-4)
    assert (jax.tree.leaves(stats) == []) == (norm == "layer")
    actor = polyak.Actor(**settings)
    variables = actor.init(KEY, SPEC)
    (params, _), _, stats = actor.apply(variables, obs, train=True)
    weights = jax.tree.map(np.asarray, variables.params)
    layers, head = weights["actor"]["dense"]["layers"], weights["policy"]["linear"]
    features = hidden(np.asarray(obs), *([layers[i][name] for i in range(2)] for name in ("kernel", "bias")))
    np.testing.assert_allclose(params["loc"], features @ head["kernel"] + head["bias"], rtol=2e-3, atol=1e-4)
    assert (jax.tree.leaves(stats) == []) == (norm == "layer")
    evaluated = [actor.apply(variables, rows)[0][0]["loc"][0] for rows in (obs, obs[:1])]
    np.testing.assert_allclose(*evaluated, rtol=1e-5, atol=1e-6, err_msg="in evaluation mode rows do not see each other")


@pytest.mark.parametrize("network", [polyak.Actor, polyak.Critics])
def test_settings_are_checked_and_those_without_effect_warned_of(network):
    for name, value in (("norm", "spectral"), ("norm_before", "head"), ("renorm_warmup", -1)):
        with pytest.raises(ValueError, match=f"{network.__name__}: {name} must be .*, got {value!r}"):
            network(**{"norm": "batch_renorm", name: value})
    with pytest.warns(UserWarning, match="norm_before='linear' has no effect with norm=None, only if norm is set"):
        network(norm_before="linear")
    with pytest.warns(UserWarning, match="renorm_warmup=5 has no effect with norm='batch', only with norm=batch_renorm"):
        network(norm="batch", renorm_warmup=5)
    with pytest.warns(UserWarning, match=rf"{network.__name__}: norm='layer' has no effect with hidden=\(\), only with layers"):
        network((), norm="layer")
    network((), norm="layer", norm_inputs=True)
    network((), norm="layer", norm_before="linear")


@pytest.mark.parametrize("network", [polyak.MLP, polyak.NatureCNN, polyak.GRU])
def test_normalization_without_layers_is_warned_of(network):
    with pytest.warns(UserWarning, match=rf"{network.__name__}: norm='layer' has no effect with hidden=\(\), only with layers"):
        network(hidden=(), norm="layer")


def test_normalization_of_the_critic_alone_has_an_effect():
    polyak.MLP((), norm="layer", head=polyak.PolicyAndValue(value_hidden=(4,)))


@pytest.mark.parametrize(("hidden", "of_critic"), [((), (4,)), ((4,), ())])
def test_halves_of_a_network_are_normalized_where_they_have_layers(hidden, of_critic):
    spec = EnvSpec(Dict({"a": Box([-9.0], [9.0]), "b": Box([-9.0], [9.0])}), SPEC.action)
    network = polyak.MLP(hidden, norm="layer", head=polyak.PolicyAndValue(value_hidden=of_critic))
    halves = polyak.PPO(spec, network, num_steps=8, actor_obs=("a",)).network
    found = {half.hidden: half.norm for half in (halves.actor, halves.critic)}
    assert found == {(): None, (4,): "layer"} and halves.critic.hidden == of_critic


def test_an_agent_that_keeps_its_actor_in_evaluation_mode_warns():
    network = polyak.ActorAndCritic(actor=polyak.Actor((8,), norm="batch_renorm"), critic=polyak.MLP((8,)))
    with pytest.warns(UserWarning, match=r"PPO: the network is always in evaluation mode, .*Actor\(.*norm='batch_renorm'"):
        polyak.PPO(SPEC, network).init(KEY)


def test_the_warning_of_evaluation_mode_points_at_no_line_of_polyak(unchecked):
    env = polyak.envs.make("jax/CartPole-v1", num_envs=2)
    network = polyak.ActorAndCritic(actor=polyak.Actor((4,), norm="batch_renorm"), critic=polyak.MLP((4,)))
    agent = polyak.PPO(env.spec, network, num_steps=8, num_minibatches=1)
    with pytest.warns(UserWarning, match="always in evaluation mode") as caught:
        polyak.train.run(agent, env, env_steps=16, progress=False)
    assert not [warning.filename for warning in caught if "/polyak/" in warning.filename]
