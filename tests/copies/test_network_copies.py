"""The copies of a network: equal at first, following as told, trained without touching the target, saved whole."""

import dataclasses
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from polyak.copies.follow import Follow
from polyak.copies.network_copies import NetworkCopies
from polyak.ops.gradient_step import QUANTITIES, Aux
from polyak.storage import checkpoint
from tests.copies.line import ADAM, GOALS, INPUTS, KEY, NAN, SPEC, Line, gradient, made, moved, same, squared, w
from tests.ops.bits import sharded


def test_copies_start_equal_and_share_no_buffer():
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


def test_update_target_and_update_online_interpolate_by_tau():
    copies = moved(made(Follow(), shared=True), 3.0)
    assert w(copies.update_target(0.25).target) == 1.5 and w(copies.update_target().target) == 3.0
    copies = moved(copies, 5.0, "shared")
    assert w(copies.update_online(0.5).online) == 4.0 and w(copies.update_online().online) == 5.0


def test_target_is_updated_in_its_own_unit():
    copies = moved(made(Follow(tau=0.05, period=40)), 2.0)
    for n in range(1, 81):
        copies = jax.jit(lambda c: c.follow(updates=1, env_steps=1000))(copies) if n == 1 else follow_once(copies)
        assert w(copies.target) == pytest.approx(1 + (0.0 if n < 40 else 0.05 if n < 80 else 0.0975))
    by_steps = made(Follow(period=1000, unit="env_steps"))
    assert int(by_steps.follow(updates=5000, env_steps=992).target_count.fired) == 0
    assert int(by_steps.follow(env_steps=1008).target_count.fired) == 1
    with pytest.raises(ValueError, match=r"network: follow needs a count of env_steps, got .* and \['updates'\]"):
        by_steps.follow(updates=1)


follow_once = jax.jit(lambda copies: copies.follow(updates=1, env_steps=1000))


def test_online_is_updated_from_shared_before_target_from_online():
    copies = made(Follow(period=4), shared=True, online=Follow(period=2))
    copies = moved(copies, 5.0, "shared").apply_gradients("shared", gradient(10.0))
    seen = []
    for _ in range(4):
        copies = copies.follow(updates=1)
        seen.append((w(copies.online), w(copies.target), int(copies.version)))
    assert seen == [(1.0, 1.0, 0), (4.0, 1.0, 1), (4.0, 1.0, 1), (4.0, 4.0, 1)]
    together = moved(made(Follow(), shared=True, online=Follow()), 5.0, "shared").follow(updates=1)
    assert w(together.target) == 5.0, "shared, then online, then target"


def test_each_follow_counts_in_its_own_unit():
    copies = moved(made(Follow(), shared=True, online=Follow(0.5, period=1000, unit="env_steps")), 5.0, "shared")
    steps = [(992, 1.0), (16, 3.0), (16, 3.0), (976, 3.0), (8, 4.0)]
    for env_steps, wanted in steps:
        copies = copies.follow(updates=1, env_steps=env_steps)
        assert w(copies.online) == w(copies.target) == wanted
    without_target = moved(made(shared=True, online=Follow()), 5.0, "shared").follow(updates=1)
    assert w(without_target.online) == 5.0 and without_target.target is None


def test_without_an_online_rule_follow_leaves_the_online_copy_unchanged():
    copies = moved(made(Follow(), shared=True), 5.0, "shared").follow(updates=1)
    assert w(copies.online) == 1.0 and w(copies.sync().online) == 5.0
    with pytest.raises(ValueError, match="network: online can only follow a shared copy; pass shared=True"):
        made(online=Follow())
    with pytest.raises(ValueError, match="follow needs a target or an online rule, got the copies online, shared"):
        made(shared=True).follow(updates=1)


def test_restart_preserves_the_follow_rules_and_resets_the_counters():
    copies = made(Follow(0.1), shared=True, online=Follow(period=3)).follow(updates=2)
    again = copies.restart(copies.online)
    assert int(again.online_count.total) == 0 and again.online_follow.period == 3 and again.target_follow.is_soft


