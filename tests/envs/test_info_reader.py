"""What environments report in `info`, from single, process and vector environments."""

import functools

import gymnasium
import numpy as np
import pytest
from gymnasium.vector import AsyncVectorEnv, AutoresetMode, SyncVectorEnv, VectorWrapper

from polyak import envs
from polyak.envs.info_reader import read_info
from tests.envs import toys

LENGTHS = (3, 1, 5)


class Through(VectorWrapper):
    """Changes nothing, but hides that there is a SyncVectorEnv, which we would step ourselves."""


def vector(mode, make_env=toys.recorded):
    return Through(SyncVectorEnv([make_env] * 2, autoreset_mode=mode))


def named(values, tag):
    """None for NaN, as NaN equals nothing."""
    return [None if np.isnan(value) else float(value) for value in values.get(tag, [np.nan] * 2)]


MAKERS = {
    "sync": lambda: envs.make(toys.recorded, num_envs=2, info_metrics=("force",)),
    "async": lambda: envs.make(toys.recorded, num_envs=2, info_metrics=["force"], vectorization="async"),
    **{mode.value: lambda mode=mode: envs.make(vector(mode), info_metrics=("force",)) for mode in AutoresetMode},
}


@pytest.mark.parametrize("kind", MAKERS)
def test_every_form_reports_success_return_and_named_metrics_of_the_transition(kind):
    env = MAKERS[kind]()
    time_step, total = env.reset(0), np.zeros(2)
    assert env.info == {}
    num_ended, successes = 0, []
    for t in range(30):
        action = np.array([t % 4, 1], np.int32)
        was_last, time_step = time_step.last, env.step(action)
        total = np.where(time_step.first, 0.0, total + time_step.reward)
        assert named(env.info, "env/force") == [None if last else float(a) for last, a in zip(was_last, action, strict=True)]
        for i in range(2):
            recorded, success = (named(env.info, tag)[i] for tag in ("rollout/ep_rew_mean", "rollout/success_rate"))
            assert (recorded is None) == (success is None) == (not time_step.last[i])
            if recorded is not None:
                num_ended += 1
                assert 2 * recorded == pytest.approx(total[i], rel=1e-5)
                successes.append(success)
    env.close()
    assert num_ended > 10 and {0.0, 1.0} == set(successes)


def test_values_with_another_meaning_are_ignored():
    info = {"episode": 7, "is_success": "no"}
    assert read_info(info, (), True, str) == {}
    assert read_info({"episode": {"r": [1, 2]}, "is_success": None}, (), True, str) == {}
    assert read_info({"is_success": True, "episode": {"r": np.array([2.5])}}, (), False, str) == {}


@pytest.mark.parametrize("value", ["fast", None, [1.0], np.zeros(2)])
def test_a_named_metric_that_is_no_number_is_an_error(value):
    env = envs.make(lambda: toys.Reporting(force=lambda action: value), info_metrics=("force",))
    env.reset(0)
    with pytest.raises(TypeError, match=r"env 0, step 1: info\['force'\] must be one number, got "):
        env.step(np.zeros(1, np.int32))


def test_one_number_for_all_environments_of_a_vector_environment_is_no_metric_of_each():
    class OneForAll(Through):
        def step(self, actions):
            return *self.env.step(actions)[:4], {"speed": 0.5, "is_success": True}

    env = envs.make(OneForAll(vector(AutoresetMode.NEXT_STEP, lambda: toys.Scripted((1,)))))
    env.reset(0)
    assert env.step(np.zeros(2, np.int32)).last.all() and env.info == {}
    env = envs.make(OneForAll(vector(AutoresetMode.NEXT_STEP)), info_metrics=("speed",))
    env.reset(0)
    with pytest.raises(TypeError, match=r"env 0, step 1: info\['speed'\] must have an entry for each environment, got 0.5"):
        env.step(np.zeros(2, np.int32))


def test_a_metric_that_info_lacks_is_left_out():
    env = envs.make(toys.Scripted, info_metrics=("speed",))
    env.reset(0)
    env.step(np.zeros(1, np.int32))
    assert env.info == {}


