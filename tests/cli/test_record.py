"""polyak record: the episodes that a person plays in a window, as a data set."""

import os
import signal
import sys
import threading

import gymnasium
import numpy as np
import pytest

import polyak
from polyak.envs.keyboard import keys_to_action
from polyak.videos.window import Window

pygame = pytest.importorskip("pygame")
FAST = "--fps 1000"
USER = """
import gymnasium, numpy as np

class Unkeyed(gymnasium.Env):
    \"\"\"The observation is the sum of actions; ends at 3.\"\"\"

    metadata = {"render_modes": ["rgb_array"]}
    observation_space = gymnasium.spaces.Box(-99, 99, (1,))
    action_space = gymnasium.spaces.Discrete(3, start=-1)

    def __init__(self, render_mode=None, fails_at=99):
        self.render_mode, self.fails_at = render_mode, fails_at

    def reset(self, *, seed=None, options=None):
        self.count = 0
        return np.zeros(1, np.float32), {}

    def step(self, action):
        self.count += int(action)
        if self.count == self.fails_at:
            raise RuntimeError("the motor is hot")
        return np.full(1, self.count, np.float32), float(action), self.count == 3, False, {}

    def render(self):
        return np.full((20, 30, 3), 40 * max(self.count, 0), np.uint8)

class Count(Unkeyed):
    def get_keys_to_action(self):
        return {(): 0, ("d",): 1, (pygame_left,): -1}

pygame_left = 1073741904

class Many(Unkeyed):
    action_space = gymnasium.spaces.Box(-1, 1, (3,))

def no_images():
    return Count()
"""


@pytest.fixture
def person(monkeypatch, workdir):
    """A function that sets what a person does: the keys that are pressed at each drawn image; `None` lets all go."""
    monkeypatch.setenv("SDL_VIDEODRIVER", "offscreen")
    (workdir / "count_env.py").write_text(USER)
    monkeypatch.delitem(sys.modules, "count_env", raising=False)
    draw, titles = Window.draw, []

    def plan(*keys):
        script, titles[:] = iter(keys), []
        down = []

        def draw_and_act(self, image):
            draw(self, image)
            titles.append(self.title)
            act = next(script, None)
            if callable(act):
                act()
                return
            while down:
                pygame.event.post(pygame.event.Event(pygame.KEYUP, key=down.pop()))
            if act is not None:
                down.append(pygame.key.key_code(act))
                pygame.event.post(pygame.event.Event(pygame.KEYDOWN, key=down[0]))

        monkeypatch.setattr(Window, "draw", draw_and_act)
        return titles

    return plan


def test_what_a_person_does_is_a_data_set(person, command, workdir):
    # d: 1, left: -1; an episode begins with a key, which is its first action.
    titles = person("d", None, "left", "d", "d", "d", None, *["d"] * 3, None, "x", *["d"] * 3)
    code, out, err = command("record demos.npz --env count_env:Count --episodes 3", FAST)
    assert (code, err) == (0, "")
    assert "keys  d: 1, left: -1; none: 0\n" in out
    assert "episode 1: return 3.0, 6 steps\nepisode 2: return 3.0, 3 steps\nepisode 3: return 3.0, 4 steps\n" in out
    assert out.endswith("wrote demos.npz: 13 transitions in 3 episodes; polyak train bc --data demos.npz learns from it\n")
    data = polyak.data.load("demos.npz")
    first, second, third = data.episodes
    assert first.action.tolist() == [1, 0, -1, 1, 1, 1] and first.obs[:, 0].tolist() == [0, 1, 1, 0, 1, 2, 3]
    assert second.action.tolist() == [1, 1, 1] and third.action.tolist() == [0, 1, 1, 1]
    assert data.terminated.all() and data.spec.id == "count_env:Count"
    assert titles[0].endswith("episode 1 of 3, press a key to start") and titles[1].endswith("episode 1 of 3")
    assert command("train bc --data demos.npz --gradient-steps 2 --batch-size 4 --run-dir r --hidden 4")[0] == 0