@pytest.mark.parametrize("partition", [(), ("d",)])
def test_copies_over_several_devices_keep_their_sharding_and_give_the_same_numbers(partition):
    def after(copies):
        return jax.jit(lambda c: c.apply_and_sync(wide_gradient).follow(updates=1))(copies)

    wide_gradient = {"w": jnp.arange(8.0), "b": jnp.ones(())}
    copies = made(Follow(0.3), shared=True, online=Follow(0.5), network=Line(width=8), optimizer=ADAM)
    apart = jax.tree.map(lambda x: sharded(x, partition if x.shape == (8,) else ()), copies)
    one, many = after(copies), after(apart)
    for held in (many.online, many.target, many.shared.variables):
        assert held.params["w"].sharding.is_equivalent_to(apart.online.params["w"].sharding, 1)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), many, one)


@pytest.mark.parametrize(
    ("quantity", "train"),
    [
        ("loss", lambda c: c.train_and_sync(lambda out, _: ({"a": out * NAN}, {}), INPUTS, GOALS)[0]),
        ("gradient", lambda c: c.apply_gradients(gradients=gradient(NAN))),
        ("gradient", lambda c: c.reset_gradients().accumulate(gradient(NAN)).apply_gradients()),
        ("gradient", lambda c: c.train_and_sync(lambda out, _: ({"a": jnp.sqrt(out - out)}, {}), INPUTS, GOALS)[0]),
        ("step", lambda c: c.apply_gradients(gradients=gradient(1e30))),
    ],
)
def test_consecutive_bad_steps_are_diagnosed_by_the_first_bad_quantity(quantity, train):
    start = made(Follow(), optimizer=ADAM)
    copies, train = start, jax.jit(train)
    for _ in range(3):
        assert copies.diagnose(max_skipped_steps=3) is None
        copies = train(copies)
    assert same((copies.online, copies.target, copies.optimizer_state), (start.online, start.target, start.optimizer_state))
    problem = copies.diagnose(max_skipped_steps=3)
    assert problem.startswith("network: 3 consecutive gradient steps were skipped") and f"infinite is {quantity!r}" in problem
    assert copies.apply_gradients(gradients=gradient(1.0)).diagnose(max_skipped_steps=3) is None


@pytest.mark.parametrize("quantity", QUANTITIES)
def test_any_quantity_that_the_caller_flags_skips_the_step(quantity):
    copies = made()
    flagged, _ = copies.step(optax.sgd(1.0), gradient(1.0), Aux({}), {quantity: jnp.array(True)})
    assert same(flagged.online, copies.online) and int(flagged.skipped) == 1 and int(flagged.steps) == 0
    assert QUANTITIES[int(flagged.guard.nonfinite_source) - 1] == quantity
    assert int(copies.step(optax.sgd(1.0), gradient(1.0), Aux({}), {quantity: jnp.array(False)})[0].steps) == 1


def test_steps_that_are_not_enabled_do_not_change_the_bad_step_counters():
    copies = made().apply_gradients(gradients=gradient(NAN))
    kept = copies.apply_gradients(gradients=gradient(1.0), enabled=False)
    assert (int(kept.skipped), int(kept.guard.consecutive_skipped_updates)) == (1, 1) and same(kept.online, copies.online)
    nothing = copies.apply_gradients()
    assert (int(nothing.skipped), int(nothing.guard.consecutive_skipped_updates)) == (2, 1)
    with pytest.raises(ValueError, match="network: max_skipped_steps must be an integer >= 1, got 0"):
        copies.diagnose(0)


def test_tau_outside_the_interval_is_diagnosed_with_the_name_of_the_copies():
    copies = made(Follow(tau=lambda n: 2.0 * n), name="critic")
    problem = jax.jit(lambda c: c.follow(updates=1))(copies).diagnose()
    assert problem.startswith("critic: Follow: 1 updates were skipped") and copies.diagnose() is None


@pytest.mark.parametrize(
    "update", [lambda c: c.update_target(), lambda c: c.update_target(0.5), lambda c: c.sync(), lambda c: c.follow(updates=1)]
)
def test_no_target_becomes_nan_and_the_attempt_is_diagnosed(update):
    copies = moved(made(Follow(0.5), name="critic"), NAN)
    before = copies.target
    for number in (1, 2):
        copies = update(copies)
        assert same(copies.target, before) and int(copies.target_count.skipped) == number
    assert copies.diagnose().startswith("critic: Follow: 2 updates were skipped because")


