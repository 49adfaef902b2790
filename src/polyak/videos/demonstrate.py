"""Lets a person act in an environment in a window, and records the complete episodes."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import jax
import numpy as np

from polyak.core.types import PyTree, Rollout, TimeStep
from polyak.videos.captions import add_caption
from polyak.videos.controls import Controls
from polyak.videos.play import DrawnEnv, Frame, Number
from polyak.videos.record import DEFAULT_FPS
from polyak.videos.window import Window

STOP, END, AGAIN = RESERVED = ("escape", "return", "backspace")
"""The keys that stop the recording, end an episode, and discard it."""

BLACK = np.zeros((1, 1, 3), np.uint8)
POLL = 0.01
"""Maximum seconds without a look at the keys."""


@dataclass(frozen=True)
class Pace:
    """The seeds, the speed and the ends of recorded episodes.

    Attributes:
        seed: the first episode starts from it; each further one, also after one that was discarded, from the next number.
        fps: steps per second; None is the environment's speed.
        max_steps: steps after which an episode is cut short, and complete; None leaves the end to the environment.
        waits: the environment steps only while a key is pressed, for games without a clock.
    """

    seed: int = 0
    fps: float | None = None
    max_steps: int | None = None
    waits: bool = False


def demonstrate(
    env: DrawnEnv,
    window: Window,
    controls: Controls,
    *,
    episodes: int,
    pace: Pace,
    show: Sequence[Number],
    on_end: Callable[[Frame], None],
    should_stop: Callable[[], bool],
) -> Iterator[Rollout]:
    """Yield each complete episode of a person, `[L, 1]` in the units of agents, until there are enough or the person stops.

    An episode starts with the first key. Return ends it, as a truncation. Backspace discards it. Escape, or the window's
    button, stops.

    Args:
        env: the environment, with one copy and without action masks.
        window: an open window.
        controls: the keys.
        episodes: number of complete episodes.
        pace: see `Pace`.
        show: numbers below the images.
        on_end: called with the last frame of each complete episode.
        should_stop: True stops, as Escape does.
    """
    title, number, seed = window.title, 0, pace.seed
    while number < episodes:
        title_now = f"{title}: episode {number + 1} of {episodes}"
        window.title = f"{title_now}, press a key to start"
        steps, actions = [env.reset(seed)], list[PyTree]()
        frame = _draw(window, env, steps[0], show, Frame(BLACK, None, number, -1, 0.0, 0.0, None, False))
        fps, due = pace.fps or frame.fps or DEFAULT_FPS, 0.0
        controls.release()
        is_started, is_over = (controls.is_active if pace.waits else lambda: controls.was_touched), False
        command = _wait(window, controls, due, is_started, should_stop)
        window.title = title_now
        while command is None and not is_over:
            due = max(due + 1 / fps, time.monotonic())
            actions.append(env.spec.agent_action(controls.action()[None]))
            steps.append(env.step(actions[-1]))
            frame = _draw(window, env, steps[-1], show, frame)
            is_over = frame.is_last or len(actions) == pace.max_steps
            is_ready = controls.is_active if pace.waits and not is_over else lambda: True
            command = _wait(window, controls, due, is_ready, should_stop)
        if actions and (is_over or command == END) and command != AGAIN:
            on_end(frame)
            yield _as_rollout(steps, actions)
            number += 1
        if command == STOP:
            return
        seed += 1


def _draw(window: Window, env: DrawnEnv, time_step: TimeStep, show: Sequence[Number], before: Frame) -> Frame:
    """Show the environment; returns the frame, which follows the frame `before` of its episode."""
    reward, is_last = float(time_step.episode_record.reward[0]), bool(time_step.last[0])
    frame = Frame(*env.render(), before.episode, before.step + 1, reward, before.total + reward, None, is_last)
    window.draw(add_caption(frame, show))
    return frame


def _wait(
    window: Window, controls: Controls, until: float, is_ready: Callable[[], bool], should_stop: Callable[[], bool]
) -> str | None:
    """Wait until a time and until `is_ready`, and take the keys; returns the first of `RESERVED` at once."""
    pygame = window.pygame
    commands = {pygame.key.key_code(name): name for name in RESERVED}
    while True:
        for event in pygame.event.get():
            if event.type == pygame.QUIT:
                return STOP
            if event.type == pygame.KEYDOWN and event.key in commands:
                return commands[event.key]
            controls.handle(event)
        if should_stop():
            return STOP
        left = until - time.monotonic()
        if left <= 0 and is_ready():
            return None
        time.sleep(min(POLL, max(left, 0.001)))


def _as_rollout(steps: list[TimeStep], actions: list[PyTree]) -> Rollout:
    """The rollout of an episode, whose end is a truncation if the environment did not end it."""
    times = [TimeStep(x.obs, x.reward, x.terminated, x.truncated, x.first) for x in steps]
    time_steps, stacked = (jax.tree.map(lambda *x: np.stack(x), *trees) for trees in (times, actions))
    time_steps.truncated[-1] |= ~time_steps.terminated[-1]
    return Rollout(time_steps, stacked)