def test_keys_end_discard_and_stop(person, command):
    person("d", "d", "return", "d", "d", "backspace", "d", "left", "return", "d", "d", "escape")
    code, out, err = command("record demos.npz --env count_env:Count", FAST)
    assert (code, err) == (0, "")
    assert "episode 1: return 2.0, 2 steps\nepisode 2: return 0.0, 2 steps\nwrote demos.npz: 4 transitions in 2 episodes" in out
    data = polyak.data.load("demos.npz")
    assert not data.terminated.any() and data.action.tolist() == [1, 1, 1, -1]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_keeps_the_complete_episodes(number, code, person, command, monkeypatch):
    monkeypatch.setattr("polyak.cli.signals.GRACE_SECONDS", 60.0)
    person(*["d"] * 6, lambda: os.kill(os.getpid(), number))
    done, out, _ = command("record demos.npz --env count_env:Count", FAST)
    assert done == code and "wrote demos.npz: 3 transitions in 1 episode;" in out
    assert polyak.data.load("demos.npz").returns.tolist() == [3]


def test_an_error_of_the_environment_keeps_the_complete_episodes(person, command):
    person(*["d"] * 2, "return", *["d"] * 4)
    code, out, err = command("record demos.npz --env count_env:Count --env-kwargs fails_at=3", FAST)
    assert code == 1 and "wrote demos.npz: 2 transitions in 1 episode;" in out
    assert "the motor is hot" in err and err.splitlines()[-1].startswith("error: RuntimeError: the motor is hot")


def test_complete_episodes_are_in_the_file_while_another_one_runs(person, command):
    counts = []
    person(*["d"] * 6, lambda: counts.append(polyak.data.load("demos.npz").num_episodes), "return")
    assert command("record demos.npz --env count_env:Count --episodes 2", FAST)[0] == 0
    assert counts == [1] and polyak.data.load("demos.npz").num_episodes == 2


def test_an_episode_that_cannot_be_saved_ends_the_recording(person, command, monkeypatch):
    real, calls = polyak.data.save, []

    def save(data, output):
        calls.append(data.num_episodes)
        if len(calls) >= 2:
            raise OSError("no space left")
        real(data, output)

    monkeypatch.setattr("polyak.cli.record.save", save)
    monkeypatch.setattr("polyak.cli.record.monotonic", lambda: 0.0)
    person(*["d"] * 8)
    code, out, err = command("record demos.npz --env count_env:Count", FAST)
    assert code == 1 and err.endswith("error: OSError: no space left\n")
    assert "wrote demos.npz: 3 transitions in 1 episode" in out
    assert polyak.data.load("demos.npz").num_episodes == 1


@pytest.mark.parametrize(("output", "writes"), [("demos.npz", [1, 4, 5]), ("minari:count/demos-v0", [1, 4, 5, 5])])
def test_a_write_waits_for_ten_times_the_duration_of_the_last_one(output, writes, person, command, monkeypatch, workdir):
    if output.startswith("minari:"):
        pytest.importorskip("minari")
    now, calls = [0.0], []

    def save(data, output):
        calls.append(data.num_episodes)
        if output.endswith(".npz"):
            (workdir / output).touch()
        now[0] += 1.0

    def wait(seconds):
        now[0] += seconds

    monkeypatch.setattr("polyak.cli.record.save", save)
    monkeypatch.setattr("polyak.cli.record.monotonic", lambda: now[0], raising=False)
    episode = ["d", "return"]
    person(
        *episode, *episode, "d", lambda: wait(9.5), "return", "d", lambda: wait(0.5), "return", "d", lambda: wait(0.0), "return"
    )
    code, out, _ = command(f"record {output} --env count_env:Count --episodes 5", FAST)
    assert code == 0 and f"wrote {output}: " in out and "in 5 episodes" in out and calls == writes
    note = "until minari:count/demos-v0 is written, at the end, complete episodes are kept in count-demos-v0.npz\n"
    assert (note in out) is output.startswith("minari:") and not (workdir / "count-demos-v0.npz").exists()


