"""The copies of a network: equal at first, following as told, trained without touching the target, saved whole."""

import dataclasses
import threading
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from polyak.core.spaces import Box, Discrete, EnvSpec
from polyak.core.types import Variables
from polyak.io import checkpoint
from polyak.ops.follow import Follow
from polyak.parts.adapters import FlaxNNX
from polyak.parts.copies import NetworkCopies
from polyak.parts.gradients import tree_norm

NAN, INF = float("nan"), float("inf")
SPEC = EnvSpec(Box([-1.0] * 2, [1.0] * 2), Discrete(2), "somewhere")
KEY = jax.random.key(0)
SGD = optax.sgd(0.1)
ADAM = optax.adam(0.1)
INPUTS, GOALS = jnp.array([[1.0, 2.0], [3.0, -1.0], [0.5, 0.5], [-2.0, 1.0]]), jnp.array([1.0, 0.0, 2.0, -1.0])


@dataclass(frozen=True)
class Line:
    """obs · w + b, and a count of the training calls among the statistics."""

    dtype: str = "float32"
    width: int = 2

    def init(self, key, spec):
        params = {"w": jnp.ones(self.width, self.dtype), "b": jnp.zeros((), self.dtype)}
        return Variables(params, {"mean": jnp.zeros((), self.dtype), "calls": jnp.zeros((), jnp.int32)})

    def apply(self, variables, obs, carry=(), *, train=False, key=None):
        out = jnp.sum(obs.astype(self.dtype) * variables.params["w"][None], axis=1) + variables.params["b"]
        noise = jnp.zeros((), self.dtype) if key is None or not train else jax.random.uniform(key, dtype=self.dtype)
        stats = variables.stats
        if train:
            stats = {"mean": jnp.mean(obs).astype(self.dtype), "calls": stats["calls"] + 1}
        return out + noise, carry, stats


def made(target=None, shared=False, *, optimizer=SGD, network=None, **options):
    options = {"target": target, "shared": shared, "optimizer": optimizer} | options
    return NetworkCopies.create(network or Line(), KEY, SPEC, **options)


def moved(copies, w, name="online"):
    held = dataclasses.replace(copies.online, params={"w": jnp.full(2, w, jnp.float32), "b": jnp.zeros(())})
    if name == "online":
        return dataclasses.replace(copies, online=held)
    return dataclasses.replace(copies, shared=dataclasses.replace(copies.shared, variables=held))


def w(variables):
    return float(variables.params["w"][0])


def gradient(value):
    return {"w": jnp.full(2, value), "b": jnp.zeros(())}


def squared(out, goals):
    errors = out.astype(jnp.float32) - goals
    return {"squared": errors**2, "absolute": 0.1 * jnp.abs(errors)}, {"out": out}


def same(a, b):
    return jax.tree.map(lambda x, y: bool(jnp.array_equal(x, y)), a, b) == jax.tree.map(lambda x: True, b)


def test_U12_all_copies_are_equal_from_the_start_and_share_no_buffer():
    copies = made(Follow(), shared=True)
    assert copies.names == ("online", "target", "shared")
    assert same(copies.variables("target"), copies.online) and same(copies.variables("shared"), copies.online)
    arrays = [x for x in jax.tree.leaves(copies) if isinstance(x, jax.Array) and x.size > 1]
    assert len({x.unsafe_buffer_pointer() for x in arrays}) == len(arrays)
    jax.jit(lambda c: c.sync(), donate_argnums=0)(copies)


def test_sync_goes_from_shared_to_online_to_target():
    copies = moved(made(Follow(0.1), shared=True), 5.0, "shared").sync()
    assert w(copies.online) == w(copies.target) == 5.0
    copies = moved(made(Follow(0.1)), 3.0).sync()
    assert w(copies.target) == 3.0


def test_update_target_and_update_online_take_a_share():
    copies = moved(made(Follow(), shared=True), 3.0)
    assert w(copies.update_target(0.25).target) == 1.5 and w(copies.update_target().target) == 3.0
    copies = moved(copies, 5.0, "shared")
    assert w(copies.update_online(0.5).online) == 4.0 and w(copies.update_online().online) == 5.0


