"""Atari games against the bare emulator: the nine details of Huang et al. 2022, the two accounts, and the resets."""

import os
import types

import ale_py
import jax
import numpy as np
import pytest
from ale_py import roms

from polyak import envs, train
from polyak.core.struct import struct
from polyak.core.types import PolicyStep
from polyak.envs.atari import Atari, AtariBatch

# Whole screens are not resized, so that every pixel can be compared; no dice but the agent's.
BARE = {"img_height": 210, "img_width": 160, "noop_max": 0, "repeat_action_probability": 0.0}


class Game:
    """A game of the emulator, stepped frame by frame with the details written out."""

    def __init__(self, rom, limit=108_000):
        self.ale = ale_py.ALEInterface()
        self.ale.setFloat("repeat_action_probability", 0.0)
        self.ale.loadROM(roms.get_rom_path(rom))
        self.actions = self.ale.getMinimalActionSet()
        self.opening = self.actions.index(ale_py.Action.FIRE) if ale_py.Action.FIRE in self.actions else 0
        self.limit = limit

    def reset(self):
        """FIRE, where there is one; black images before the first."""
        self.ale.reset_game()
        if self.opening:
            self.ale.act(ale_py.Action.FIRE)
        self.images = [np.zeros((210, 160), np.uint8)] * 3 + [self.ale.getScreenGrayscale()]
        self.frames = 0

    def step(self, action):
        """Four frames: (points, the game is over, it was cut, a life is lost)."""
        points, seen, lives = 0, [], self.ale.lives()
        for _ in range(4):
            points += self.ale.act(self.actions[action])
            seen.append(self.ale.getScreenGrayscale())
            self.frames += 1
            if self.ale.game_over() or self.frames >= self.limit:
                break
        self.images = [*self.images[1:], np.maximum(*seen[-2:]) if len(seen) > 1 else seen[0]]
        over = self.ale.game_over()
        return points, over, self.frames >= self.limit and not over, 0 < self.ale.lives() < lives


def play(env, steps, seed=0):
    """Time steps under random actions, and the actions."""
    rng, time_steps, actions = np.random.default_rng(seed), [env.reset(seed)], []
    for _ in range(steps):
        actions.append(rng.integers(0, env.spec.action.n, env.num_envs, np.int32))
        time_steps.append(env.step(actions[-1]))
    env.close()
    return time_steps, actions


# Breakout wants FIRE, and its games are over soon; Ms. Pac-Man has no FIRE and gives ten points and more.
@pytest.mark.parametrize(("name", "rom", "steps"), [("Breakout", "breakout", 230), ("MsPacman", "ms_pacman", 220)])
def test_frames_rewards_lives_and_resets_are_those_of_the_emulator(name, rom, steps):
    env = envs.make(f"ALE/{name}-v5", num_envs=2, env_kwargs=BARE)
    time_steps, actions = play(env, steps)
    lives_lost = games = clipped = 0
    for i in range(2):
        game, due, over = Game(rom), False, False
        game.reset()
        for now, action in zip(time_steps[1:], actions, strict=True):
            if over:
                game.reset()
                points, over, lost = 0, False, False
            else:
                points, over, _, lost = game.step(game.opening if due else action[i])
            assert now.record.reward[i] == points
            assert now.reward[i] == (0 if due else np.sign(points))
            assert now.first[i] == due
            assert now.record.first[i] == (due and now.record.reward[i] == 0 and (now.obs[i, :3] == 0).all())
            assert now.record.last[i] == over and not now.truncated[i]
            assert now.terminated[i] == (over or (lost and not due))
            if over:
                games += 1
                # The ALE repeats the image before the end of a game; nothing is bootstrapped from it.
                game.images[-1] = now.obs[i, -1]
            np.testing.assert_array_equal(now.obs[i], np.stack(game.images))
            due, lives_lost, clipped = bool(now.last[i]), lives_lost + lost, clipped + (points > 1)
    assert (games >= 2 and lives_lost >= 8) if name == "Breakout" else (lives_lost >= 2 and clipped >= 20)


