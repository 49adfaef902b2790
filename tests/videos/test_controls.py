"""Keys and gamepads as actions: what each key sets, combinations, short taps, sticks, and wrong maps of keys."""

import numpy as np
import pytest

from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, MultiBinary, MultiDiscrete
from polyak.videos.controls import Controls, named_keys

pygame = pytest.importorskip("pygame")
OBS = Box(-1.0, 1.0, (1,))


@pytest.fixture(autouse=True)
def _display(monkeypatch):
    monkeypatch.setenv("SDL_VIDEODRIVER", "dummy")
    pygame.display.quit()
    pygame.display.init()
    yield
    pygame.joystick.quit()
    pygame.display.quit()


def controls(action, keys=None, **options):
    return Controls("record", pygame, EnvSpec(OBS, action, id="Env"), keys, **options)


def press(controls, *names, kind=pygame.KEYDOWN):
    for name in names:
        controls.handle(pygame.event.Event(kind, key=pygame.key.key_code(name)))


def let_go(controls, *names):
    press(controls, *names, kind=pygame.KEYUP)


def test_digits_are_the_actions_of_a_discrete_space():
    keys = controls(Discrete(3, start=5))
    assert keys.action() == 5 and not keys.is_active()
    press(keys, "2")
    assert keys.action() == 7 and keys.action() == 7 and keys.is_active()
    press(keys, "1")
    assert keys.action() == 6  # the later one
    let_go(keys, "1")
    assert keys.action() == 7
    let_go(keys, "2")
    assert keys.action() == 5 and keys.action().dtype == np.int64


def test_arrows_move_a_box_between_its_bounds():
    keys = controls(Box(np.array([-2.0, 0.5]), np.array([np.inf, 3.0])))
    np.testing.assert_array_equal(keys.noop, np.float32([0, 0.5]))
    press(keys, "left", "up")
    np.testing.assert_array_equal(keys.action(), np.float32([-2, 3]))
    press(keys, "right")
    np.testing.assert_array_equal(keys.action(), np.float32([1, 3]))
    assert keys.action().dtype == np.float32


def test_a_tap_between_two_actions_counts_once():
    keys = controls(Discrete(2))
    press(keys, "1")
    let_go(keys, "1")
    assert keys.is_active() and keys.action() == 1
    assert keys.action() == 0 and not keys.is_active()
    press(keys, "1")
    keys.release()
    assert keys.action() == 0 and not keys.was_touched
    press(keys, "x")  # another key starts an episode, and is no action
    assert keys.was_touched and not keys.is_active()


def test_combinations_have_actions_of_their_own():
    keys = controls(Discrete(6), {("left",): 1, ("up",): 2, ("left", "up"): 5, ("space",): 3}, noop=4)
    press(keys, "up", "left")
    assert keys.action() == 5
    press(keys, "space")
    assert keys.action() == 3  # no combination of three
    let_go(keys, "up", "left", "space")
    assert keys.action() == 4


def test_keys_set_their_numbers_of_vectors():
    keys = controls(MultiDiscrete((3, 3)), {("a",): [1, 0], ("b",): [0, 2], ("c",): [2, 0]})
    press(keys, "a", "b", "c")
    assert keys.action().tolist() == [2, 2]
    keys = controls(MultiBinary(3), {("a",): [1, 0, 0], ("b",): [0, 0, 1]})
    press(keys, "a", "b")
    assert keys.action().tolist() == [1, 0, 1] and keys.action().dtype == np.int8


def test_sticks_move_a_box_as_far_as_they_are_moved():
    keys = controls(Box(-2.0, 2.0, (2,)), {("axis0min",): [-2, 0], ("axis0max",): [2, 0], ("button3",): [0, 1]})

    def move(value, axis=0):
        keys.handle(pygame.event.Event(pygame.JOYAXISMOTION, axis=axis, value=value))

    move(0.05)
    assert not keys.is_active() and not keys.was_touched
    move(-0.5)
    keys.handle(pygame.event.Event(pygame.JOYBUTTONDOWN, button=3))
    np.testing.assert_allclose(keys.action(), [-1, 1])
    move(1.0)
    keys.handle(pygame.event.Event(pygame.JOYBUTTONUP, button=3))
    np.testing.assert_allclose(keys.action(), [2, 0])
    move(1.0, axis=1)  # has no action
    move(0.0)
    np.testing.assert_allclose(keys.action(), [0, 0])
    keys = controls(Discrete(3), {("axis0min",): 1, ("axis0max",): 2})
    move(0.4)
    assert keys.action() == 0
    move(0.6)
    assert keys.action() == 2


def test_the_map_of_an_environment_is_read():
    # As Gymnasium's: characters or codes; the action of no keys is the one without a key.
    names = named_keys(pygame, {(): 1, ("w", " "): 2, "a": 0, (pygame.K_LEFT,): 2, ord("d"): 1})
    assert names == {(): 1, ("w", "space"): 2, ("a",): 0, ("left",): 2, ("d",): 1}
    keys = controls(Discrete(3), names)
    assert keys.action() == 1 and () not in keys.keys
    # The codes of pygame 1, which MountainCar-v0 has, are no keys any more.
    assert named_keys(pygame, {(276,): 0}) is None


@pytest.mark.parametrize(
    ("action", "keys", "message"),
    [
        (Discrete(11), None, "Env has no keys; set --keys left=0 right=1"),
        (Box(-1.0, 1.0, (3,)), None, "Env has no keys"),
        (Dict({"a": Discrete(2)}), None, "keys need one action space, Env has several"),
        (Discrete(2), {("left",): 2}, r"the action of left must be in Discrete\(2\), got 2"),
        (Discrete(2), {("left",): 0.5}, "the action of left must be in"),
        (Discrete(2), {("left",): [0, 1]}, "the action of left must be in"),
        (Box(-1.0, 1.0, (2,)), {("left", "up"): [0, 2]}, r"the action of left\+up must be in Box"),
        (Discrete(2), {("lft",): 1}, "there is no key 'lft'; keys are left, space, a, 1, and button0 or axis0min of a gamepad"),
        (Discrete(2), {("escape",): 1}, "keys must be others than escape, got 'escape'"),
    ],
)
def test_wrong_keys_are_errors(action, keys, message):
    with pytest.raises(ValueError, match=f"^record: {message}"):
        controls(action, keys, reserved=("escape",))