def test_the_target_follows_when_its_own_unit_says_so():
    copies = moved(made(Follow(tau=0.05, period=40)), 2.0)
    for n in range(1, 81):
        copies = jax.jit(lambda c: c.follow(updates=1, env_steps=1000))(copies) if n == 1 else follow_once(copies)
        assert w(copies.target) == pytest.approx(1 + (0.0 if n < 40 else 0.05 if n < 80 else 0.0975))
    by_steps = made(Follow(period=1000, unit="env_steps"))
    assert int(by_steps.follow(updates=5000, env_steps=992).target_count.fired) == 0
    assert int(by_steps.follow(env_steps=1008).target_count.fired) == 1


follow_once = jax.jit(lambda copies: copies.follow(updates=1, env_steps=1000))


@pytest.mark.parametrize(
    "ask",
    [
        lambda c: c.update_target(),
        lambda c: c.update_online(),
        lambda c: c.follow(updates=1),
        lambda c: c.apply_gradients("shared", gradient(1.0)),
        lambda c: c.predict([("target", INPUTS)]),
        lambda c: c.distance("online", "target"),
        lambda c: c.variables("onlin"),
        lambda c: c.sync(),
    ],
)
def test_N1_a_copy_that_does_not_exist_is_an_error_that_lists_those_that_do(ask):
    with pytest.raises(ValueError, match=r"^network: .*(copys|copies|copy)[: a-z]*online"):
        ask(made())


def test_N1_a_misspelt_copy_suggests_the_nearest():
    with pytest.raises(ValueError, match=r"unknown copy 'targett'; did you mean 'target'\? \(copies: online, target\)"):
        made(Follow()).variables("targett")


def test_N2_copies_whose_trees_differ_are_an_error_and_nothing_is_copied():
    copies = made(Follow(), shared=True)
    other = dataclasses.replace(copies, online=Line(width=3).init(KEY, SPEC))
    for verb in (other.update_target, other.update_online, other.sync):
        with pytest.raises(ValueError, match=r"leaf 'params/w': online is float32\[\d\], target is float32\[\d\]; they must"):
            verb()
    with pytest.raises(ValueError, match="leaf 'params/w'"):
        copies.restart(other.online)


def test_N3_a_reader_beside_two_writers_never_sees_half_of_a_push():
    current, stop = [made(shared=True)], threading.Event()
    step = jax.jit(lambda c: c.apply_gradients("shared", gradient(-10.0)))
    step(current[0])

    def write():
        while not stop.is_set():
            current[0] = step(current[0])

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    for _ in range(300):
        shared = current[0].shared
        assert abs(w(shared.variables) - 1.0 - int(shared.version)) < 1e-3
    stop.set()
    for writer in writers:
        writer.join()


def test_N4_N5_a_checkpoint_holds_all_copies_of_one_version_and_resumes_to_the_bit(tmp_path):
    def train(copies):
        return copies.train_and_sync(squared, INPUTS, GOALS)[0].follow(updates=1).accumulate(gradient(0.5))

    copies = made(Follow(0.3, period=2), shared=True, optimizer=ADAM)
    for _ in range(3):
        copies = train(copies)
    checkpoint.save(tmp_path, copies, step=1, meta={})
    restored = checkpoint.restore(tmp_path, made(Follow(0.3, period=2), shared=True, optimizer=ADAM)).tree
    assert same(restored, copies) and int(restored.shared.version) == 3
    assert same(train(restored), train(copies))
    with pytest.raises(checkpoint.CheckpointError):
        checkpoint.restore(tmp_path, made(optimizer=ADAM))