def test_images_are_grey_84x84_each_pixel_the_mean_of_its_area():
    def area(size, length):
        edges = np.arange(length + 1) * size / length
        pixels = np.arange(size)
        return np.clip(np.minimum(edges[1:, None], pixels + 1) - np.maximum(edges[:-1, None], pixels), 0, 1) * length / size

    rules = {"noop_max": 0, "repeat_action_probability": 0.0}
    (large, small) = (play(envs.make("ALE/Breakout-v5", env_kwargs=k), 20)[0][-1].obs[0] for k in (BARE, rules))
    assert small.shape == (4, 84, 84) and small.dtype == np.uint8
    wanted = area(210, 84) @ large.astype(float) @ area(160, 84).T
    assert np.abs(small - wanted).max() <= 1.0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("rom", "noop_max", "frames"), [("ms_pacman", 30, (0, 30)), ("breakout", 30, (1, 30)), ("pong", 0, (1, 1))]
)
def test_a_game_begins_after_up_to_30_frames_of_nothing_the_press_of_fire_among_them(rom, noop_max, frames):
    games, seen = Atari(noop_max=noop_max, img_height=8, img_width=8).make(rom, 2), set()
    games.reset(seed=0)
    for _ in range(60 if noop_max else 3):
        seen |= set(games.reset()[1]["episode_frame_number"].tolist())
    games.ale = None
    assert (min(seen), max(seen)) == frames and len(seen) >= 0.9 * (frames[1] - frames[0])


@pytest.mark.slow
def test_seeds_decide_sticky_actions_too_however_many_threads_there_are():
    runs = [play(envs.make("ALE/Pong-v5", num_envs=3, env_kwargs={"num_threads": n}), 40)[0] for n in (1, 3)]
    for a, b in zip(*runs, strict=True):
        jax.tree.map(np.testing.assert_array_equal, a, b)
    obs = runs[0][-1].obs
    assert (obs[0] != obs[1]).any()
    other = play(envs.make("ALE/Pong-v5", num_envs=3), 40, seed=1)[0][-1].obs
    assert all((other != obs[i]).any() for i in range(3))


def test_a_game_is_truncated_at_its_limit_of_frames_and_begins_anew_on_the_next_step():
    limit = {"max_num_frames_per_episode": 40, "img_height": 8, "img_width": 8}
    time_steps, _ = play(envs.make("ALE/Pong-v5", num_envs=2, env_kwargs=limit), 23)
    for t, now in enumerate(time_steps):
        assert (now.truncated == (t % 11 == 10)).all() and not now.terminated.any(), t
        assert (now.first == (t % 11 == 0)).all()
        assert (now.record.last == now.truncated).all() and (now.record.first == now.first).all()
    assert Atari().max_num_frames_per_episode == 108_000


def test_a_game_that_ends_in_the_step_after_a_lost_life_is_counted_and_begins_anew():
    rules = {"img_height": 8, "img_width": 8, "noop_max": 0, "repeat_action_probability": 0.0}
    time_steps, _ = play(envs.make("ALE/Breakout-v5", env_kwargs=rules), 60)
    lost = next(t for t, now in enumerate(time_steps) if now.last[0])
    limited = rules | {"max_num_frames_per_episode": 4 * (lost + 1)}
    time_steps, _ = play(envs.make("ALE/Breakout-v5", env_kwargs=limited), 60)
    before, cut, after = time_steps[lost : lost + 3]
    assert before.terminated[0] and not before.record.last[0]
    assert cut.first[0] and cut.truncated[0] and cut.record.last[0] and not cut.record.first[0]
    assert after.first[0] and after.record.first[0] and not after.last[0] and after.reward[0] == after.record.reward[0] == 0


@pytest.mark.parametrize(
    ("settings", "lives_end", "clips"), [({"episodic_life": False}, False, True), ({"reward_clipping": False}, True, False)]
)
def test_lives_and_clipping_can_be_left_to_the_game(settings, lives_end, clips):
    small = {"img_height": 8, "img_width": 8}
    time_steps, _ = play(envs.make("ALE/MsPacman-v5", num_envs=2, env_kwargs=small | settings), 250)
    assert any((now.last & ~now.record.last).any() for now in time_steps) == lives_end
    assert (max(now.reward.max() for now in time_steps) == 1) == clips


@struct
class Still:
    """Does nothing."""

    def initial_state(self, batch_size):
        return ()

    def distribution(self, time_step, carry):
        raise NotImplementedError

    def action(self, time_step, carry, key):
        return PolicyStep(jax.numpy.zeros(time_step.first.shape, jax.numpy.int32), carry)


