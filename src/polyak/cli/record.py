"""polyak record ENV DATA: records what a person does in an environment, as a data set."""

import dataclasses
import math
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from time import monotonic
from typing import Annotated, Any, Literal, TypeAlias

import jax
import numpy as np
import tyro

from polyak.cli.flags import UsageError, default_hint, fail, parse
from polyak.cli.signals import Signals, handle_signals
from polyak.cli.user_code import env_maker
from polyak.cli.user_flags import EnvFlags
from polyak.cli.user_traceback import print_user_traceback
from polyak.core.checks import check_integer
from polyak.core.printing import format_number
from polyak.core.types import Env, HostEnv, Rollout
from polyak.data.collection import from_rollout, join_episodes
from polyak.data.content import check_no_masks
from polyak.data.data_set import DataSet
from polyak.data.loading import MINARI, check_new, save
from polyak.envs.gymnasium import GymnasiumEnv
from polyak.envs.rendered_env import make_rendered
from polyak.envs.source import EnvSource
from polyak.runs import check_seed
from polyak.train.devices import count_devices
from polyak.train.evaluation import close_envs
from polyak.videos.controls import Controls, KeyMap, named_keys
from polyak.videos.demonstrate import RESERVED, Pace, demonstrate
from polyak.videos.encoder import VideoError
from polyak.videos.play import DrawnEnv, Frame, check_images, drawn_env
from polyak.videos.record import check_fps
from polyak.videos.window import Window, check_window, open_window

OWNER = "polyak record"
ADVICE = "record a Python policy with polyak.data.collect"
KeysFlag: TypeAlias = Annotated[
    tuple[str, ...], default_hint("the environment's, else digits or arrows", "KEY=ACTION [KEY=ACTION ...]")
]
ENV_GROUP = tyro.conf.arg(name="user-defined environment")


@dataclasses.dataclass(frozen=True)
class RecordFlags:
    """The episodes, and the keys."""

    env_flags: Annotated[EnvFlags, ENV_GROUP]

    episodes: int = 10
    """number of complete episodes"""
    keys: KeysFlag = ()
    (
        "actions by keys, in the environment's units: `left=0 right=1 left+space=2`, of a Box `left=-1,0 up=0,1`; on a gamepad "
        "`button0=1`, and for the directions of sticks `axis0min=-1,0 axis0max=1,0`"
    )
    noop: Annotated[str | None, default_hint("the first action, or zeros of a Box", "ACTION")] = None
    """action while no key is pressed; `--noop=-1,0` begins with a minus"""
    wait: bool = False
    """step only while a key is pressed, for environments without a clock, such as board games"""
    seed: int = 0
    """seed of the first episode, which each further one counts up"""
    fps: Annotated[float | None, default_hint("the environment's real speed", "FLOAT")] = None
    """steps per second"""
    show: tuple[Literal["step", "reward", "return"], ...] = ("return",)
    """numbers below the images"""
    max_steps: Annotated[int | None, default_hint("none", "INT")] = None
    """steps after which an episode is cut short, for environments that do not end"""