def test_N5_a_checkpoint_of_a_shared_copy_loads_into_a_single_process(tmp_path):
    copies = made(shared=True).apply_and_sync(gradient(1.0)).apply_gradients("shared", gradient(1.0))
    checkpoint.save(tmp_path, copies, step=1, meta={})
    single = made(Follow(0.1))
    loaded = checkpoint.restore(tmp_path, single.online, prefix=".shared.variables").tree
    single = moved(single, 7.0).follow(updates=1).restart(loaded)
    assert w(single.online) == w(single.target) == pytest.approx(0.8) and int(single.target_count.total) == 0


def test_the_newest_weights_are_the_shared_ones_where_there_are_any():
    copies = made(shared=True).apply_gradients("shared", gradient(1.0))
    assert w(copies.newest()) == pytest.approx(0.9) and w(copies.online) == 1.0
    assert w(moved(made(), 3.0).newest()) == 3.0
    exported = copies.newest()
    jax.jit(lambda c: c.sync(), donate_argnums=0)(copies)
    assert w(exported) == pytest.approx(0.9)


def test_N6_compiled_scanned_and_donated_steps_give_the_eager_numbers():
    def step(copies):
        copies, found = copies.train_and_sync(squared, INPUTS, GOALS, clip=1.0)
        return copies.follow(updates=1), found.loss

    start = made(Follow(0.3, period=2), shared=True, optimizer=ADAM)
    eager = start
    for _ in range(4):
        eager, _ = step(eager)
    scanned, losses = jax.lax.scan(lambda c, _: step(c), start, None, length=4)
    donated = jax.tree.map(jnp.copy, start)
    donating = jax.jit(step, donate_argnums=0)
    for _ in range(4):
        donated, loss = donating(donated)
    assert losses[-1] == pytest.approx(float(loss), rel=1e-5)
    for other in (scanned, donated):
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-6), other, eager)


def test_N6_vmap_over_copies_gives_each_its_own():
    gradients = {"w": jnp.array([[1.0, 1.0], [2.0, 2.0]]), "b": jnp.zeros(2)}
    stepped = jax.vmap(lambda g: made().apply_gradients(gradients=g).online.params["w"])(gradients)
    np.testing.assert_allclose(stepped, [[0.9, 0.9], [0.8, 0.8]], rtol=1e-6)


@pytest.mark.parametrize("tau", [None, NAN, 2, -1.0, "0.5"])
def test_N7_a_wrong_share_is_an_error(tau):
    for verb in (lambda: Follow(tau), lambda: made(Follow()).update_target(tau), lambda: made(shared=True).update_online(tau)):
        with pytest.raises((TypeError, ValueError), match=r"tau must be a number in \[0, 1\]"):
            verb()


def test_N8_many_syncs_grow_neither_buffers_nor_compilations():
    copies = moved(made(Follow(), shared=True), 2.0)
    sync = jax.jit(lambda c: c.sync(), donate_argnums=0)
    copies = sync(jax.tree.map(jnp.copy, copies))
    alive = len(jax.live_arrays())
    for _ in range(2000):
        copies = sync(copies)
    assert len(jax.live_arrays()) == alive and sync._cache_size() == 1


def test_N9_two_copies_of_one_name_share_nothing():
    first, second = made(name="critic"), made(name="critic")
    first = first.apply_gradients(gradients=gradient(1.0))
    assert w(second.online) == 1.0 and w(first.online) == pytest.approx(0.9)


def test_accumulated_gradients_are_summed_or_averaged_and_the_optimiser_steps_once():
    for reduce, wanted in (("mean", 0.7), ("sum", -0.2)):
        copies = made(optimizer=optax.adam(1e-8))
        for value in (1.0, 2.0, 3.0, 6.0):
            copies = copies.accumulate(gradient(value), reduce=reduce)
        stepped = copies.apply_gradients()
        assert int(stepped.optimizer_state[0].count) == 1
        plain = dataclasses.replace(copies, optimizer=SGD, optimizer_state=SGD.init(copies.online.params)).apply_gradients()
        assert w(plain.online) == pytest.approx(wanted, abs=1e-6)


