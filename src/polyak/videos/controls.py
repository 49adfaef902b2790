"""Turns the keys that a person presses, and the buttons and sticks of gamepads, into actions of an environment."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from polyak.core.gymnasium_spaces import to_gymnasium
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, MultiDiscrete, Tuple

ARROWS = (("left", "right"), ("down", "up"))
"""The keys that move the first and the second number of a Box down and up."""

MAX_DIGITS = 10
DEAD_ZONE = 0.1
"""Position of a stick from which it counts; for actions that are no Box it is half of the way."""

GAMEPAD = re.compile(r"button(\d+)|axis(\d+)(min|max)")
STICKS = -1_000
"""Codes from here down are directions of sticks, codes below 0 are buttons."""

Action: TypeAlias = npt.NDArray[Any]
KeyMap: TypeAlias = Mapping[tuple[str, ...], Any]
"""Actions by the names of the keys that are pressed together."""


class Controls:
    """The keys that are pressed, and the action that they stand for.

    Keys that have an action together take it. Else each key sets the numbers of the action in which it differs from `noop`; of
    two keys that set one number, the one that was pressed later. A key counts until the next action even if it was released
    before. In a Box, a stick moves the numbers as far as it is moved.

    Args:
        owner: name of the caller in errors.
        pygame: the module, with an open display.
        spec: the environment's spaces.
        keys: actions by keys, in the environment's units; None takes `default_keys`. Buttons of gamepads are `button0`, ...,
            the directions of their sticks `axis0min`, `axis0max`, ...
        noop: the action without a key; None is the action of no keys in `keys`, else the first action, or zeros of a Box.
        reserved: names of keys that have another meaning.

    Raises:
        ValueError: the action space has parts, a key does not exist or is reserved, an action is outside of its space, or there
            are no keys.

    Attributes:
        keys: actions by the names of keys.
        noop: the action without a key.
        was_touched: a key was pressed since `release`, or a stick moved.
    """

    def __init__(
        self, owner: str, pygame: Any, spec: EnvSpec, keys: KeyMap | None, noop: Any = None, reserved: Sequence[str] = ()
    ) -> None:
        self._owner, self._pygame, self._spec = owner, pygame, spec
        if isinstance(spec.action, Dict | Tuple):
            name = spec.id or "the environment"
            raise ValueError(f"{owner}: keys need one action space, {name} has several; collect a Python policy instead")
        self._space: Any = to_gymnasium(spec.action)
        named = default_keys(owner, spec) if keys is None else keys
        self.keys = {names: self._check("+".join(names), action) for names, action in named.items() if names}
        self.noop = self._check("noop", named.get((), _default_noop(spec)) if noop is None else noop)
        codes = {names: tuple(sorted(self._code(name, reserved) for name in names)) for names in self.keys}
        self._actions = {codes[names]: action for names, action in self.keys.items()}
        if len(self._actions) < len(codes) or any(len(set(together)) < len(together) for together in self._actions):
            raise ValueError(
                f"{owner}: each key, and each combination of keys, must be there once, got {', '.join(map('+'.join, codes))}"
            )
        self._known = {code for together in self._actions for code in together}
        self._pressed: dict[int, float] = {}
        self._taps: dict[int, float] = {}
        self.was_touched = False
        pygame.joystick.init()
        self._gamepads = [pygame.joystick.Joystick(i) for i in range(pygame.joystick.get_count())]

    def is_active(self) -> bool:
        """Return True if a key that has an action is pressed, or was since the last action."""
        return bool(self._pressed or self._taps)

    def handle(self, event: Any) -> None:
        """Take an event of pygame."""
        pygame = self._pygame
        if event.type in (pygame.KEYDOWN, pygame.KEYUP):
            self._press(event.key, event.type == pygame.KEYDOWN)
        elif event.type in (pygame.JOYBUTTONDOWN, pygame.JOYBUTTONUP):
            self._press(-1 - event.button, event.type == pygame.JOYBUTTONDOWN)
        elif event.type == pygame.JOYAXISMOTION:
            is_box = isinstance(self._spec.action, Box)
            for code, position in ((STICKS - 2 * event.axis, -event.value), (STICKS - 2 * event.axis - 1, event.value)):
                self._pressed.pop(code, None)
                if code in self._known and position > (DEAD_ZONE if is_box else 0.5):
                    self._pressed[code], self.was_touched = (min(position, 1.0) if is_box else 1.0), True

    def _press(self, code: int, is_down: bool) -> None:
        self.was_touched |= is_down
        self._pressed.pop(code, None)
        if is_down and code in self._known:
            self._pressed[code] = self._taps[code] = 1.0

    def release(self) -> None:
        """Forget all keys, as at the start of an episode."""
        self.was_touched = False
        self._pressed.clear()
        self._taps.clear()

    def action(self) -> Action:
        """The action of the keys, in the environment's units."""
        pressed = {code: value for code, value in self._pressed.items() if code not in self._taps} | self._taps
        self._taps = {}
        together = self._actions.get(tuple(sorted(pressed)))
        if len(pressed) > 1 and together is not None:
            return together
        action = self.noop
        for code, value in pressed.items():
            own = self._actions.get((code,), self.noop)
            new = own if value == 1 else self.noop + value * (own - self.noop)
            action = np.where(own != self.noop, new, action).astype(action.dtype)
        return action

    def _check(self, name: str, action: Any) -> Action:
        """The action as an array of the space.

        Raises:
            ValueError: it is outside of the space.
        """
        shape = self._space.shape
        numbers = np.asarray(action, np.float64)
        numbers = numbers.reshape(shape) if numbers.size == np.prod(shape, dtype=int) else numbers
        array = numbers.astype(self._space.dtype)
        if not (array.shape == shape and np.allclose(array, numbers) and self._space.contains(array)):
            raise ValueError(f"{self._owner}: the action of {name} must be in {self._space}, got {action}")
        return array

    def _code(self, name: str, reserved: Sequence[str]) -> int:
        if name.lower() in reserved:
            raise ValueError(f"{self._owner}: keys must be others than {', '.join(reserved)}, got {name!r}")
        if found := GAMEPAD.fullmatch(name):
            return -1 - int(found[1]) if found[1] else STICKS - 2 * int(found[2]) - (found[3] == "max")
        try:
            code: int = self._pygame.key.key_code(name)
        except ValueError:
            raise ValueError(
                f"{self._owner}: there is no key {name!r}; keys are left, space, a, 1, and button0 or axis0min of a gamepad"
            ) from None
        return code


