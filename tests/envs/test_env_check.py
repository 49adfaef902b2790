"""The test of an environment finds what it is there to find."""

import gymnasium
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak import envs
from polyak.core.spaces import Box, Discrete, EnvSpec, MultiBinary
from polyak.core.struct import static, struct
from polyak.envs.autoreset import AutoReset
from polyak.envs.env_check import _random_action
from tests.envs import toys


@pytest.mark.parametrize(
    "make_env",
    ["CartPole-v1", "jax/CartPole-v1", "jax/Pendulum-v1", "Taxi-v4", toys.Scripted, toys.Masked, toys.Choosy, toys.Tree],
)
def test_the_environment_check_accepts_valid_environments(make_env):
    if make_env is toys.Tree:
        env = envs.make(lambda: gymnasium.wrappers.TimeLimit(Forgetting(), 5), num_envs=2)
    else:
        env = envs.make(make_env, num_envs=2)
    envs.check_env(env)


class Forgetting(toys.Tree):
    """A tree that begins anew at a reset, and whose bytes come near their bound of 255."""

    def obs(self, k):
        return super().obs(k) | {"a": np.full((2, 2), 40 * k, np.uint8)}

    def reset(self, **options):
        self.seen = []
        return super().reset(**options)


class Unseeded(toys.Faulty):
    """Draws from a generator of its own from step 5 on."""

    def __init__(self):
        super().__init__()
        self.own = np.random.default_rng()

    def reset(self, **options):
        self.steps = 0
        return super().reset(**options)

    def step(self, action):
        obs, *rest = super().step(action)
        if self.steps >= 5:
            obs[1] = self.own.uniform()
        return obs, *rest


@pytest.mark.parametrize("env", [toys.Scripted(), "CartPole-v1"])
def test_an_environment_that_make_has_not_created_is_rejected_by_name(env, unchecked):
    with pytest.raises(TypeError, match=r"check_env: env must be created with polyak.envs.make\(...\), got (Scripted|str)"):
        envs.check_env(env)


@pytest.mark.parametrize("num_steps", [-1, 0])
def test_a_check_of_no_step_is_rejected(num_steps):
    with pytest.raises(ValueError, match=f"check_env: num_steps must be an integer >= 1, got {num_steps}"):
        envs.check_env(envs.make("CartPole-v1"), num_steps=num_steps)


class Resized(toys.Faulty):
    """Has other actions from its first reset on."""

    def reset(self, **options):
        self.action_space = gymnasium.spaces.Discrete(5)
        return super().reset(**options)


class ResizedInPlace(Resized):
    """Changes the number of actions of its space."""

    def reset(self, **options):
        self.action_space.n = np.int64(5)
        return toys.Faulty.reset(self, **options)


@pytest.mark.parametrize("cls", [Resized, ResizedInPlace])
def test_an_environment_whose_reset_changes_its_spaces_is_rejected(cls):
    with pytest.raises(ValueError, match=r"reset\(\) must not change action_space, got Discrete\(.*5.*\), expected"):
        envs.check_env(envs.make(cls))


def test_an_environment_that_its_seed_does_not_make_again_is_reported():
    with pytest.raises(ValueError, match=r"env 0, step 5: \.obs must be the same for equal seeds and actions"):
        envs.check_env(envs.make(Unseeded, num_envs=3))


@struct
class Growing:
    """Dynamics whose state changes its type."""

    to: str = static(default="float32")

    @property
    def spec(self):
        return EnvSpec(Box([0.0], [1.0]), Discrete(2), "growing")

    def reset(self, key, num_envs):
        return jnp.zeros(num_envs, jnp.int32)

    def step(self, state, action, key):
        no = jnp.zeros(state.shape, bool)
        return state.astype(self.to), jnp.ones(state.shape), no, no

    def observe(self, state):
        return state[:, None].astype(jnp.float32)


@struct
class Typed:
    """An environment that is no AutoReset, and promotes its state."""

    num_envs: int = static(default=2)

    @property
    def spec(self):
        return Growing().spec

    def init(self, key):
        _, time_step = AutoReset(Growing("int32"), 2).init(key)
        return {"count": jnp.zeros(2, jnp.int32)}, time_step

    def step(self, state, action, key):
        _, time_step = self.init(key)
        return {"count": state["count"].astype(jnp.float32)}, time_step


def test_a_state_that_changes_its_type_is_reported():
    with pytest.raises(
        TypeError, match=r"growing: step\(\) changes the state\['count'\] from int32\[2\] to float32\[2\]; cast it"
    ):
        envs.check_env(Typed())
    envs.check_env(AutoReset(Growing("int32"), 2))


NAN_AND_ONE = np.array([np.nan, 1], np.float32)


class Impure(Growing):
    """Dynamics that count their steps, or draw a reward, in Python."""

    def __init__(self, how):
        object.__setattr__(self, "to", "int32")
        object.__setattr__(self, "how", how)
        object.__setattr__(self, "calls", 0)
        object.__setattr__(self, "key", jax.random.key(3))

    def step(self, state, action, key):
        state, reward, no, _ = super().step(state, action, key)
        object.__setattr__(self, "calls", self.calls + 1)
        values = {
            "number": lambda: float(self.calls),
            "constant": lambda: jnp.asarray(np.random.default_rng().uniform(size=2), jnp.float32),
            "constant key": lambda: jax.random.uniform(self.key, (2,)) * jnp.nan_to_num(NAN_AND_ONE),
        }
        return state, reward * values[self.how](), no, no