def test_each_gradient_is_clipped_or_the_total_is():
    def total(clip_when, reduce):
        copies = made()
        for value in (10.0, -2.0):
            copies = copies.accumulate(gradient(value), reduce=reduce, clip=1.0, clip_when=clip_when)
        return copies.gradients.read()["w"]

    np.testing.assert_allclose(total("each", "mean"), [0.0, 0.0], atol=1e-7)
    np.testing.assert_allclose(total("total", "sum"), np.full(2, np.sqrt(0.5)), rtol=1e-6)
    np.testing.assert_allclose(total("total", "mean"), np.full(2, np.sqrt(0.5)), rtol=1e-6)


def test_sums_are_float32_whatever_the_gradients_dtype():
    copies = made(network=Line("bfloat16"))
    for _ in range(3):
        copies = copies.accumulate({"w": jnp.full(2, 1.0 + 2**-7, jnp.bfloat16), "b": jnp.zeros((), jnp.bfloat16)})
    assert copies.gradients.total["w"].dtype == jnp.float32
    assert copies.gradients.total["w"].tolist() == [3 * (1 + 2**-7)] * 2


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_U14_a_gradient_that_is_not_finite_is_refused_and_counted(bad):
    copies = made(optimizer=ADAM).accumulate(gradient(1.0))
    after = copies.accumulate(gradient(bad), reduce="sum")
    assert same(after.gradients.total, copies.gradients.total)
    assert int(after.gradients.refused) == 1 and int(after.gradients.number) == 1
    stepped = copies.apply_gradients(gradients=gradient(bad))
    assert int(stepped.skipped) == 1
    assert same((stepped.online, stepped.optimizer_state), (copies.online, copies.optimizer_state))
    clean = stepped.apply_gradients(gradients=gradient(1.0))
    assert same(clean.online, copies.apply_gradients(gradients=gradient(1.0)).online)


def test_U15_a_huge_finite_gradient_is_clipped_to_its_norm_or_refused():
    copies = made(optimizer=ADAM).accumulate(gradient(1e30), clip=1.0)
    np.testing.assert_allclose(copies.gradients.total["w"], np.full(2, np.sqrt(0.5)), rtol=1e-6)
    refused = copies.apply_gradients(gradients=gradient(1e30))
    assert int(refused.skipped) == 1 and same(refused.optimizer_state, copies.optimizer_state)
    assert float(tree_norm({"a": jnp.array([3.0, 4.0]), "b": jnp.array([12.0])})) == 13.0


def test_nothing_accumulated_is_no_step_of_momentum_either():
    copies = made(optimizer=ADAM).apply_gradients(gradients=gradient(1.0))
    assert same(copies.apply_gradients().online, copies.online) and int(copies.apply_gradients().skipped) == 1


def test_reset_gradients_are_true_zeros():
    copies = made().accumulate(gradient(1.0))
    spoilt = dataclasses.replace(copies, gradients=dataclasses.replace(copies.gradients, total=gradient(NAN)))
    assert same(spoilt.reset_gradients().gradients.total, gradient(0.0)) and int(spoilt.reset_gradients().gradients.number) == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"clip": 0.0}, "clip must be a number"),
        ({"clip": NAN}, "clip must be a number"),
        ({"clip": "1"}, "clip"),
        ({"reduce": "max"}, "reduce"),
        ({"clip_when": "late"}, "clip_when"),
    ],
)
def test_wrong_settings_of_accumulate_are_errors(options, message):
    with pytest.raises((TypeError, ValueError), match=message):
        made().accumulate(gradient(1.0), **options)


def test_U16_gradients_of_another_tree_are_an_error_naming_the_leaf():
    wrong = {"w": jnp.ones(3), "b": jnp.zeros(())}
    for verb in (lambda c: c.accumulate(wrong), lambda c: c.apply_gradients(gradients=wrong)):
        with pytest.raises(ValueError, match=r"leaf 'w': gradients is float32\[3\], params is float32\[2\]"):
            verb(made())