def default_keys(owner: str, spec: EnvSpec) -> KeyMap:
    """Digits for Discrete actions, arrows for a Box of one or two numbers.

    Raises:
        ValueError: the space has more actions.
    """
    match spec.action:
        case Discrete(n=n, start=start) if n <= MAX_DIGITS:
            return {(str(i),): start + i for i in range(n)}
        case Box(shape=shape) if np.prod(shape, dtype=int) <= len(ARROWS):
            keys: dict[tuple[str, ...], Action] = {}
            for i, arrows in enumerate(ARROWS[: np.prod(shape, dtype=int)]):
                for name, bound in zip(arrows, _bounds(spec.action), strict=True):
                    keys[(name,)] = _default_noop(spec)
                    keys[(name,)].flat[i] = bound.flat[i]
            return keys
        case _:
            name = spec.id or "the environment"
            raise ValueError(f"{owner}: {name} has no keys; set --keys left=0 right=1, or of a Box --keys left=-1,0 right=1,0")


def named_keys(pygame: Any, keys_to_action: Mapping[Any, Any], reserved: Sequence[str] = ()) -> KeyMap | None:
    """The map of an environment's `get_keys_to_action`, by names of keys; None if it has keys that are reserved or unknown."""
    found = {}
    for keys, action in keys_to_action.items():
        together = keys if isinstance(keys, tuple | str) else (keys,)
        if any(isinstance(key, str) and len(key) != 1 for key in together):
            return None
        codes = [ord(key) if isinstance(key, str) else key for key in together]
        # pygame's older names would need `pygame.init()`, which also starts the sound.
        names = tuple(pygame.key.name(code, use_compat=False).lower() for code in codes)
        if not all(name and name.isascii() and name not in reserved for name in names):
            return None
        found[names] = action
    return found


def _default_noop(spec: EnvSpec) -> Action:
    match spec.action:
        case Box(shape=shape):
            return np.asarray(np.clip(np.zeros(shape), *_bounds(spec.action)))
        case Discrete(start=start) | MultiDiscrete(start=start):
            return np.asarray(start)
        case space:
            return np.zeros(to_gymnasium(space).shape)


def _bounds(box: Any) -> tuple[Action, Action]:
    """The bounds of a Box; 1 for an infinite one."""
    low, high = np.asarray(box.low, np.float64), np.asarray(box.high, np.float64)
    return np.where(np.isfinite(low), low, -1.0), np.where(np.isfinite(high), high, 1.0)