def test_episodes_are_in_a_file_until_minari_has_them(person, command, monkeypatch):
    pytest.importorskip("minari")
    real, file = polyak.data.save, "count-demos-v0.npz"

    def save(data, output):
        if output.startswith("minari:"):
            raise OSError("no space left")
        real(data, output)

    monkeypatch.setattr("polyak.cli.record.save", save)
    person(*["d"] * 3, "escape")
    code, out, err = command("record minari:count/demos-v0 --env count_env:Count", FAST)
    assert code == 1 and err.endswith("error: OSError: no space left\n") and f"wrote {file}: 3 transitions in 1 episode;" in out
    assert polyak.data.load(file).num_episodes == 1
    code, _, err = command("record minari:count/demos-v0 --env count_env:Count", FAST)
    assert (code, err) == (2, f"error: polyak record: {file} exists already; choose another name, or delete it\n")


def test_minari_gets_the_episodes_that_the_file_could_not_get(person, command, monkeypatch):
    pytest.importorskip("minari")
    tried = []

    def save(data, output):
        tried.append((output, data.num_episodes))
        if output.endswith(".npz"):
            raise OSError("no space left")

    monkeypatch.setattr("polyak.cli.record.save", save)
    person(*["d"] * 3, "escape")
    code, out, err = command("record minari:count/demos-v0 --env count_env:Count", FAST)
    assert code == 1 and err.endswith("error: OSError: no space left\n") and "wrote minari:count/demos-v0" in out
    assert tried[-1] == ("minari:count/demos-v0", 1)


def test_nothing_complete_is_nothing_written(person, command, workdir):
    person("d", "escape")
    code, _, err = command("record demos.npz --env count_env:Count", FAST)
    assert code == 1 and err == "error: no episode is complete; nothing was written\n" and not (workdir / "demos.npz").exists()


def test_an_environment_without_a_clock_waits_for_keys(person, command):
    pressed = pygame.K_d

    def tap():
        for kind in (pygame.KEYDOWN, pygame.KEYUP):
            pygame.event.post(pygame.event.Event(kind, key=pressed))

    # Without a key there is no step: each image is drawn by the tap before it.
    titles = person(tap, tap, tap)
    code, out, _ = command("record demos.npz --env count_env:Count --episodes 1 --wait", FAST)
    assert code == 0 and "return 3.0, 3 steps" in out and len(titles) == 4


def test_waiting_begins_with_a_key_that_has_an_action_and_ends_without_one(person, command):
    def tap():
        for kind in (pygame.KEYDOWN, pygame.KEYUP):
            pygame.event.post(pygame.event.Event(kind, key=pygame.K_d))

    def press_another_key_before():
        pygame.event.post(pygame.event.Event(pygame.KEYDOWN, key=pygame.K_x))
        threading.Timer(0.2, tap).start()

    person(press_another_key_before, tap)
    code, out, _ = command("record demos.npz --env count_env:Count --episodes 1 --wait --max-steps 2", FAST)
    assert code == 0 and "return 2.0, 2 steps" in out