def test_the_shared_optimiser_stands_with_the_shared_copy_or_each_worker_has_its_own():
    one = made(shared=True, optimizer=ADAM)
    assert one.optimizer_state == () and one.shared.optimizer_state != ()
    with pytest.raises(ValueError, match="the optimiser is shared; apply to 'shared'"):
        one.apply_gradients("online", gradient(1.0))
    own = made(shared=True, optimizer=ADAM, shared_optimizer=False)
    assert own.shared.optimizer_state == () and own.optimizer_state != ()
    for copies in (one, own):
        stepped = copies.apply_gradients("shared", gradient(1.0))
        assert w(stepped.shared.variables) == pytest.approx(0.9, abs=1e-6) and w(stepped.online) == 1.0
        assert int(stepped.shared.version) == 1
        assert same(stepped.update_online().online, stepped.shared.variables)
    assert w(own.apply_gradients("online", gradient(1.0)).online) == pytest.approx(0.9, abs=1e-6)


@pytest.mark.parametrize("shared", [False, True])
def test_training_returns_what_it_found_before_the_step_and_never_touches_the_target(shared):
    copies = made(Follow(), shared=shared)
    weights = jnp.array([1.0, 0.5, 2.0, 0.0])
    stepped, found = copies.train_and_sync(squared, INPUTS, GOALS, weights, clip=0.5)
    out = INPUTS.sum(1)
    errors = out - GOALS
    assert float(found.parts["squared"]) == pytest.approx(float(jnp.mean(weights * errors**2)))
    assert float(found.loss) == pytest.approx(float(sum(found.parts.values())))
    np.testing.assert_allclose(found.extras["out"], out)
    slope = weights * (2 * errors + 0.1 * jnp.sign(errors)) / 4
    wanted = {"w": jnp.sum(slope[:, None] * INPUTS, 0), "b": slope.sum()}
    norm = float(tree_norm(wanted))
    assert float(found.gradient_norm) == pytest.approx(norm) and norm > 0.5 and bool(found.applied)
    np.testing.assert_allclose(stepped.online.params["w"], 1 - 0.1 * wanted["w"] * 0.5 / norm, rtol=1e-5)
    assert same(stepped.target, copies.target)
    assert int(stepped.online.stats["calls"]) == 1
    if shared:
        assert same(stepped.shared.variables, stepped.online) and int(stepped.shared.version) == int(stepped.version) == 1


def test_U14_training_on_bad_numbers_changes_neither_weights_nor_statistics():
    for shared in (False, True):
        copies = made(Follow(), shared=shared, optimizer=ADAM)
        stepped, found = jax.jit(lambda c: c.train_and_sync(squared, INPUTS * NAN, GOALS))(copies)
        assert not bool(found.applied) and int(stepped.skipped) == 1
        assert same(dataclasses.replace(stepped, skipped=copies.skipped), copies)


def test_a_loss_that_is_not_one_number_a_row_is_an_error():
    with pytest.raises(ValueError, match=r"part 'sum' of the loss must be one number a row, \[B\]; got \[\]"):
        made().train_and_sync(lambda out, _: ({"sum": out.sum()}, ()), INPUTS, GOALS)
    with pytest.raises(ValueError, match=r"\[3\], as importance_weights; got \[4\]"):
        made().train_and_sync(squared, INPUTS, GOALS, jnp.ones(3))


def test_several_predictions_come_from_one_call_in_order_and_a_copy_may_be_asked_twice():
    copies = moved(made(Follow()), 2.0)
    first, second, third = copies.predict([("online", INPUTS), ("target", INPUTS), ("online", INPUTS[:1])])
    np.testing.assert_allclose(first, 2 * INPUTS.sum(1))
    np.testing.assert_allclose(second, INPUTS.sum(1))
    np.testing.assert_allclose(third, 2 * INPUTS[:1].sum(1))