def test_a_traced_tau_outside_the_interval_leaves_the_target_and_is_counted():
    copies = moved(made(Follow()), 3.0)
    updated = jax.jit(lambda copies, tau: copies.update_target(tau))(copies, 1.5)
    assert same(updated.target, copies.target) and int(updated.target_count.skipped) == 1


def test_a_traced_tau_outside_the_interval_pulls_nothing_and_leaves_the_version():
    copies = made(shared=True).apply_gradients("shared", gradient(1.0))
    pull = jax.jit(lambda copies, tau: copies.update_online(tau))
    for tau, version in ((1.5, 0), (NAN, 0), (0.5, 1), (1.0, 1)):
        assert int(pull(copies, tau).version) == version, tau
    assert same(pull(copies, 1.5).online, copies.online)


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
def test_unknown_copy_raises_and_lists_the_existing_copies(ask):
    with pytest.raises(ValueError, match=r"^network: .*(copys|copies|copy)[: a-z]*online"):
        ask(made())


def test_misspelt_copy_suggests_the_nearest_name():
    with pytest.raises(ValueError, match=r"unknown copy 'targett'; did you mean 'target'\? \(copies: online, target\)"):
        made(Follow()).variables("targett")


def test_different_trees_raise_and_nothing_is_copied():
    copies = made(Follow(), shared=True)
    other = dataclasses.replace(copies, online=Line(width=3).init(KEY, SPEC))
    for verb in (other.update_target, other.update_online, other.sync):
        with pytest.raises(ValueError, match=r"leaf 'params/w': online is float32\[\d\], target is float32\[\d\]; they must"):
            verb()
    with pytest.raises(ValueError, match="leaf 'params/w'"):
        copies.restart(other.online)
    renamed = dataclasses.replace(copies.shared.variables, params={"v": jnp.ones(2)})
    with pytest.raises(ValueError, match="only in online: 'params/v'; only in target: 'params/b', 'params/w'"):
        copies.pull(dataclasses.replace(copies.shared, variables=renamed))


def test_checkpoint_contains_all_copies_and_resumes_bit_for_bit(tmp_path):
    @jax.jit
    def train(copies):
        return copies.train_and_sync(squared, INPUTS, GOALS)[0].follow(updates=1).accumulate(gradient(0.5))

    def fresh():
        return made(Follow(0.3, period=2), shared=True, online=Follow(0.5, period=3), optimizer=ADAM)

    copies = fresh()
    for _ in range(3):
        copies = train(copies)
    checkpoint.save(tmp_path, copies, step=1, meta={})
    restored = checkpoint.restore(tmp_path, fresh()).tree
    assert same(restored, copies) and int(restored.shared.version) == 3
    assert same(train(restored), train(copies))
    with pytest.raises(checkpoint.CheckpointError, match="target"):
        checkpoint.restore(tmp_path, made(optimizer=ADAM))


def test_checkpoint_without_a_target_raises_unless_copies_restart_from_its_weights(tmp_path):
    checkpoint.save(tmp_path, moved(made(), 7.0), step=1, meta={})
    wanted = made(Follow(0.1))
    with pytest.raises(checkpoint.CheckpointError, match="target"):
        checkpoint.restore(tmp_path, wanted)
    weights = checkpoint.restore(tmp_path, wanted.online, prefix=".online").tree
    assert w(wanted.restart(weights).target) == w(wanted.restart(weights).online) == 7.0


def test_checkpoint_of_a_shared_copy_loads_into_a_single_process(tmp_path):
    copies = made(shared=True).apply_and_sync(gradient(1.0)).apply_gradients("shared", gradient(1.0))
    checkpoint.save(tmp_path, copies, step=1, meta={})
    single = made(Follow(0.1))
    loaded = checkpoint.restore(tmp_path, single.online, prefix=".shared.variables").tree
    single = moved(single, 7.0).follow(updates=1).restart(loaded)
    assert w(single.online) == w(single.target) == pytest.approx(0.8) and int(single.target_count.total) == 0


