"""The settings of training, declared once for `run`, `run_seeds`, `offline` and the command line."""

import functools
import inspect
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, ParamSpec, Protocol, TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from jaxtyping import PRNGKeyArray

from polyak.core.checks import check_choice, check_integer, check_key
from polyak.core.docstrings import attribute_texts, entries, with_inherited
from polyak.core.types import Agent, Callback, Env, HostEnv, State
from polyak.data.data_set import DataSet
from polyak.loops.agent_check import check_callbacks, check_should_stop
from polyak.loops.host_replay import ReplayOn
from polyak.loops.loop import LoopState, Target
from polyak.runs import MAX_EVALUATION_STEPS, check_seed
from polyak.tracking.names import NAMES, TrackerName, import_tracker
from polyak.train.result import Result
from polyak.train.worker_settings import Workers
from polyak.workers.learner_group import Learners

FIELDS = re.compile(r"^ {8}fields: .*$", re.MULTILINE)
"""The line of a docstring that is replaced by the texts of the fields."""

AnyEnv: TypeAlias = Env | HostEnv | str | Callable[[], Any]
"""An environment of `polyak.envs.make`, or the first argument of `make`."""

Data: TypeAlias = DataSet | str | os.PathLike[str] | Mapping[str, Any]
"""A data set, or the first argument of `polyak.data.load`."""

P = ParamSpec("P")
T = TypeVar("T")


def never() -> bool:
    """Return False: training goes on to its end."""
    return False


@dataclass(frozen=True, kw_only=True)
class CommonSettings:
    """Settings that `run`, `run_seeds` and `offline` share; the settings of each describe its intervals.

    Attributes:
        settings: fields of a named agent that replace the preset's values.
        run_dir: a new directory for config, metrics, TensorBoard, checkpoints and summary; None writes nothing.
        progress: show a progress bar in a terminal, plain lines elsewhere.
        eval_max_steps: maximum number of steps of each environment, after which an unfinished evaluation is skipped.
        track: tracker that logs settings, metrics, checkpoints and any videos: `"wandb"`, `"mlflow"` or `"trackio"`; needs
            `run_dir`. `"tensorboard"` requires the package whose files a run has anyway where it is installed.
        compilation_cache: keep compiled programs in the user's cache directory, which shortens later starts, unless JAX has a
            cache already; the environment variable `POLYAK_COMPILATION_CACHE=0` turns it off too.
        should_stop: called between iterations, and during evaluations, which True skips; True ends the training.
    """

    owner: ClassVar[str]  # the function that is called, for errors
    settings: Mapping[str, Any] | None = None
    run_dir: str | os.PathLike[str] | None = None
    progress: bool = True
    report_every: int | None = None
    checkpoint_every: int | None = None
    eval_every: int | None = None
    eval_max_steps: int = MAX_EVALUATION_STEPS
    track: TrackerName | None = None
    compilation_cache: bool = True
    should_stop: Callable[[], bool] = never

    def __post_init__(self) -> None:
        if self.run_dir is not None and not os.fspath(self.run_dir):
            raise ValueError(f"{self.owner}: run_dir must be a directory or None, got an empty name")
        if not isinstance(self.settings, Mapping | None):
            raise TypeError(f"{self.owner}: settings must be a dict or None, got {self.settings!r:.80}")
        check_should_stop(self.owner, self.should_stop)
        check_integer(self.owner, "eval_max_steps", self.eval_max_steps)
        if self.track is not None:
            check_choice(self.owner, "track", self.track, NAMES)
            import_tracker(self.track)
            if self.run_dir is None:
                raise ValueError(f"{self.owner}: track={self.track!r} needs run_dir, which keeps the tracker's name of the run")


