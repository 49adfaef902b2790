"""Action masks that stand elsewhere than in `info`: found, used, or warned of."""

import functools
import warnings

import gymnasium
import jax
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorEnv, VectorWrapper

from polyak import envs, loops
from polyak.agents.ppo import PPO
from polyak.networks.feedforward import MLP
from tests.envs import toys


class Through(VectorWrapper):
    """Changes nothing, but hides that there is a SyncVectorEnv, which we would step ourselves."""


class WithMethod(Through):
    """A vector environment with one method for the masks of all."""

    def action_masks(self):
        return np.array([np.arange(4) != env.t % 4 for env in self.env.envs])


def vector(make_env, mode=AutoresetMode.NEXT_STEP, wrapper=Through):
    return wrapper(SyncVectorEnv([make_env] * 2, autoreset_mode=mode))


class Outer(gymnasium.Wrapper):
    """Hides the method of the environment within, as any wrapper does."""


MAKERS = {
    "method": lambda: envs.make(toys.MaskMethod, num_envs=2),
    "method of a wrapped one": lambda: envs.make(lambda: Outer(Outer(toys.MaskMethod())), num_envs=2),
    "method in workers": lambda: envs.make(toys.MaskMethod, num_envs=2, vectorization="async"),
    "method of a vector": lambda: envs.make(vector(toys.Scripted, wrapper=WithMethod)),
    "obs": lambda: envs.make(toys.MaskObs, num_envs=2, action_mask_key="action_mask"),
    "obs of floats": lambda: envs.make(functools.partial(toys.MaskObs, np.float32), num_envs=2, action_mask_key="action_mask"),
    "obs in workers": lambda: envs.make(toys.MaskObs, num_envs=2, action_mask_key="action_mask", vectorization="async"),
    **{
        f"obs of a vector, {mode.value}": lambda mode=mode: envs.make(vector(toys.MaskObs, mode), action_mask_key="action_mask")
        for mode in AutoresetMode
    },
}


@pytest.mark.parametrize("kind", MAKERS)
def test_every_convention_masks_the_action(kind):
    env = MAKERS[kind]()
    assert env.spec.has_action_mask
    time_step, num_ended = env.reset(0), 0
    for _ in range(20):
        obs = time_step.obs
        if kind.startswith("obs"):
            assert list(obs) == ["obs"]
            obs = obs["obs"]
        for i in np.flatnonzero(~time_step.last):
            np.testing.assert_array_equal(time_step.action_mask[i], np.arange(4) != obs[i, 1] % 4)
        num_ended += time_step.last.sum()
        time_step = env.step(time_step.action_mask.argmax(1).astype(np.int32))
    env.close()
    assert num_ended > 3


def test_ppo_never_takes_a_forbidden_action():
    class Strict(toys.MaskMethod):
        def step(self, action):
            assert self.action_masks()[action], f"{action} is forbidden in step {self.t}"
            return super().step(action)

    env = envs.make(Strict, num_envs=2)
    agent = PPO(env.spec, network=MLP((4,)), num_steps=16, num_epochs=1, num_minibatches=1)
    assert loops.host(agent, env, env_steps=64, key=jax.random.key(0)).progress.env_steps >= 64


def test_masks_in_info_are_preferred_to_the_method():
    class Both(toys.Masked):
        def action_masks(self):
            raise AssertionError("not asked")

    assert envs.make(Both).reset(0).action_mask.all()


def test_a_mask_in_the_observation_that_is_not_used_is_warned_of():
    for given in (toys.MaskObs, vector(toys.MaskObs)):
        with pytest.warns(
            UserWarning, match=r"make: obs\['action_mask'\] of \w+ is not used .*; pass action_mask_key='action_mask'"
        ):
            env = envs.make(given)
        assert not env.spec.has_action_mask


def test_a_mask_deep_in_the_observation_is_warned_of():
    class Deep(toys.Scripted):
        def __init__(self):
            super().__init__()
            flags = gymnasium.spaces.MultiBinary(4)
            self.observation_space = gymnasium.spaces.Dict(
                a=gymnasium.spaces.Dict(action_mask=flags), obs=self.observation_space
            )

        def obs(self, action):
            return {"a": {"action_mask": np.ones(4, np.int8)}, "obs": super().obs(action)}

    with pytest.warns(UserWarning, match=r"obs\['a'\]\['action_mask'\] of Deep is not used .*; return info\['action_mask'\]"):
        envs.make(Deep)


