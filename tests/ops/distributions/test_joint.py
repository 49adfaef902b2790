import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from polyak.core.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Tuple, zeros
from polyak.ops.distributions import (
    Bernoulli,
    Categorical,
    Deterministic,
    Distribution,
    Joint,
    MultiCategorical,
    Normal,
    TanhNormal,
    for_space,
    parameter_shapes,
)

SPACES = {
    "discrete": Discrete(3, start=5),
    "multi_discrete": MultiDiscrete((2, 3)),
    "multi_binary": MultiBinary((2, 2)),
    "box": Box([-1.0, -1.0], [1.0, 1.0]),
    "scalar_box": Box(-1.0, 1.0),
    "nested": Dict({"gear": Discrete(4), "steer": Tuple((Box([0.0], [1.0]), MultiBinary((3,))))}),
}
KEY = jax.random.key(0)


def is_shape(x):
    return isinstance(x, tuple) and all(isinstance(n, int) for n in x)


def params_for(space, batch=(6,), seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(
        lambda s: jnp.asarray(rng.normal(size=batch + s), jnp.float32), parameter_shapes(space), is_leaf=is_shape
    )


def test_parameter_shapes():
    assert parameter_shapes(SPACES["discrete"]) == (3,)
    assert parameter_shapes(SPACES["multi_discrete"]) == (5,)
    assert parameter_shapes(SPACES["multi_binary"]) == (2, 2)
    assert parameter_shapes(SPACES["scalar_box"]) == {"loc": (), "log_scale": ()}
    assert parameter_shapes(SPACES["nested"]) == {"gear": (4,), "steer": ({"loc": (1,), "log_scale": (1,)}, (3,))}


@pytest.mark.parametrize("batch", [(), (2, 3)])
@pytest.mark.parametrize("name", SPACES)
def test_every_space_has_its_distribution(name, batch):
    space = SPACES[name]

    @jax.jit
    def everything(params, others):
        d, other = for_space(space, params), for_space(space, others)
        assert isinstance(d, Distribution)
        sample, log_prob = d.sample_and_log_prob(seed=KEY)
        per_row = (log_prob, d.log_prob(sample), d.entropy(), d.kl_divergence(other), d.kl_divergence(d))
        return sample, d.sample(seed=KEY), d.mode(), per_row

    sample, again, mode, per_row = everything(params_for(space, batch), params_for(space, batch, seed=1))
    example = jax.tree.map(lambda x: (x.shape, x.dtype), zeros(space, batch))
    for event in (sample, mode):
        assert jax.tree.map(lambda x: (x.shape, x.dtype), event) == example
    jax.tree.map(np.testing.assert_array_equal, sample, again)
    for x in per_row:
        assert x.shape == batch and x.dtype == jnp.float32 and np.isfinite(x).all()
    np.testing.assert_allclose(per_row[0], per_row[1], rtol=1e-5, atol=1e-5)
    assert (np.asarray(per_row[3]) > 0).all()
    np.testing.assert_allclose(per_row[4], 0, atol=1e-6)


def test_each_space_has_its_kind_of_distribution():
    kinds = {name: type(for_space(space, params_for(space))) for name, space in SPACES.items()}
    assert list(kinds.values()) == [Categorical, MultiCategorical, Bernoulli, Normal, Normal, Joint]
    squashed = for_space(SPACES["nested"], params_for(SPACES["nested"]), squash=True)
    assert type(squashed.parts["steer"][0]) is TanhNormal and type(squashed.parts["gear"]) is Categorical


def test_box_scale_is_the_exponential_and_may_leave_out_the_batch():
    space = SPACES["box"]
    params = {"loc": jnp.zeros((6, 2)), "log_scale": jnp.array([0.0, 1.0])}
    d = for_space(space, params)
    np.testing.assert_allclose(d.scale, np.tile([1.0, np.e], (6, 1)), rtol=1e-6)
    assert d.log_prob(jnp.zeros((6, 2))).shape == (6,)


def test_each_part_of_a_nested_action_uses_its_own_mask():
    @jax.jit
    def sample_and_mode(params, masks):
        each = [for_space(SPACES[name], params[name], masks[name]) for name in ("nested", "multi_discrete")]
        return [(d.sample(seed=KEY), d.mode()) for d in each]

    masks = {
        "nested": {"gear": jnp.tile(jnp.array([False, True, False, False]), (6, 1)), "steer": (None, None)},
        "multi_discrete": jnp.tile(jnp.array([True, False, False, False, True]), (6, 1)),
    }
    nested, multi = sample_and_mode({name: params_for(SPACES[name]) for name in masks}, masks)
    for action in nested:
        np.testing.assert_array_equal(action["gear"], 1)
    for action in multi:
        np.testing.assert_array_equal(action, np.tile([0, 2], (6, 1)))


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("discrete", lambda p: p[:, :2], r"for_space: action: parameters must end in shape \(3,\), got \(6, 2\)"),
        ("multi_discrete", lambda p: p[:, :4], r"must end in shape \(5,\), got \(6, 4\)"),
        ("multi_binary", lambda p: p[:, 0], r"must end in shape \(2, 2\), got \(6, 2\)"),
        ("box", lambda p: p["loc"], r"needs parameters .*log_scale"),
        ("box", lambda p: {**p, "std": p["loc"]}, r"needs parameters .*log_scale"),
        ("nested", lambda p: {"gear": p["gear"]}, "must have the tree of .*'steer'"),
        ("nested", lambda p: {**p, "gear": p["gear"][:, 1:]}, r"action 'gear': parameters must end in shape \(4,\)"),
        (
            "nested",
            lambda p: {**p, "steer": (p["steer"][0], p["steer"][1][:, 1:])},
            r"action 'steer/1': parameters must end in",
        ),
    ],
)
def test_parameters_that_do_not_fit_are_an_error_that_names_the_part(name, change, message):
    space = SPACES[name]
    with pytest.raises(ValueError, match=message):
        for_space(space, change(params_for(space)))


