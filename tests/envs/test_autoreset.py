"""Next-step autoreset of JAX environments against a loop in Python, and what the wrapper refuses."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak import PPO, load_policy
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, MultiBinary, MultiDiscrete, Tuple
from polyak.core.struct import static, struct
from polyak.envs.autoreset import AutoReset
from polyak.envs.classic import CartPole, Pendulum
from polyak.envs.env_check import check_env
from polyak.export.write_policy import write_policy


@struct
class Script:
    """Row i counts up and ends after `lengths[i]` steps: even rows terminate, odd ones truncate, row 2 does both."""

    lengths: tuple[int, ...] = static(default=(3, 1, 4, 2))
    noisy: bool = static(default=False)

    @property
    def spec(self):
        return EnvSpec(Box([-100.0] * 2, [100.0] * 2), Discrete(5, start=10), "script")

    def reset(self, key, num_envs):
        noise = jax.random.uniform(key, (num_envs,)) if self.noisy else jnp.zeros(num_envs)
        return {"t": jnp.zeros(num_envs, jnp.int32), "x": noise}

    def step(self, state, action, key):
        t, rows = state["t"] + 1, jnp.arange(action.shape[0])
        end = t >= jnp.asarray(self.lengths)
        x = state["x"] + action.astype(jnp.float32)
        return {"t": t, "x": x}, x, end & (rows % 2 == 0), end & ((rows % 2 == 1) | (rows == 2))

    def observe(self, state):
        return jnp.stack([state["t"].astype(jnp.float32), state["x"]], -1)


def oracle(lengths, actions):
    """The same, row by row, step by step."""
    rows = []
    for i, length in enumerate(lengths):
        t, x, last = 0, 0.0, False
        rows.append([(0.0, 0.0, 0.0, False, False, True)])
        for a in actions[:, i]:
            if last:
                t, x, last = 0, 0.0, False
                rows[i].append((0.0, 0.0, 0.0, False, False, True))
                continue
            t, x = t + 1, x + 10 + a
            end = t >= length
            terminated, truncated = end and i % 2 == 0, end and (i % 2 == 1 or i == 2)
            last = terminated or truncated
            rows[i].append((float(t), x, x, terminated, truncated, False))
    return np.array(rows).transpose(1, 0, 2)


def run(env, actions, keys):
    """The time steps of a rollout, in a scan."""

    def body(state, inputs):
        state, time_step = env.step(state, *inputs)
        return state, time_step

    state, first = env.init(jax.random.key(0))
    _, rest = jax.jit(lambda s, a, k: jax.lax.scan(body, s, (a, k)))(state, actions, keys)
    return jax.tree.map(lambda a, b: jnp.concatenate([a[None], b]), first, rest)


def columns(time_steps):
    flags = [time_steps.terminated, time_steps.truncated, time_steps.first]
    obs, reward = np.asarray(time_steps.obs), np.asarray(time_steps.reward)
    return np.concatenate([obs, reward[..., None], np.stack(flags, -1)], -1)


# Without a pool, of which a state is drawn at a time, several, or more than there are environments.
POOLS = pytest.mark.parametrize("pool", [None, 1, 9])


@POOLS
def test_every_row_resets_on_the_step_after_its_end_and_ignores_that_action(pool):
    actions = np.random.default_rng(0).integers(0, 5, (23, 4)).astype(np.int32)
    env = AutoReset(Script(), 4, reset_pool=pool)
    time_steps = run(env, jnp.asarray(actions), jax.random.split(jax.random.key(1), 23))
    np.testing.assert_array_equal(columns(time_steps), oracle((3, 1, 4, 2), actions))
    assert time_steps.reward.dtype == np.float32
    assert {x.dtype for x in (time_steps.terminated, time_steps.truncated, time_steps.first)} == {np.dtype(bool)}


def test_episodes_of_length_one_alternate_with_resets():
    time_steps = run(AutoReset(Script((1, 1, 1, 1)), 4), jnp.zeros((6, 4), jnp.int32), jax.random.split(jax.random.key(1), 6))
    np.testing.assert_array_equal(time_steps.first[:, 0], [True, False] * 3 + [True])
    np.testing.assert_array_equal(time_steps.last[:, 1], [False, True] * 3 + [False])
    # Row 2 ends both ways at once; both flags are handed on.
    assert time_steps.terminated[1, 2] and time_steps.truncated[1, 2]


@POOLS
@pytest.mark.parametrize("lengths", [(3, 1, 4, 2), (5, 5, 5, 5)])
def test_starts_differ_between_rows_and_between_resets(pool, lengths):
    env = AutoReset(Script(lengths, noisy=True), 4, reset_pool=pool)
    time_steps = run(env, jnp.zeros((40, 4), jnp.int32), jax.random.split(jax.random.key(1), 40))
    starts = np.asarray(time_steps.obs[..., 1])[np.asarray(time_steps.first)]
    assert len(np.unique(starts)) == starts.size == sum(1 + 40 // (length + 1) for length in lengths)


@pytest.mark.parametrize("pool", [1, 3, 9])
def test_a_pool_draws_as_many_initial_states_as_are_taken(pool):
    drawn = []

    class Counting(Script):
        def reset(self, key, num_envs):
            jax.debug.callback(lambda: drawn.append(num_envs))
            return super().reset(key, num_envs)

    env = AutoReset(Counting((3, 1, 4, 2)), 4, reset_pool=pool)
    time_steps = jax.block_until_ready(run(env, jnp.zeros((41, 4), jnp.int32), jax.random.split(jax.random.key(1), 41)))
    jax.effects_barrier()
    resets = int(time_steps.first[1:].sum())
    assert drawn[0] == 4 + 4 + pool and set(drawn[1:]) == {pool}
    assert resets - pool < sum(drawn[1:]) <= resets


def test_no_key_of_a_pool_is_that_of_a_step_or_of_another_reset():
    class Keys(Script):
        """Steps and initial states with the key that they were made of."""

        def reset(self, key, num_envs):
            return super().reset(key, num_envs) | {"made": jnp.broadcast_to(jax.random.key_data(key), (num_envs, 2))}

        def step(self, state, action, key):
            made = jnp.broadcast_to(jax.random.key_data(key), state["made"].shape)
            after, *rest = super().step({"t": state["t"], "x": state["x"]}, action, key)
            return after | {"made": made}, *rest

    env, made, of_step = AutoReset(Keys((1, 1, 1, 1)), 4, reset_pool=1), [], set()
    state, _ = env.init(jax.random.key(0))
    step = jax.jit(env.step)
    for t in range(6):
        state, _ = step(state, jnp.zeros(4, jnp.int32), jax.random.key(7 + t // 2))
        made.append({tuple(row) for row in np.asarray(state.pool.states["made"]).tolist()})
        if t % 2 == 0:
            of_step = {tuple(row) for row in np.asarray(state.dynamics["made"]).tolist()}
        assert not of_step & made[-1]
    assert len(set.union(*made)) == 1 + 3 * 4


def test_a_pool_under_vmap_is_one_after_the_other():
    env, actions = AutoReset(Script((3, 1, 4, 2), noisy=True), 4, reset_pool=2), jnp.zeros((20, 4), jnp.int32)

    def trajectory(key):
        def body(state, key):
            return env.step(state, actions[0], key)

        return jax.lax.scan(body, env.init(key)[0], jax.random.split(key, 20))

    keys = jax.random.split(jax.random.key(1), 3)
    together = jax.jit(jax.vmap(trajectory))(keys)
    for i, key in enumerate(keys):
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a[i], b), together, jax.jit(trajectory)(key))  # noqa: B023


@pytest.mark.parametrize("pool", [None, 3])
def test_a_scan_and_single_compiled_steps_give_the_same_trajectories(pool):
    env, keys = AutoReset(CartPole(), 6, reset_pool=pool), jax.random.split(jax.random.key(2), 40)
    actions = jax.random.randint(jax.random.key(3), (40, 6), 0, 2)
    scanned = jax.tree.map(np.asarray, run(env, actions, keys))
    step = jax.jit(lambda state, t: env.step(state, actions[t], keys[t]))
    state, _ = env.init(jax.random.key(0))
    for t in range(40):
        state, time_step = step(state, t)
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[t + 1]), time_step, scanned)  # noqa: B023
    assert scanned.first[1:].any()


def test_initial_state_and_time_step_are_donated_together():
    loop = AutoReset(CartPole(), num_envs=2).init(jax.random.key(0))
    assert float(jax.jit(lambda loop: jax.tree.map(jnp.copy, loop), donate_argnums=0)(loop)[1].reward.sum()) == 0


def test_vmap_over_keys_is_the_same_as_one_after_the_other():
    env, keys = AutoReset(Pendulum(), 3), jax.random.split(jax.random.key(0), 2)
    together = jax.vmap(env.init)(keys)[1]
    for i in range(2):
        np.testing.assert_allclose(env.init(keys[i])[1].obs, together.obs[i], rtol=1e-6)


@POOLS
def test_a_step_keeps_every_type_so_that_it_compiles_once(pool):
    env = AutoReset(Pendulum(), 3, reset_pool=pool)
    state, first = env.init(jax.random.key(0))
    after, time_step = jax.eval_shape(env.step, state, jnp.zeros((3, 1)), jax.random.key(0))

    def types(tree):
        return jax.tree.map(lambda x: (x.shape, x.dtype, x.weak_type), tree)

    assert types(after) == types(jax.eval_shape(lambda: state))
    assert types(time_step) == types(jax.eval_shape(lambda: first))


def test_the_spec_carries_the_scaling_and_the_step_uses_it():
    plain, rescaled = AutoReset(Pendulum(), 1), AutoReset(Pendulum(), 1, "rescale")
    assert rescaled.spec.action_scaling == "rescale"
    state, _ = plain.init(jax.random.key(0))
    # Half of the range is a torque of 1; and 5 is cut to 2, which is the end of the range.
    for agents, torque in ((0.5, 1.0), (5.0, 2.0), (-5.0, -2.0)):
        _, ours = rescaled.step(state, jnp.full((1, 1), agents), jax.random.key(0))
        _, expected = plain.step(state, jnp.full((1, 1), torque), jax.random.key(0))
        np.testing.assert_allclose(ours.obs, expected.obs, rtol=1e-6)


def test_auto_reset_is_compared_and_hashed_by_value():
    assert AutoReset(CartPole(), 2) == AutoReset(CartPole(), 2) != AutoReset(CartPole(), 3)
    assert hash(AutoReset(CartPole(), 2)) == hash(AutoReset(CartPole(), 2))


@pytest.mark.parametrize(
    ("action", "error", "says"),
    [
        (jnp.zeros((4, 1), jnp.int32), ValueError, r"script: action must have shape \(4,\), got \(4, 1\)"),
        (jnp.zeros(3, jnp.int32), ValueError, r"must have shape \(4,\), got \(3,\)"),
        (jnp.zeros(4), TypeError, r"must have dtype int32 \(integers or bools\), got float32"),
        ([0, 1, 0, 1], TypeError, r"must have dtype int32 \(integers or bools\), got list"),
    ],
)
def test_a_wrong_action_is_rejected(action, error, says):
    env = AutoReset(Script(), 4)
    state, _ = env.init(jax.random.key(0))
    with pytest.raises(error, match=says):
        env.step(state, action, jax.random.key(0))


def test_actions_of_a_box_must_be_floats():
    env = AutoReset(Pendulum(), 2)
    state, _ = env.init(jax.random.key(0))
    with pytest.raises(TypeError, match=r"jax/Pendulum-v1: action must have dtype float32 \(floats\), got int32"):
        env.step(state, jnp.zeros((2, 1), jnp.int32), jax.random.key(0))


@struct
class Pair(Script):
    """With a tree of actions."""

    @property
    def spec(self):
        return EnvSpec(Box([0.0] * 2, [1.0] * 2), Dict({"a": Discrete(2), "b": Tuple((Discrete(3),))}), "pair")


@pytest.mark.parametrize(
    "action", [{"a": jnp.zeros(4, jnp.int32)}, jnp.zeros(4, jnp.int32), {"a": jnp.zeros(4, jnp.int32), "b": ()}]
)
def test_another_tree_of_actions_is_rejected(action):
    env = AutoReset(Pair(), 4)
    state, _ = env.init(jax.random.key(0))
    with pytest.raises(ValueError, match=r"pair: action must be a tree of 'a', 'b/0'; .* is missing"):
        env.step(state, action, jax.random.key(0))


@struct
class Wrong(Script):
    """One part of what dynamics hand out is not as it should be."""

    what: str = static(default="")

    def reset(self, key, num_envs):
        state = super().reset(key, num_envs)
        return {"steps": jnp.zeros((), jnp.int32), **state} if self.what == "rows" else state

    def step(self, state, action, key):
        after, reward, terminated, truncated = super().step(state, action, key)
        match self.what:
            case "reward":
                reward = reward[:, None]
            case "complex":
                reward = reward.astype(jnp.complex64)
            case "flags":
                truncated = truncated.astype(jnp.float32)
            case "five":
                return after, reward, terminated, truncated, {}
            case "info":
                return {"state": after}
            case "dtype":
                after["t"] = after["t"].astype(jnp.float32)
            case "tree":
                after["more"] = after["t"]
        return after, reward, terminated, truncated

    def observe(self, state):
        obs = super().observe(state)
        return obs[:1] if self.what == "obs" else obs


@pytest.mark.parametrize(
    ("what", "error", "says"),
    [
        ("rows", ValueError, r"script: the state\['steps'\] of reset\(\) must have shape \(4, \.\.\.\), got \(\)"),
        ("obs", ValueError, r"script: observation must have shape \(4, 2\), got \(1, 2\)"),
        ("reward", ValueError, r"script: step\(\) must return reward of shape \(4,\), got \(4, 1\)"),
        ("complex", TypeError, r"step\(\) must return reward as real numbers, got complex64"),
        ("flags", TypeError, r"step\(\) must return truncated as bool, got float32"),
        ("five", TypeError, r"step\(\) must return \(state, reward, terminated, truncated\), got 5 values"),
        ("info", TypeError, r"step\(\) must return \(state, .*, got dict"),
        ("dtype", TypeError, r"script: step\(\) changes the state\['t'\] from int32\[4\] to float32\[4\]; cast it"),
        ("tree", TypeError, r"script: step\(\) changes the tree of the state: .*more.* is new"),
    ],
)
def test_dynamics_that_return_something_else_are_rejected(what, error, says):
    env = AutoReset(Wrong(what=what), 4)
    with pytest.raises(error, match=says):
        state, _ = env.init(jax.random.key(0))
        env.step(state, jnp.zeros(4, jnp.int32), jax.random.key(0))


@struct
class Given(Script):
    """Rewards and flags of another kind or shape that mean the same."""

    reward: object = static(default=None)

    def step(self, state, action, key):
        return [super().step(state, action, key)[0], self.reward(action.shape[0]), False, False]


@pytest.mark.parametrize(
    "reward",
    [
        lambda rows: 1.0,
        lambda rows: 1,
        lambda rows: True,
        lambda rows: np.ones(rows, np.int64),
        lambda rows: jnp.ones(rows, bool),
        lambda rows: jnp.ones(rows, jnp.bfloat16),
        lambda rows: jnp.where(jnp.ones(rows, bool), 1.0, 2.0),
    ],
)
def test_rewards_of_any_kind_of_number_become_float32(reward):
    env = AutoReset(Given(reward=reward), 4)
    state, before = env.init(jax.random.key(0))
    _, after = env.step(state, jnp.zeros(4, jnp.int32), jax.random.key(0))
    assert after.reward.tolist() == [1.0] * 4 and not after.last.any()
    assert jax.typeof(after.reward) == jax.typeof(before.reward) and after.reward.dtype == jnp.float32


@pytest.mark.parametrize("name", ["num_envs", "reset_pool"])
@pytest.mark.parametrize(
    ("number", "error", "says"), [(0, ValueError, " must be an integer >= 1( or None)?, got 0"), (True, TypeError, "")]
)
def test_bad_numbers_of_environments_and_states_are_rejected(name, number, error, says):
    with pytest.raises(error, match=name + says):
        AutoReset(CartPole(), **{name: number})


COUNTED = Dict({"gear": Discrete(6, start=-3), "pair": MultiDiscrete((2, 3), (5, -1)), "x": Box([-1.0], [1.0])})


@struct
class Counting(Script):
    """Observes its steps as integers that begin at the starts of their spaces, in another width."""

    dtype: str = static(default="int8")

    @property
    def spec(self):
        return EnvSpec(COUNTED, Discrete(2), "counting")

    def observe(self, state):
        t = state["t"]
        pair = jnp.stack([5 + t % 2, -1 + t % 3], -1)
        return {"gear": (t - 3).astype(self.dtype), "pair": pair, "x": jnp.zeros((t.shape[0], 1))}


def test_integers_of_observations_count_from_zero_whatever_their_start_is():
    time_steps = run(AutoReset(Counting((6, 6, 6, 6)), 4), jnp.zeros((5, 4), jnp.int32), jax.random.split(jax.random.key(1), 5))
    assert time_steps.obs["gear"].dtype == np.int32
    np.testing.assert_array_equal(time_steps.obs["gear"][:, 0], range(6))
    np.testing.assert_array_equal(time_steps.obs["pair"][:, 0], [[t % 2, t % 3] for t in range(6)])


@pytest.mark.usefixtures("unchecked")
def test_training_predict_and_exports_see_the_same_observations_whatever_their_start_is(tmp_path):
    dynamics = Counting((6,) * 4)
    env, spec = AutoReset(dynamics, 4), AutoReset(dynamics, 4).spec
    agent = PPO(spec=spec, num_steps=4)
    policy = agent.policy(agent.init(jax.random.key(0)))
    write_policy(policy, spec, "stablehlo", tmp_path / "policy.stablehlo", {})
    exported = load_policy(tmp_path / "policy.stablehlo")
    state, time_step = env.init(jax.random.key(0))
    for _ in range(5):
        trained, _ = policy.distribution(time_step, ())
        native = jax.tree.map(np.asarray, dynamics.observe(state.dynamics))
        logits = policy.distribution(dataclasses.replace(time_step, obs=spec.agent_obs(native)), ())[0]
        np.testing.assert_array_equal(trained.mode(), policy.predict(native)[0])
        np.testing.assert_array_equal(trained.mode(), exported.predict(native)[0])
        np.testing.assert_array_equal(trained.entropy(), logits.entropy())
        state, time_step = env.step(state, jnp.zeros(4, jnp.int32), jax.random.key(0))


@struct
class Typed(Script):
    """Observations and masks of a dtype, shape or tree that are not the space's."""

    what: str = static(default="")

    @property
    def spec(self):
        box = Box([0] * 2, [255] * 2, dtype=np.uint8)
        spaces = {"integer": Discrete(3), "binary": MultiBinary((2,)), "bytes": box, "tree": Dict({"a": Discrete(3)})}
        spaces["long"] = Tuple((Discrete(3),))
        obs = spaces.get(self.what, Box([-9.0] * 2, [9.0] * 2))
        choices = Dict({"a": Discrete(3), "b": Box([0.0], [1.0])}) if self.what.startswith("tree of masks") else Discrete(3)
        return EnvSpec(obs, choices, "typed", has_action_mask="mask" in self.what)

    def observe(self, state):
        zeros, pairs = jnp.zeros(4, jnp.int32), jnp.zeros((4, 2))
        values = {"integer": jnp.full(4, 0.5), "binary": pairs + 0.5, "complex": pairs.astype(jnp.complex64), "bytes": pairs}
        values |= {"floats": pairs.astype(jnp.uint8), "tree": {"a": zeros, "more": zeros}, "long": (zeros, zeros)}
        return values.get(self.what, pairs)

    def action_mask(self, state):
        ones = jnp.ones((4, 3), bool)
        values = {"mask of 1": ones[:, :1], "mask of 2": ones[:, :2], "mask of int32": ones.astype(jnp.int32)}
        values |= {"mask of floats": jnp.ones((4, 3)), "mask of one environment": ones[0], "no mask": None}
        values |= {"tree of masks: more": {"a": ones, "b": None, "c": ones}, "tree of masks: box": {"a": ones, "b": ones}}
        return values.get(self.what, {"a": None, "b": None})