class MaskProperty(toys.Scripted):
    """Masks of a property, which fails before the first reset."""

    @property
    def action_masks(self):
        return np.arange(4) != self.no_such_attribute


class MaskArray(toys.Scripted):
    action_masks = np.ones(4, bool)


@pytest.mark.parametrize("make_env", [MaskProperty, MaskArray])
def test_masks_that_are_no_method_are_warned_of_once(make_env):
    with pytest.warns(UserWarning, match=r"action_masks of \w+ is not used: it must be a method, got (prop|ndarr)") as warned:
        env = envs.make(make_env, num_envs=2)
    assert len(warned) == 1 and not env.spec.has_action_mask


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_method_of_the_environments_in_a_vector_environment_is_warned_of(kind):
    given = vector(toys.MaskMethod) if kind == "sync" else AsyncVectorEnv([toys.MaskMethod] * 2, context="forkserver")
    with pytest.warns(UserWarning, match=r"action_masks of the environments in \w+ of \w+ is not used; .*the function that"):
        env = envs.make(given)
    assert not env.spec.has_action_mask
    env.reset(0)
    env.close()


def test_a_method_whose_masks_cannot_be_used_is_warned_of_once():
    class Bits(toys.MaskMethod):
        def __init__(self):
            super().__init__()
            self.action_space = gymnasium.spaces.MultiBinary(2)

    with pytest.warns(UserWarning, match=r"make: action_masks\(\) of Bits is not used: masks are supported for") as warned:
        env = envs.make(Bits, num_envs=3)
    assert len(warned) == 1 and not env.spec.has_action_mask


@pytest.mark.parametrize("make_env", [toys.Scripted, toys.MaskObs])
def test_a_key_that_the_observation_lacks_is_an_error(make_env):
    with pytest.raises(ValueError, match="action_mask_key='mask' must be one of several entries of the Dict observation, got"):
        envs.make(make_env, action_mask_key="mask")


def test_a_mask_of_other_numbers_is_an_error():
    class Soft(toys.MaskObs):
        def obs(self, action):
            return super().obs(action) | {"action_mask": np.full(4, 0.5, np.float32)}

    with pytest.raises(ValueError, match=r"the action_mask must hold bools \(or 0 and 1\), got \[0.5, 0.5, 0.5, 0.5\]"):
        envs.make(functools.partial(Soft, np.float32), action_mask_key="action_mask").reset(0)


class Broken(toys.MaskObs):
    """Returns what it is told from `reset`, or from `step`."""

    def __init__(self, reset=None, step=None):
        super().__init__()
        self.answers = reset, step

    def reset(self, **options):
        return super().reset(**options) if self.answers[0] is None else self.answers[0]

    def step(self, action):
        return super().step(action) if self.answers[1] is None else self.answers[1]


@pytest.mark.parametrize(
    ("reset", "error", "says"),
    [
        ({"obs": 0}, TypeError, r"env 0, step 0: reset\(\) must return \(obs, info\), got dict"),
        (
            ({"obs": 0}, {}),
            ValueError,
            r"env 0, step 0: the observation must be a dict with the action mask 'action_ma",
        ),
        ((np.zeros(3), {}), ValueError, r"the observation must be a dict with the action mask 'action_mask', .* got ndarray"),
        (
            ({"obs": 0, "action_mask": np.ones(4)}, None),
            TypeError,
            r"env 0, step 0: the info of reset\(\) must be a dict, got No",
        ),
    ],
)
def test_what_reset_does_wrong_beside_a_mask_is_an_error_that_says_so(reset, error, says):
    with pytest.raises(error, match=says) as caught:
        envs.make(lambda: Broken(reset), action_mask_key="action_mask")
    assert not getattr(caught.value, "__notes__", [])