@dataclass(frozen=True, kw_only=True)
class OfflineSettings(CommonSettings):
    """The keyword arguments of `offline`.

    Attributes:
        gradient_steps: total number of gradient steps.
        env: the environment for evaluation, as for `polyak.train.run`; None evaluates nothing.
        seed: seed of all randomness.
        report_every: gradient steps between reports; None is a hundredth of all, or less as for `polyak.train.run`.
        checkpoint_every: gradient steps between checkpoints; None is a tenth of all, at most 100,000.
        eval_every: gradient steps between evaluations of the greedy policy (`eval/mean_reward`); needs `env`.
        eval_episodes: number of episodes of each evaluation, and at the end; None is 10 with `env`, else 0.
        callbacks: called at every report; see `Callback`.
    """

    owner: ClassVar[str] = "train.offline"
    gradient_steps: int
    env: AnyEnv | None = None
    seed: int = 0
    eval_episodes: int | None = None
    callbacks: Sequence[Callback] = ()

    def __post_init__(self) -> None:
        check_integer(self.owner, "gradient_steps", self.gradient_steps)
        check_callbacks(self.owner, self.callbacks)
        check_seed(self.owner, "seed", self.seed)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class RunSettings(CommonSettings):
    """Settings that `run` and `run_seeds` share.

    Attributes:
        env_steps: total number of valid transitions, including transitions before a resume.
        num_envs: number of copies of a named environment; None is the preset's number.
        report_every: env_steps between reports; None is a hundredth of `env_steps`, or the least of `checkpoint_every`,
            `eval_every` and `video_every` if that is less.
        checkpoint_every: env_steps between checkpoints; None is a tenth of `env_steps`, at most 100,000.
        checkpoint_replay: False leaves the replay out of checkpoints; a resumed run fills the replay again, and is not exact.
        eval_every: env_steps between evaluations of the greedy policy (`eval/mean_reward`); the best is kept, also in `best/`.
        eval_env: environments for evaluation; None makes copies of the training environments.
        video_every: env_steps between videos of the greedy policy, in `RUN/videos`; needs `run_dir` and an environment with
            images. Training gives the same bits with videos and without.
        replay_on: memory of the agent's replay: `"device"`, the training device, or `"host"`.
    """

    env_steps: int
    num_envs: int | None = None
    checkpoint_replay: bool = True
    eval_env: Env | HostEnv | None = None
    video_every: int | None = None
    replay_on: ReplayOn = "device"

    def __post_init__(self) -> None:
        Target(self.env_steps, self.report_every)
        super().__post_init__()


@dataclass(frozen=True, kw_only=True)
class TrainSettings(RunSettings):
    """The keyword arguments of `run`.

    Attributes:
        key: source of all randomness; replaces `seed`, which means the key `jax.random.key(seed)`.
        seed: seed of all randomness; 0 if neither `seed` nor `key` is given.
        loop: `"compiled"` (one program), `"host"`, `"distributed"`, `"asynchronous"`, or `"auto"`, by agent and environment.
        eval_episodes: number of episodes of each evaluation, and at the end; None is 10 with `eval_every`, else 0.
        callbacks: called at every report; see `Callback`.
        workers: number of worker processes of the distributed and the asynchronous loop, or `Workers`.
        learners: number of processes over which the devices are split, or `Learners`; by default one device each.
        devices: number of devices; None is 2, if available, for 64 environments in JAX or images on the host, else 1.
        resume_from: `loop_state` of a result, with `env_steps_done`; an agent with the same networks, optimizer and replay, and
            as many environments. A host environment given by name or function begins new episodes; any other environment
            needs the loop of the result, and one on the host must not have been reset or stepped since.
        env_steps_done: env_steps at which the result of `resume_from` ended.
        data: a data set that stays beside the agent's replay, or the first argument of `polyak.data.load`; see `MixedReplay`.
        data_share: share of the data in each batch.
    """

    owner: ClassVar[str] = "train.run"
    key: PRNGKeyArray | None = None
    seed: int | None = None
    loop: Literal["auto", "compiled", "host", "distributed", "asynchronous"] = "auto"
    eval_episodes: int | None = None
    callbacks: Sequence[Callback] = ()
    workers: int | Workers | None = None
    learners: int | Learners | None = None
    devices: int | None = None
    resume_from: LoopState | None = None
    env_steps_done: int = 0
    data: Any = None
    data_share: float = 0.5

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.run_dir is not None and self.resume_from is not None:
            raise ValueError("train.run: run_dir must be None with resume_from; polyak.resume continues a run directory")
        if self.resume_from is None and self.env_steps_done != 0:
            raise ValueError(f"train.run: env_steps_done={self.env_steps_done!r:.80} needs resume_from")
        check_integer("train.run", "env_steps_done", self.env_steps_done, at_least=0)
        if self.env_steps < self.env_steps_done:
            raise ValueError(f"train.run: env_steps={self.env_steps:,}: resume_from has already done {self.env_steps_done:,}")
        if self.data is None and self.data_share != TrainSettings.data_share:
            raise ValueError(f"train.run: data_share={self.data_share} needs data")
        if self.data is not None and self.resume_from is not None:
            raise ValueError("train.run: data must be None with resume_from, whose state has the data")
        check_callbacks("train", self.callbacks)
        if self.key is not None and self.seed is not None:
            raise ValueError("train.run: pass key or seed, not both")
        if self.key is not None:
            check_key("train", self.key)
            return
        seed = 0 if self.seed is None else int(self.seed) if isinstance(self.seed, np.integer) else self.seed
        check_seed("train.run", "seed", seed)
        object.__setattr__(self, "seed", seed)