@pytest.mark.parametrize("mode", list(AutoresetMode))
@pytest.mark.parametrize("make_vector", [SyncVectorEnv, AsyncVectorEnv])
def test_gymnasiums_vector_recorder_counts_each_episode_whatever_the_mode(mode, make_vector):
    """One environment resets while the others are in the middle of their episodes."""
    context = {} if make_vector is SyncVectorEnv else {"context": "forkserver"}
    inner = make_vector([functools.partial(toys.Scripted, (n,)) for n in (1, 2, 3)], autoreset_mode=mode, **context)
    recorder = gymnasium.wrappers.vector.RecordEpisodeStatistics(inner)
    scaled = gymnasium.wrappers.vector.TransformReward(recorder, lambda reward: 2 * reward)
    env = envs.make(scaled)
    time_step, total, num_ended = env.reset(0), np.zeros(3), np.zeros(3, int)
    for _ in range(24):
        time_step = env.step(np.zeros(3, np.int32))
        total = np.where(time_step.first, 0.0, total + time_step.reward)
        recorded = env.info.get("rollout/ep_rew_mean", np.full(3, np.nan))
        np.testing.assert_allclose(recorded, np.where(time_step.last, total / 2, np.nan), rtol=1e-5)
        num_ended += time_step.last
    env.close()
    assert (num_ended > 5).all()


class KnowsNoOptions(toys.Scripted):
    """Rejects options of `reset` that it does not know."""

    def reset(self, *, seed=None, options=None):
        assert not options, options
        return super().reset(seed=seed, options=options)


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_the_mask_of_a_reset_does_not_reach_the_environments(mode):
    inner = SyncVectorEnv([functools.partial(KnowsNoOptions, (n,)) for n in (1, 2)], autoreset_mode=mode)
    env = envs.make(gymnasium.wrappers.vector.RecordEpisodeStatistics(inner))
    env.reset(0)
    ends = np.array([env.step(np.zeros(2, np.int32)).last for _ in range(9)])
    assert ends.sum(0).tolist() == [5, 3]


@pytest.mark.parametrize("mode", [AutoresetMode.SAME_STEP, AutoresetMode.DISABLED])
def test_a_wrapper_whose_reset_clears_all_environments_is_rejected(mode):
    normalized = Through(gymnasium.wrappers.vector.NormalizeReward(vector(mode, toys.Scripted)))
    with pytest.raises(ValueError, match=r"NormalizeReward must be of a vector environment with AutoresetMode\.NEXT_STEP, got"):
        envs.make(normalized)


def test_gymnasiums_vector_recorder_is_read():
    env = envs.make(gymnasium.wrappers.vector.RecordEpisodeStatistics(vector(AutoresetMode.NEXT_STEP, toys.Scripted)))
    env.reset(0)
    infos = []
    for _ in range(12):
        time_step = env.step(np.zeros(2, np.int32))
        infos.append((bool(time_step.last[0]), named(env.info, "rollout/ep_rew_mean")[0] is not None))
    assert any(last for last, _ in infos) and all(last == has for last, has in infos)


@pytest.mark.parametrize("vectorization", ["sync", "async"])
def test_the_recorded_return_includes_episodes_that_a_wrapper_outside_truncates(vectorization):
    def make():
        recorder = gymnasium.wrappers.RecordEpisodeStatistics(toys.Scripted((3, 20)))
        return toys.Doubled(gymnasium.wrappers.TimeLimit(recorder, 10))

    env = envs.make(make, num_envs=2, vectorization=vectorization)
    env.reset(0)
    total, ends = np.zeros(2), []
    for t in range(29):
        time_step = env.step(np.zeros(2, np.int32))
        total = np.where(time_step.first, 0.0, total + time_step.reward)
        recorded = env.info.get("rollout/ep_rew_mean", np.full(2, np.nan))
        np.testing.assert_allclose(recorded, np.where(time_step.last, total / 2, np.nan), rtol=1e-5)
        ends += [t] * bool(time_step.truncated[0])
    env.close()
    assert ends == [13, 17, 28]


class Lives(gymnasium.Wrapper):
    """Ends the agent's episode every four steps, as at the loss of a life; the game goes on."""

    def __init__(self, env):
        super().__init__(env)
        self.steps = 0

    def step(self, action):
        obs, reward, terminated, truncated, info = self.env.step(action)
        self.steps += 1
        return obs, reward, terminated or self.steps % 4 == 0, truncated, info

    def reset(self, **options):
        return self.env.reset(**options) if self.steps % 12 == 0 else self.env.step(0)[::4]


def test_a_part_of_a_game_that_goes_on_has_no_recorded_return():
    env = envs.make(lambda: Lives(gymnasium.wrappers.RecordEpisodeStatistics(toys.Scripted((12,)))))
    env.reset(0)
    recorded = []
    for _ in range(8):
        last = env.step(np.zeros(1, np.int32)).last
        recorded += ["rollout/ep_rew_mean" in env.info] if last[0] else []
    env.close()
    assert recorded == [False] * len(recorded) and recorded