@pytest.mark.parametrize("how", ["number", "constant"])
def test_dynamics_with_side_effects_in_python_are_reported(how):
    with pytest.raises(ValueError, match=r"growing: step\(\) must be a pure function, but two traces gave two programs"):
        envs.check_env(AutoReset(Impure(how), 2))


def test_a_side_effect_that_changes_no_result_is_accepted():
    envs.check_env(AutoReset(Impure("constant key"), 2))


class Broken(Growing):
    """Dynamics whose fifth step is wrong: a value that is not finite or out of its space, or a mask without an action."""

    def __init__(self, how):
        object.__setattr__(self, "to", "int32")
        object.__setattr__(self, "how", how)

    @property
    def spec(self):
        obs = Discrete(9) if self.how == "integer" else Box([0.0], [1.0])
        return EnvSpec(obs, Discrete(2), "broken", has_action_mask=True)

    def step(self, state, action, key):
        state, reward, no, _ = super().step(state + 1, action, key)
        return state, jnp.where((state == 5) & (self.how == "reward"), jnp.inf, reward), no, no

    def observe(self, state):
        if self.how == "integer":
            return jnp.where(state == 5, 9, 0).astype(jnp.int32)
        return jnp.where((state == 5) & (self.how == "obs"), jnp.nan, jnp.zeros(state.shape))[:, None]

    def action_mask(self, state):
        second = jnp.arange(state.shape[0]) == 1
        return jnp.broadcast_to(~((state == 5) & second & (self.how == "mask"))[:, None], (*state.shape, 2))


@pytest.mark.parametrize(
    ("how", "message"),
    [
        ("obs", r"broken: step 5: the observation must be finite, got nan in environment 0 at \[0\]"),
        ("integer", r"broken: step 5: the observation must be in \[0, 8\], got 9 in environment 0"),
        ("reward", "broken: step 5: the reward must be finite, got inf in environment 0"),
        ("mask", "broken: step 5: the action mask must allow an action, got none in environment 1"),
    ],
)
def test_wrong_values_in_jax_are_reported_with_environment_and_step(how, message):
    with pytest.raises(ValueError, match=message):
        envs.check_env(AutoReset(Broken(how), 2))
    envs.check_env(AutoReset(Broken(how), 2), num_steps=4)


@struct
class Outside(Growing):
    """Dynamics whose observations are values of another space from step 3 on."""

    kind: str = static(default="float")

    @property
    def spec(self):
        spaces = {"bytes": Box(0, 9, (1,), np.uint8), "binary": MultiBinary((1,)), "counted": Discrete(6, start=-3)}
        return EnvSpec(spaces.get(self.kind, Box([0.0], [1.0])), Discrete(2), "outside")

    def step(self, state, action, key):
        return super().step(state + 1, action, key)

    def observe(self, state):
        is_outside = (state >= 3) & (jnp.arange(state.shape[0]) == 1)
        if self.kind == "counted":
            return jnp.where(is_outside, 3, -3).astype(jnp.int32)
        return jnp.where(is_outside, 20, 1)[:, None].astype(self.spec.obs.dtype)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("bytes", r"outside: step 3: the observation must be in \[0, 9\], got 20 in environment 1 at \[0\]"),
        ("binary", r"outside: step 3: the observation must be in \[0, 1\], got 20 in environment 1 at \[0\]"),
        ("counted", r"outside: step 3: the observation must be in \[-3, 2\], got 3 in environment 1"),
    ],
)
def test_integers_of_observations_out_of_their_space_are_reported(kind, message):
    with pytest.raises(ValueError, match=message):
        envs.check_env(AutoReset(Outside("int32", kind=kind), 2))
    envs.check_env(AutoReset(Outside("int32", kind=kind), 2), num_steps=2)


def test_floats_of_observations_out_of_their_box_are_reported_by_one_warning():
    message = r"outside: step 3: the observation must be in \[0, 1\], got 20\.0 in environment 1 at \[0\]"
    with pytest.warns(UserWarning, match=message) as caught:
        envs.check_env(AutoReset(Outside("int32"), 2))
    assert len(caught) == 1


INFINITY = np.inf


@pytest.mark.parametrize(("scaling", "bounds"), [("clip", (5.0, 10.0)), ("rescale", (-1.0, 1.0))])
def test_actions_of_a_box_are_drawn_over_all_of_its_bounds(scaling, bounds):
    spec = EnvSpec(Box([0.0], [1.0]), Box(5, 10, (3,)), action_scaling=scaling)
    drawn = _random_action(spec, 1000, np.random.default_rng(0), None, "")
    low, high = bounds
    assert drawn.dtype == np.float32 and drawn.min() >= low and drawn.max() <= high
    assert np.histogram(drawn, 10, bounds)[0].min() > 200


def test_actions_of_a_box_without_bounds_are_drawn_beyond_one():
    space = Box([-INFINITY, 2, -INFINITY], [INFINITY, INFINITY, -4])
    drawn = _random_action(EnvSpec(Box([0.0], [1.0]), space), 1000, np.random.default_rng(0), None, "")
    assert np.isfinite(drawn).all() and (np.abs(drawn[:, 0]) > 1).any() and abs(drawn[:, 0].mean()) < 0.2
    assert (drawn[:, 1] >= 2).all() and (drawn[:, 2] <= -4).all() and np.ptp(drawn[:, 1:], axis=0).min() > 3