def test_a_target_predicts_in_evaluation_phase_even_in_training():
    copies = made(Follow())
    online, target = copies.predict([("online", INPUTS), ("target", INPUTS)], train=True, key=KEY)
    assert not np.allclose(online, INPUTS.sum(1)) and np.allclose(target, INPUTS.sum(1))
    online, again = copies.predict([("online", INPUTS), ("online", INPUTS)], train=True, key=KEY)
    assert not np.allclose(online, again)
    assert np.allclose(copies.predict([("online", INPUTS)], key=KEY)[0], INPUTS.sum(1))


@pytest.mark.parametrize(
    ("follow", "params", "stats"),
    [
        (Follow(0.005), "float32", "float32"),
        (Follow(), "bfloat16", "bfloat16"),
        (Follow(0.5, stats_tau=1.0), "float32", "bfloat16"),
    ],
)
def test_U8_a_target_that_follows_softly_is_held_in_float32_and_cast_on_use(follow, params, stats):
    copies = made(follow, network=Line("bfloat16"))
    assert copies.target.params["w"].dtype == params and copies.target.stats["mean"].dtype == stats
    assert copies.variables("target").params["w"].dtype == jnp.bfloat16
    assert copies.predict([("target", INPUTS)])[0].dtype == jnp.bfloat16


def test_U8_the_target_of_a_bfloat16_network_arrives():
    copies = made(Follow(0.005), network=Line("bfloat16"))
    online = dataclasses.replace(copies.online, params={"w": jnp.full(2, 2.0, jnp.bfloat16), "b": jnp.zeros((), jnp.bfloat16)})
    copies = dataclasses.replace(copies, online=online)
    run = jax.jit(lambda c: jax.lax.fori_loop(0, 3000, lambda _, c: c.follow(updates=1), c))
    assert w(run(copies).target) == pytest.approx(2.0, rel=1e-4)


def test_distance_is_the_norm_of_the_difference_of_the_weights():
    copies = moved(made(Follow(), shared=True), 4.0)
    assert float(copies.distance("online", "target")) == pytest.approx(3 * 2**0.5)
    assert float(copies.distance("target", "shared")) == 0.0


def test_it_prints_names_sizes_dtypes_followers_and_distance():
    text = str(moved(made(Follow(0.005), shared=True, name="critic"), 4.0))
    for part in ("critic: 3 parameters (float32), 2 statistics", "online, target, shared", "tau 0.005, every update"):
        assert part in text
    assert "distance online-target 4.24" in text and "version 0, one optimiser with it" in text
    assert "target" not in str(made())


class Normalized(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(2, momentum=0.5, rngs=rngs)
        self.out = nnx.Linear(2, 1, rngs=rngs)

    def __call__(self, obs):
        return self.out(self.norm(obs))[:, 0]


def normalized(spec, rngs):
    return Normalized(rngs)


def test_U17_batch_normalisation_works_end_to_end():
    copies = made(Follow(0.1, stats_tau=1.0), network=FlaxNNX(normalized), optimizer=ADAM)
    mean = copies.online.stats["norm"]["mean"]
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        before = copies.predict([("target", INPUTS)])[0]
        step = jax.jit(lambda c: c.train_and_sync(squared, INPUTS, GOALS))
        trained, first = step(copies)
        for _ in range(30):
            trained, found = step(trained)
        assert float(found.loss) < float(first.loss)
        np.testing.assert_allclose(trained.online.stats["norm"]["mean"], INPUTS.mean(0), rtol=1e-3)
        np.testing.assert_array_equal(trained.target.stats["norm"]["mean"], mean)
        followed = trained.follow(updates=1)
        np.testing.assert_array_equal(followed.target.stats["norm"]["mean"], trained.online.stats["norm"]["mean"])
        kernels = [x.params["out"]["kernel"] for x in (copies.online, trained.online, followed.target)]
        np.testing.assert_allclose(kernels[2] - kernels[0], 0.1 * (kernels[1] - kernels[0]), rtol=1e-4)
        online, target = followed.predict([("online", INPUTS), ("target", INPUTS)], train=True)
    assert not np.allclose(target, before) and not np.allclose(online, target)