@dataclass(frozen=True, kw_only=True)
class SeedSettings(RunSettings):
    """The keyword arguments of `run_seeds`.

    Attributes:
        seeds: the seeds, or their number: 3 is `[0, 1, 2]`.
        run_dir: a new directory for the run directories `seed-0`, `seed-1`, ... of the seeds; None writes nothing.
        loop: `"compiled"`, in which the seeds train in parallel, `"host"`, or `"auto"`, by the environment.
        eval_episodes: number of episodes of each evaluation, and at the end; 0 for none.
        callbacks: function that returns the callbacks of a seed; seeds share no callbacks, as callbacks may have state. In the
            compiled loop, a callback that returns False stops all seeds.
    """

    owner: ClassVar[str] = "train.run_seeds"
    seeds: int | Sequence[int] | npt.NDArray[np.integer]
    loop: Literal["auto", "compiled", "host"] = "auto"
    eval_episodes: int = 100
    callbacks: Callable[[int], Sequence[Callback]] = lambda seed: ()


class Run(Protocol[P]):
    """`run` with the fields of its settings as keyword arguments."""

    def __call__(self, agent: Agent[State] | str, env: AnyEnv, *args: P.args, **fields: P.kwargs) -> Result[State]:
        """Train."""
        ...


class RunSeeds(Protocol[P]):
    """`run_seeds` with the fields of its settings as keyword arguments."""

    def __call__(self, agent: Agent[State] | str, env: AnyEnv, *args: P.args, **fields: P.kwargs) -> list[Result[State]]:
        """Train."""
        ...


class Offline(Protocol[P]):
    """`offline` with the fields of its settings as keyword arguments."""

    def __call__(self, agent: Agent[State] | str, data: Data, *args: P.args, **fields: P.kwargs) -> Result[State]:
        """Train."""
        ...


def settings_from(kind: Callable[..., T], source: Any, changes: Mapping[str, Any]) -> T:
    """Create settings of a class, with the values of other settings, or of flags, where names are the same, and changes."""
    names = inspect.signature(kind).parameters
    return kind(**{**{name: value for name, value in vars(source).items() if name in names}, **changes})


def runs_with(settings: Callable[P, T]) -> Callable[[Callable[[Any, Any, T], Any]], Run[P]]:
    """Give `run` the fields of its settings as keyword arguments."""
    return functools.partial(_with_fields, settings)


def runs_seeds_with(settings: Callable[P, T]) -> Callable[[Callable[[Any, Any, T], Any]], RunSeeds[P]]:
    """Give `run_seeds` the fields of its settings as keyword arguments."""
    return functools.partial(_with_fields, settings)


def runs_offline_with(settings: Callable[P, T]) -> Callable[[Callable[[Any, Any, T], Any]], Offline[P]]:
    """Give `offline` the fields of its settings as keyword arguments."""
    return functools.partial(_with_fields, settings)


def _with_fields(settings: Any, function: Callable[..., Any]) -> Any:
    signature = inspect.signature(function)
    *positional, _ = signature.parameters.values()
    # The required fields first, then the fields of the class itself.
    own = inspect.get_annotations(settings)
    fields = sorted(
        inspect.signature(settings).parameters.values(), key=lambda x: (x.default is not x.empty, x.name not in own)
    )

    @functools.wraps(function)
    def call(*args: Any, **arguments: Any) -> Any:
        named = {one.name: arguments.pop(one.name) for one in positional if one.name in arguments}
        return function(*args, **named, fields=settings(**arguments))

    call.__signature__ = signature.replace(parameters=[*positional, *fields])  # type: ignore[attr-defined]
    bases = [base.__doc__ for base in settings.__mro__[1:]]
    settings.__doc__ = with_inherited(settings.__doc__, bases, [field.name for field in fields])
    call.__doc__ = FIELDS.sub("\n".join(entries(attribute_texts(settings.__doc__))), function.__doc__ or "")
    return call