def test_newest_weights_are_the_shared_ones_if_there_are_any():
    copies = made(shared=True).apply_gradients("shared", gradient(1.0))
    assert w(copies.newest()) == pytest.approx(0.9) and w(copies.online) == 1.0
    assert w(moved(made(), 3.0).newest()) == 3.0
    exported = copies.newest()
    jax.jit(lambda c: c.sync(), donate_argnums=0)(copies)
    assert w(exported) == pytest.approx(0.9)


def test_compiled_scanned_and_donated_steps_give_the_eager_numbers():
    def step(copies):
        copies, found = copies.train_and_sync(squared, INPUTS, GOALS, clip=1.0)
        return copies.follow(updates=1), found.terms["loss"]

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


def test_follow_compiled_scanned_and_donated_is_within_one_rounding_of_eager():
    network, steps = Line(width=64), 3
    start = made(Follow(0.3), shared=True, online=Follow(0.7), network=network)
    start = dataclasses.replace(
        start, shared=start.apply_gradients("shared", {"w": jnp.arange(64.0), "b": jnp.ones(())}).shared
    )
    eager, donated = start, jax.tree.map(jnp.copy, start)
    donating = jax.jit(lambda c: c.follow(updates=1), donate_argnums=0)
    for _ in range(steps):
        eager, donated = eager.follow(updates=1), donating(donated)
    scanned, _ = jax.lax.scan(lambda c, _: (c.follow(updates=1), None), start, None, length=steps)
    for other in (donated, scanned):
        for name in ("online", "target"):
            got, wanted = (getattr(copies, name).params["w"] for copies in (other, eager))
            # A unit in the last place of the weights' size (they cross zero) a step and copy.
            np.testing.assert_allclose(got, wanted, rtol=0, atol=2 * steps * np.spacing(np.float32(5.3)))


def test_follow_that_is_not_due_copies_no_weights_of_donated_copies():
    copies = made(Follow(0.005, period=1000), shared=True, online=Follow(period=20), network=Line(width=4096))
    text = jax.jit(lambda c: c.follow(updates=1), donate_argnums=0).lower(copies).compile().as_text()
    assert text.count(" conditional(") >= 2 and not re.search(r"= f32\[4096\]\S* copy\(", text)


def test_vmap_over_copies_gives_each_its_own():
    gradients = {"w": jnp.array([[1.0, 1.0], [2.0, 2.0]]), "b": jnp.zeros(2)}
    stepped = jax.jit(jax.vmap(lambda g: made().apply_gradients(gradients=g).online.params["w"]))(gradients)
    np.testing.assert_allclose(stepped, [[0.9, 0.9], [0.8, 0.8]], rtol=1e-6)


@pytest.mark.parametrize("tau", [None, NAN, 2, -1.0, "0.5"])
def test_tau_outside_the_interval_raises(tau):
    for verb in (lambda: Follow(tau), lambda: made(Follow()).update_target(tau), lambda: made(shared=True).update_online(tau)):
        with pytest.raises((TypeError, ValueError), match=r"tau must be a number in \[0, 1\]"):
            verb()


def test_a_hundred_thousand_syncs_grow_neither_memory_nor_buffers_nor_compilations():
    def sync_often(copies):
        return jax.lax.fori_loop(0, 50, lambda _, c: c.sync().follow(updates=1), copies)

    copies = moved(made(Follow(), shared=True, online=Follow(0.5, period=3)), 2.0)
    sync = jax.jit(sync_often, donate_argnums=0)
    copies = sync(sync(jax.tree.map(jnp.copy, copies)))
    alive, resident = len(jax.live_arrays()), resident_bytes()
    for _ in range(2000):
        copies = sync(copies)
    jax.block_until_ready(copies)
    assert len(jax.live_arrays()) == alive and sync._cache_size() == 1
    assert resident_bytes() - resident < 20e6
    # Last, since reading a number makes an array of its own.
    assert int(copies.target_count.total) == 100 + 100_000