@pytest.mark.slow
def test_evaluation_counts_whole_games_in_points():
    small = {"img_height": 8, "img_width": 8, "repeat_action_probability": 0.0}
    env = envs.make("ALE/MsPacman-v5", num_envs=2, env_kwargs=small)
    evaluation = train.evaluate(Still(), env, episodes=2, key=jax.random.key(0))
    env.close()
    assert (evaluation.returns >= 60).all() and (evaluation.returns % 10 == 0).all()
    whole = envs.make("ALE/MsPacman-v5", num_envs=2, env_kwargs=small | {"episodic_life": False, "reward_clipping": False})
    again = train.evaluate(Still(), whole, episodes=2, key=jax.random.key(0))
    whole.close()
    np.testing.assert_array_equal(evaluation.returns, again.returns)
    np.testing.assert_array_equal(evaluation.lengths, again.lengths)


def test_closing_ends_the_threads_and_there_is_no_snapshot():
    before = len(os.listdir("/proc/self/task"))
    env = envs.make("ALE/Pong-v5", num_envs=2, env_kwargs={"num_threads": 2})
    env.reset(0)
    assert len(os.listdir("/proc/self/task")) > before
    assert env.snapshot() is None
    env.close()
    env.close()
    assert len(os.listdir("/proc/self/task")) == before
    for use in (lambda: env.step(np.zeros(2, np.int32)), lambda: env.reset(0)):
        with pytest.raises(RuntimeError, match="ALE/Pong-v5: the environment is closed"):
            use()


@pytest.mark.parametrize(
    ("name", "arguments", "error", "says"),
    [
        ("Brekout", {}, ValueError, "unknown environment 'ALE/Brekout-v5'; did you mean 'ALE/Breakout-v5'"),
        (
            "Pong",
            {"vectorization": "async"},
            ValueError,
            "must be 'auto' or 'own' for ALE/Pong-v5, .* got 'async'",
        ),
        ("Pong", {"env_kwargs": {"frame_skip": 4}}, TypeError, "unknown field 'frame_skip'; did you mean 'frameskip'"),
        ("Pong", {"env_kwargs": {"frameskip": 0}}, ValueError, "frameskip.* must be an integer in \\[1, 1000\\], got 0"),
        ("Pong", {"env_kwargs": {"noop_max": -1}}, ValueError, "noop_max must be an integer in \\[0, 10000\\], got -1"),
        ("Pong", {"env_kwargs": {"episodic_life": 1}}, ValueError, "episodic_life must be one of True, False, got 1"),
        ("Pong", {"env_kwargs": {"repeat_action_probability": 1.5}}, ValueError, r"must be a number in \[0, 1\], got 1.5"),
    ],
)
def test_a_wrong_name_or_setting_is_rejected(name, arguments, error, says):
    with pytest.raises(error, match=says):
        envs.make(f"ALE/{name}-v5", **arguments)


def test_the_settings_are_those_of_the_name_unless_env_kwargs_set_them():
    import gymnasium

    registered = gymnasium.spec("ALE/Pong-v5").kwargs
    assert {name: vars(Atari())[name] for name in registered if name != "game"} == {
        name: value for name, value in registered.items() if name != "game"
    }
    sticks = [
        play(envs.make("ALE/Pong-v5", env_kwargs={"noop_max": 0, **k}), 60)[0][-1].obs
        for k in ({}, {"repeat_action_probability": 0.25}, {"repeat_action_probability": 0.0})
    ]
    np.testing.assert_array_equal(sticks[0], sticks[1])
    assert (sticks[0] != sticks[2]).any()


def test_points_of_the_step_after_a_lost_life_are_no_reward(monkeypatch):
    batch, none = AtariBatch("breakout", 2, Atari(**BARE), "Breakout"), np.zeros(2, bool)
    obs, info = batch._env.reset(seed=np.zeros(2, int))
    answer = obs, np.array([2.0, 2.0]), none, none, info
    monkeypatch.setattr(batch, "_env", types.SimpleNamespace(step=lambda action: answer))
    batch._lives = info["lives"]
    step = batch.step(np.zeros(2, np.int32), reset_mask=np.array([True, False]))
    np.testing.assert_array_equal(step.reward, [0.0, 1.0])
    # The points of the game count them.
    np.testing.assert_array_equal(step.record[0], [2.0, 2.0])