def test_masks_that_do_not_fit_are_an_error():
    ones = jnp.ones((6, 2), bool)
    with pytest.raises(ValueError, match=r"for_space: action: a Box has no mask, got one of shape \(6, 2\)"):
        for_space(SPACES["box"], params_for(SPACES["box"]), ones)
    with pytest.raises(ValueError, match=r"mask must have the shape of logits, got mask \(6, 2\), logits \(6, 3\)"):
        for_space(SPACES["discrete"], params_for(SPACES["discrete"]), ones)
    with pytest.raises(ValueError, match="params and mask must have the tree"):
        for_space(SPACES["nested"], params_for(SPACES["nested"]), {"gear": None})


def test_a_joint_is_the_sum_of_its_parts_each_drawn_from_its_own_key():
    part = Categorical(jnp.tile(jnp.array([0.0, 1.0, 2.0]), (5000, 1)))
    box = Normal(jnp.zeros((5000, 2)), jnp.ones((5000, 2)), 1)

    @jax.jit
    def draw(part, box):
        d = Joint({"a": part, "b": (part, box)})
        sample, log_prob = d.sample_and_log_prob(seed=KEY)
        by_hand = part.log_prob(sample["a"]) + part.log_prob(sample["b"][0]) + box.log_prob(sample["b"][1])
        return sample, log_prob, by_hand, d.entropy(), 2 * part.entropy() + box.entropy()

    sample, log_prob, by_hand, entropy, entropy_by_hand = draw(part, box)
    np.testing.assert_allclose(log_prob, by_hand, rtol=1e-6)
    np.testing.assert_allclose(entropy, entropy_by_hand, rtol=1e-6)
    p = np.exp([0.0, 1.0, 2.0]) / np.exp([0.0, 1.0, 2.0]).sum()
    np.testing.assert_allclose(np.mean(sample["a"] == sample["b"][0]), (p * p).sum(), atol=0.03)


def test_deterministic_holds_a_tree_and_gives_its_value_probability_one():
    value = {"gear": jnp.array([0, 1, 2]), "steer": jnp.ones((3, 2))}
    d = Deterministic(value)
    jax.tree.map(np.testing.assert_array_equal, d.sample(seed=KEY), value)
    jax.tree.map(np.testing.assert_array_equal, d.mode(), value)
    np.testing.assert_array_equal(d.sample_and_log_prob(seed=KEY)[1], [0, 0, 0])
    other = {"gear": jnp.array([0, 1, 1]), "steer": jnp.ones((3, 2)).at[0, 1].set(2)}
    np.testing.assert_array_equal(d.log_prob(other), [-np.inf, 0, -np.inf])
    np.testing.assert_array_equal(d.kl_divergence(Deterministic(other)), [np.inf, 0, np.inf])
    np.testing.assert_array_equal(d.entropy(), [0, 0, 0])
    assert Deterministic(jnp.ones((4, 3, 2)), batch_ndims=2).entropy().shape == (4, 3)


@pytest.mark.parametrize("name", ["discrete", "multi_discrete", "nested"])
def test_samples_are_the_same_numbers_however_the_batch_is_sharded(name):
    space = SPACES[name]
    params = params_for(space, (16,))
    mesh = Mesh(np.array(jax.devices()[:8]), ("data",))
    split = jax.device_put(params, NamedSharding(mesh, P("data")))
    sample = jax.jit(lambda params: for_space(space, params).sample(seed=KEY))
    jax.tree.map(np.testing.assert_array_equal, sample(params), sample(split))


@pytest.mark.parametrize("name", ["multi_discrete", "nested"])
def test_distributions_pass_through_vmap_and_scan(name):
    space = SPACES[name]
    params = params_for(space, (3, 4))

    @jax.jit
    def three_ways(params):
        by_vmap = jax.vmap(lambda p: for_space(space, p))(params).entropy()
        _, by_scan = jax.lax.scan(lambda carry, p: (carry, for_space(space, p).entropy()), None, params)
        return for_space(space, params).entropy(), by_vmap, by_scan

    together, by_vmap, by_scan = three_ways(params)
    np.testing.assert_allclose(by_vmap, together, rtol=1e-6)
    np.testing.assert_allclose(by_scan, together, rtol=1e-6)


def test_one_structure_however_often_it_is_built():
    space = SPACES["nested"]
    trees = [jax.tree.structure(for_space(space, params_for(space, seed=i))) for i in range(2)]
    assert trees[0] == trees[1] and hash(trees[0]) == hash(trees[1])