def test_seeds_count_up_and_long_episodes_are_cut(person, command):
    person(*["1"] * 20)
    words = "record jax/CartPole-v1 demos.npz --episodes 2 --max-steps 3 --seed 5 --show step return"
    assert command(words, FAST)[0] == 0
    person(*["1"] * 20)
    assert command("record jax/CartPole-v1 later.npz --episodes 1 --max-steps 3 --seed 6", FAST)[0] == 0
    data, later = polyak.data.load("demos.npz"), polyak.data.load("later.npz")
    assert data.lengths.tolist() == [3, 3] and data.truncated.all() and (data.action == 1).all()
    assert not np.array_equal(data.episodes[0].obs, data.episodes[1].obs)
    np.testing.assert_array_equal(data.episodes[1].obs, later.episodes[0].obs)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "polyak record takes ENV and DATA, or DATA and --env MODULE:NAME; got neither"),
        ("CartPole-v1", "polyak record takes ENV and DATA, or DATA and --env MODULE:NAME; got CartPole-v1"),
        ("CartPole-v1 demos", "destination must end with .npz or be 'minari:NAME', got 'demos'"),
        ("CartPole-v1 old.npz", "polyak record: old.npz exists already; choose another name, or delete it"),
        ("CartPole-v1 none/demos.npz", "polyak record: none is no directory; create it first"),
        ("CartPole-v1 minari:demos", "'demos' is no name of Minari's, such as 'pendulum/human-v0'"),
        ("Nothing-v1 demos.npz", "Nothing"),
        ("CartPole-v1 demos.npz --episodes 0", "polyak record: --episodes must be an integer >= 1"),
        ("CartPole-v1 demos.npz --max-steps 0", "--max-steps must be an integer >= 1"),
        ("CartPole-v1 demos.npz --seed -1", "--seed must be an integer"),
        ("CartPole-v1 demos.npz --fps 0", "fps must be a number in (0, 1000]"),
        ("CartPole-v1 demos.npz --show value", "'value'"),
        ("CartPole-v1 demos.npz --keys left", "--keys takes KEY=ACTION, each key once, such as left=0 or"),
        ("CartPole-v1 demos.npz --keys up+left=0 left+up=1", "left+space=2, got 'left+up=1'"),
        ("CartPole-v1 demos.npz --keys left=x", "--keys: an action is a number or several, such as 2 or -1,0.5, got 'x'"),
        ("CartPole-v1 demos.npz --keys left=0 --noop nan", "--noop: an action is a number or several"),
        ("CartPole-v1 demos.npz --keys left=2", "the action of left must be in Discrete(2), got [2.]"),
        ("CartPole-v1 demos.npz --keys lft=1", "there is no key 'lft'"),
        ("CartPole-v1 demos.npz --keys escape=1", "keys must be others than escape, return, backspace, got 'escape'"),
        ("CartPole-v1 demos.npz --keys Escape=1", "keys must be others than escape, return, backspace, got 'escape'"),
        ("CartPole-v1 demos.npz --keys a=0 A=1", "each key once, such as left=0 or left+space=2, got 'A=1'"),
        ("CartPole-v1 demos.npz --keys left+left=1", "each combination of keys, must be there once, got left+left"),
        ("CartPole-v1 demos.npz --noop 7", "the action of noop must be in Discrete(2)"),
        ("demos.npz --env count_env:Many", "count_env:Many has no keys; set --keys"),
        ("demos.npz --env count_env:no_images", "draws no images: its render_mode must be 'rgb_array'"),
        ("demos.npz --env count_env", "--env must be module:name"),
        ("demos.npz --env count_env:Count --wrapper nowhere:W", "No module named 'nowhere'"),
        ("CartPole-v1 demos.npz --env-kwargs a", "--env-kwargs takes NAME=VALUE"),
    ],
)
def test_wrong_words_are_usage_errors(words, message, person, command, workdir):
    (workdir / "old.npz").write_text("kept")
    code, _, err = command("record", words)
    text = " ".join(err.replace("│", " ").split())
    assert code == 2 and message in text and "Traceback" not in err
    assert not (workdir / "demos.npz").exists() and (workdir / "old.npz").read_text() == "kept"


def test_without_a_window_the_error_says_what_to_do(command, workdir, monkeypatch):
    for name in ("DISPLAY", "WAYLAND_DISPLAY", "SDL_VIDEODRIVER"):
        monkeypatch.delenv(name, raising=False)
    code, _, err = command("record CartPole-v1 demos.npz")
    advice = "record a Python policy with polyak.data.collect"
    assert code == 2
    assert err == f"error: polyak record: there is no display to open a window on (DISPLAY is not set); {advice}\n"
    monkeypatch.setitem(sys.modules, "pygame", None)
    _, _, err = command("record CartPole-v1 demos.npz")
    assert err == "error: polyak record needs pygame, which opens a window: pip install 'polyak[video]'\n"


def test_atari_games_have_the_keys_of_the_ale():
    ale_py = pytest.importorskip("ale_py")
    from ale_py.vector_env import AtariVectorEnv

    gymnasium.register_envs(ale_py)
    game = AtariVectorEnv("ms_pacman", 1)
    single = gymnasium.make("ALE/MsPacman-v5")
    wanted = {tuple(sorted(keys)): action for keys, action in single.unwrapped.get_keys_to_action().items()}
    found = {tuple(sorted(keys)): action for keys, action in keys_to_action(game).items()}
    game.close()
    single.close()
    assert found.pop(()) == wanted.pop(("e",)) == 0
    assert found == wanted and len(found) > 3