def test_a_step_without_the_mask_of_the_key_is_an_error_that_says_so():
    env = envs.make(lambda: Broken(step=({"obs": 0}, 0.0, False, False, {})), action_mask_key="action_mask")
    env.reset(0)
    with pytest.raises(ValueError, match="env 0, step 1: the observation must be a dict with the action mask 'action_mask'"):
        env.step(np.zeros(1, np.int32))


@pytest.mark.parametrize("answer", [{"obs": 0}, ({"obs": 0}, None), ({"obs": 0}, {})])
def test_what_reset_of_a_vector_environment_does_wrong_beside_a_mask_is_an_error(answer):
    class Wrong(Through):
        def reset(self, **options):
            return answer

    error = ValueError if answer == ({"obs": 0}, {}) else TypeError
    with pytest.raises(
        error, match=r"step 0: (reset\(\) must return (\(obs, info\)|info as a dict)|the observation must be a dict with)"
    ):
        envs.make(vector(toys.MaskObs, wrapper=Wrong), action_mask_key="action_mask")


@pytest.mark.parametrize("is_vector", [False, True])
def test_a_method_that_returns_no_mask_is_an_error_that_names_it(is_vector):
    class Silent(toys.Scripted):
        def action_masks(self):
            return None

    class SilentVector(Through):
        def action_masks(self):
            return None

    with pytest.raises(ValueError, match=r"step 0: action_masks\(\) must return an action mask, got None"):
        envs.make(vector(toys.Scripted, wrapper=SilentVector) if is_vector else Silent)


def test_an_exception_in_action_masks_says_where():
    class Raising(toys.Scripted):
        def action_masks(self):
            raise KeyError("the user's own")

    with pytest.raises(KeyError) as caught:
        envs.make(Raising)
    assert caught.value.__notes__[0] == "raised in action_masks()"


def test_masks_do_not_prevent_snapshots():
    class Kept(toys.Counting):
        def action_masks(self):
            return np.array([True, self.count % 2 == 0])

    env = envs.make(Kept)
    env.reset(0)
    env.step(np.zeros(1, np.int32))
    snapshot = env.snapshot()
    wanted = env.step(np.zeros(1, np.int32))
    env.restore(snapshot)
    again = env.step(np.zeros(1, np.int32))
    jax.tree.map(np.testing.assert_array_equal, again, wanted)


def test_environments_without_masks_give_no_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        env = envs.make("CartPole-v1", num_envs=2)
    assert not env.spec.has_action_mask and not isinstance(env, VectorEnv)


@pytest.mark.parametrize(
    ("wrapper", "message"),
    [
        (gymnasium.wrappers.NormalizeObservation, "NormalizeObservation of .* starts its statistics anew .*normalize_obs=True"),
        (
            gymnasium.wrappers.NormalizeReward,
            "NormalizeReward of .* put RecordEpisodeStatistics .*normalize_reward='return'",
        ),
    ],
)
@pytest.mark.parametrize("form", ["single", "sync", "vector", "own"])
def test_wrappers_whose_statistics_an_evaluation_lacks_are_warned_of(wrapper, message, form):
    def make():
        return gymnasium.wrappers.TimeLimit(wrapper(toys.Scripted()), 5)

    on_vectors = gymnasium.wrappers.vector
    envs_by_form = {
        "single": make,
        "sync": SyncVectorEnv([make]),
        "vector": on_vectors.RecordEpisodeStatistics(SyncVectorEnv([make])),
        "own": on_vectors.RecordEpisodeStatistics(getattr(on_vectors, wrapper.__name__)(SyncVectorEnv([toys.Scripted]))),
    }
    with pytest.warns(UserWarning, match=message):
        envs.make(envs_by_form[form])


def test_a_normalized_reward_whose_return_is_recorded_before_is_not_warned_of():
    recorder = gymnasium.wrappers.RecordEpisodeStatistics
    envs.make(lambda: gymnasium.wrappers.NormalizeReward(recorder(toys.Scripted())))
    vector = gymnasium.wrappers.vector
    envs.make(vector.NormalizeReward(vector.RecordEpisodeStatistics(SyncVectorEnv([toys.Scripted]))))
    envs.make(vector.NormalizeReward(SyncVectorEnv([lambda: recorder(toys.Scripted())])))