@pytest.mark.parametrize("check", [lambda env: env.init(jax.random.key(0)), check_env], ids=["init", "check_env"])
@pytest.mark.parametrize(
    ("what", "error", "says"),
    [
        ("integer", TypeError, r"typed: observation must have dtype int32 \(integers or bools\), got float32"),
        ("binary", TypeError, r"typed: observation must have dtype int8 \(integers or bools\), got float32"),
        ("complex", TypeError, r"typed: observation must have dtype float32 \(floats\), got complex64"),
        ("bytes", TypeError, r"typed: observation must have dtype uint8 \(integers or bools\), got float32"),
        ("floats", TypeError, r"typed: observation must have dtype float32 \(floats\), got uint8"),
        ("tree", ValueError, r"typed: observation must be a dict with keys \['a'\]; 'more' is not in the space"),
        ("long", ValueError, r"typed: observation must be a tuple of length 1, got length 2"),
        ("mask of 1", ValueError, r"typed: action_mask must have shape \(4, 3\), got \(4, 1\)"),
        ("mask of 2", ValueError, r"typed: action_mask must have shape \(4, 3\), got \(4, 2\)"),
        ("mask of one environment", ValueError, r"typed: action_mask must have shape \(4, 3\), got \(3,\)"),
        ("mask of int32", TypeError, r"typed: action_mask must have dtype bool \(bools\), got int32"),
        ("mask of floats", TypeError, r"typed: action_mask must have dtype bool \(bools\), got float32"),
        ("no mask", ValueError, r"typed: action_mask must be given with has_action_mask=True, got NoneType None"),
        ("tree of masks: empty", ValueError, r"typed: action_mask must be given with has_action_mask=True"),
        ("tree of masks: more", ValueError, r"typed: action_mask must be a dict with keys \['a', 'b'\]; 'c' is not in the"),
        ("tree of masks: box", ValueError, r"typed: action_mask 'b' must be None, as Box.* has no mask"),
    ],
)
def test_observations_and_masks_of_another_type_are_rejected_before_compilation(what, error, says, check):
    with pytest.raises(error, match=says):
        check(AutoReset(Typed(what=what), 4))


class WithoutReset:
    """Lacks `reset` and `step`."""

    spec = Script().spec

    def observe(self, state):
        return state


class Unmasked(Script):
    """Says that it has masks, and has none."""

    spec = EnvSpec(Box([-100.0] * 2, [100.0] * 2), Discrete(2), has_action_mask=True)


class Unspecified(Script):
    """Its spec is a space."""

    spec = Discrete(3)


@pytest.mark.parametrize(
    ("dynamics", "error", "says"),
    [
        (Script, TypeError, "AutoReset: dynamics must be an object whose spec is an EnvSpec, got .*Script"),
        (WithoutReset(), AttributeError, "has no attribute 'reset'"),
        (Unmasked(), AttributeError, "has no attribute 'action_mask'"),
        (Unspecified(), TypeError, "AutoReset: dynamics must be an object whose spec is an EnvSpec, got Unspecified"),
    ],
)
def test_dynamics_that_lack_a_member_are_rejected(dynamics, error, says):
    with pytest.raises(error, match=says):
        AutoReset(dynamics).init(jax.random.key(0))