def resident_bytes():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_two_copies_of_one_name_share_nothing():
    first, second = made(name="critic"), made(name="critic")
    first = first.apply_gradients(gradients=gradient(1.0))
    assert w(second.online) == 1.0 and w(first.online) == pytest.approx(0.9)


@pytest.mark.parametrize(
    ("follow", "params", "stats"),
    [
        (Follow(0.005), "float32", "float32"),
        (Follow(), "bfloat16", "bfloat16"),
        (Follow(0.5, stats_tau=1.0), "float32", "bfloat16"),
    ],
)
def test_soft_target_is_stored_in_float32_and_cast_on_use(follow, params, stats):
    copies = made(follow, network=Line("bfloat16"))
    assert copies.target.params["w"].dtype == params and copies.target.stats["mean"].dtype == stats
    assert copies.variables("target").params["w"].dtype == jnp.bfloat16
    assert copies.predict([("target", INPUTS)])[0].dtype == jnp.bfloat16


def test_target_of_a_bfloat16_network_converges():
    copies = made(Follow(0.005), network=Line("bfloat16"))
    online = dataclasses.replace(copies.online, params={"w": jnp.full(2, 2.0, jnp.bfloat16), "b": jnp.zeros((), jnp.bfloat16)})
    copies = dataclasses.replace(copies, online=online)
    run = jax.jit(lambda c: jax.lax.fori_loop(0, 3000, lambda _, c: c.follow(updates=1), c))
    assert w(run(copies).target) == pytest.approx(2.0, rel=1e-4)


def test_narrow_online_copy_converges_by_stochastic_rounding():
    copies = made(shared=True, online=Follow(0.005), network=Line("bfloat16"))
    goal = dataclasses.replace(copies.online, params={"w": jnp.full(2, 2.0, jnp.bfloat16), "b": jnp.zeros((), jnp.bfloat16)})
    copies = dataclasses.replace(copies, shared=dataclasses.replace(copies.shared, variables=goal))

    def run(copies, keyed):
        def body(n, c):
            return c.follow(updates=1, key=jax.random.key(n) if keyed else None)

        return w(jax.jit(lambda c: jax.lax.fori_loop(0, 3000, body, c))(copies).online)

    assert run(copies, keyed=True) > 1.98 and run(copies, keyed=False) < 1.95
    once = copies.update_online(0.005, key=jax.random.key(0)).online
    assert set(np.asarray(once.params["w"], np.float32)) <= {1.0, 1.0078125}


def test_distance_is_the_norm_of_the_difference_of_the_weights():
    copies = moved(made(Follow(), shared=True), 4.0)
    assert float(copies.distance("online", "target")) == pytest.approx(3 * 2**0.5)
    assert float(copies.distance("target", "shared")) == 0.0


def test_str_contains_names_sizes_dtypes_rules_and_distance():
    text = str(moved(made(Follow(0.005), shared=True, name="critic"), 4.0))
    assert "online follows shared" not in text
    assert "  online follows shared: tau 1, every 20 updates" in str(made(shared=True, online=Follow(period=20)))
    for part in ("critic: 3 parameters (float32), 2 statistics", "online, target, shared", "tau 0.005, every update"):
        assert part in text
    assert "distance online-target 4.24" in text and "version 0, one optimizer with it" in text
    assert "target" not in str(made())


def test_the_shapes_of_copies_are_known_without_allocating_them():
    def create(key):
        return NetworkCopies.create(Line("bfloat16"), key, SPEC, optimizer=ADAM, target=Follow(tau=0.5))

    shapes = jax.eval_shape(create, jax.random.key(0))
    real = create(jax.random.key(0))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), shapes.target) == jax.tree.map(lambda x: (x.shape, x.dtype), real.target)


def test_restart_keeps_the_dtypes_of_a_hard_target_in_compiled_code():
    copies = made(Follow(tau=1.0, period=5), network=Line("bfloat16"))
    restarted = jax.jit(lambda copies: copies.restart(copies.online))(copies)
    assert [x.dtype for x in jax.tree.leaves(restarted.target)] == [x.dtype for x in jax.tree.leaves(copies.target)]