def record(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    try:
        env_id, output, flags = _parse(arguments)
        keys = _keys(flags.keys)
        noop = None if flags.noop is None else _numbers("--noop", flags.noop)
        check_integer(OWNER, "--episodes", flags.episodes)
        check_integer(OWNER, "--max-steps", flags.max_steps, optional=True)
        check_seed(OWNER, "--seed", flags.seed)
        check_fps(OWNER, flags.fps)
        for path in dict.fromkeys((output, _file_of(output))):
            check_new(OWNER, path, None)
        check_window(OWNER, ADVICE)
        count_devices()  # Raises if JAX does not start.
        target, kwargs = env_maker(flags.env_flags, env_id)
        env = make_rendered(EnvSource(target, {"env_kwargs": kwargs}))
        try:
            return _record(env, output, keys, noop, flags)
        finally:
            close_envs(env)
    except (UsageError, TypeError, ValueError, ImportError, RuntimeError, OSError, VideoError) as error:
        return fail(error)


def _parse(arguments: Sequence[str]) -> tuple[str, str, RecordFlags]:
    words = list(takewhile(lambda word: not word.startswith("-"), arguments))
    flags = arguments[len(words) :]
    if {"-h", "--help"} & set(flags):
        words = ["ENV", "DATA"]
    is_own = any(flag.partition("=")[0] == "--env" for flag in flags)
    words = ["", *words] if is_own and len(words) == 1 else words
    if len(words) != 2:
        raise UsageError(f"polyak record takes ENV and DATA, or DATA and --env MODULE:NAME; got {' '.join(words) or 'neither'}")
    description = (
        "Record what you do in ENV, in a window, as a data set: DATA is a file that ends with .npz, or minari:NAME. An episode "
        "starts with the first key; Return ends it, Backspace discards it, Escape stops. `polyak train bc --data DATA` learns "
        "from it."
    )
    return words[0], words[1], parse(RecordFlags, flags, prog="polyak record ENV DATA", description=description)


def _keys(words: Sequence[str]) -> KeyMap | None:
    """Read `left=0 left+space=2`; None without a word."""
    keys: dict[tuple[str, ...], Any] = {}
    for word in words:
        names, _, action = word.rpartition("=")
        pressed = tuple(sorted(names.lower().split("+")))
        if not all(pressed) or pressed in keys:
            raise UsageError(f"--keys takes KEY=ACTION, each key once, such as left=0 or left+space=2, got {word!r}")
        keys[pressed] = _numbers("--keys", action)
    return keys or None


def _numbers(flag: str, text: str) -> Any:
    """Read `2` or `-1,0.5`.

    Raises:
        UsageError: it is no number, or no finite one.
    """
    try:
        numbers = np.array([float(part) for part in text.split(",")])
    except ValueError:
        numbers = np.array([np.nan])
    if not np.isfinite(numbers).all():
        raise UsageError(f"{flag}: an action is a number or several, such as 2 or -1,0.5, got {text!r}")
    return numbers


def _record(env: Env | HostEnv, output: str, keys: KeyMap | None, noop: Any, flags: RecordFlags) -> int:
    check_images(OWNER, env)
    drawn = drawn_env(OWNER, env, jax.random.key(0))
    check_no_masks(OWNER, env.spec)
    check_new(OWNER, output, env.spec)
    recording = _Recording(output, env)
    failure = None
    with handle_signals(consequence="the running episode is lost") as signals:
        with open_window(OWNER, env.spec.id, ADVICE) as window:
            pygame = window.pygame
            if keys is None and isinstance(env, GymnasiumEnv) and (own := env.keys_to_action()) is not None:
                keys = named_keys(pygame, own, RESERVED)
            controls = Controls(OWNER, pygame, env.spec, keys, noop, RESERVED)
            print(_help(controls), flush=True)
            if recording.file != output:
                print(f"until {output} is written, at the end, complete episodes are kept in {recording.file}", flush=True)
            try:
                for episode in _episodes(drawn, window, controls, flags, signals):
                    recording.add(episode)
            except Exception as error:  # An environment may raise any exception.
                failure = error
        try:
            recording.finish()
        except Exception as error:
            failure = failure or error
    data = recording.saved
    if data is not None:
        _print_result(data, recording.saved_as)
    if failure is not None:
        print_user_traceback(failure)
        return fail(f"{type(failure).__name__}: {failure}", 1)
    if data is None:
        return fail("no episode is complete; nothing was written", signals.exit_code or 1)
    return signals.exit_code


def _file_of(output: str) -> str:
    """The file `.npz` that has the episodes until the end: the output itself, or one named like Minari's data set."""
    return f"{output.removeprefix(MINARI).replace('/', '-')}.npz" if output.startswith(MINARI) else output


class _Recording:
    """The complete episodes, which are written at the end, and meanwhile to a file `.npz`, for a process that is killed.

    A write takes all episodes, so the next one waits for ten times its duration.
    """

    def __init__(self, output: str, env: Env | HostEnv) -> None:
        self.output = output
        self.file = self.saved_as = _file_of(output)
        self.env = env
        self.episodes: list[Rollout] = []
        self.saved: DataSet | None = None
        self.next_save = -math.inf

    def add(self, episode: Rollout) -> None:
        """Check one more episode, and write all if it is time.

        Raises:
            ValueError: the episode is invalid.
            OSError: the file cannot be written.
        """
        from_rollout(OWNER, episode, self.env)
        self.episodes.append(episode)
        if monotonic() >= self.next_save:
            self._save(self.file)

    def finish(self) -> None:
        """Write all episodes, if there are some that are not written yet; those of Minari take the place of the file.

        Raises:
            OSError: the file cannot be written.
        """
        if len(self.episodes) > (0 if self.saved is None else self.saved.num_episodes):
            try:
                self._save(self.file)
            except OSError:
                if self.file == self.output:
                    raise
        if self.episodes and self.file != self.output:
            self._save(self.output)
            Path(self.file).unlink(missing_ok=True)

    def _save(self, name: str) -> None:
        start = monotonic()
        data = from_rollout(OWNER, join_episodes(self.episodes), self.env)
        save(data, name)
        end = monotonic()
        self.saved, self.saved_as, self.next_save = data, name, end + 10 * (end - start)


def _print_result(data: DataSet, output: str) -> None:
    count = f"{data.num_episodes} episode{'s' if data.num_episodes > 1 else ''}"
    print(f"wrote {output}: {data.num_transitions:,} transitions in {count}; polyak train bc --data {output} learns from it")


def _episodes(env: DrawnEnv, window: Window, controls: Controls, flags: RecordFlags, signals: Signals) -> Any:
    def print_end(frame: Frame) -> None:
        print(f"episode {frame.episode + 1}: return {format_number(frame.total)}, {frame.step:,} steps", flush=True)

    return demonstrate(
        env,
        window,
        controls,
        episodes=flags.episodes,
        pace=Pace(flags.seed, flags.fps, flags.max_steps, flags.wait),
        show=flags.show,
        on_end=print_end,
        should_stop=signals.stop_requested,
    )


def _help(controls: Controls) -> str:
    """The keys and their actions."""
    keys = ", ".join(f"{'+'.join(names)}: {_text(action)}" for names, action in controls.keys.items())
    return f"keys  {keys}; none: {_text(controls.noop)}\nReturn ends an episode, Backspace discards it, Escape stops"


def _text(action: Any) -> str:
    return " ".join(f"{x:g}" for x in np.ravel(action))
