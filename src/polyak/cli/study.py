"""polyak study ALGO ENV: a search for better settings."""

import contextlib
import dataclasses
import signal
import textwrap
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Literal

import tyro

from polyak.agents import AGENTS
from polyak.cli.flags import UsageError, default_hint, fail, parse, print_note, print_usage
from polyak.cli.imports import find_env_module
from polyak.core.suggestions import unknown_name

USAGE = "polyak study ALGO ENV --trials N [flags]\npolyak study --list"


@tyro.conf.configure(tyro.conf.DisallowNone)
@dataclasses.dataclass(frozen=True)
class StudyFlags:
    """Options of a study."""

    trials: int
    """number of trials, including trials of earlier commands in the same directory"""
    space: Annotated[str, tyro.conf.arg(metavar="FILE|preset")] = "preset"
    """TOML file with the settings that vary; preset: the space of the algorithm, see polyak study --list"""
    seeds: int = 1
    """number of seeds of each trial; in environments in JAX they train in parallel as one program"""
    workers: int = 1
    """number of processes that train trials at the same time; the draws then depend on which trials end first"""
    directory: Annotated[Path | None, default_hint("studies/ALGO-ENV", "PATH")] = None
    """directory of the study; a study that was stopped is continued"""
    sampler: Literal["tpe", "cma-es"] = "tpe"
    """draw settings by TPE; or by CMA-ES, and settings without an order by TPE"""
    pruner: Literal["median", "hyperband", "none"] = "median"
    """stop a trial early whose best evaluation is below the median, or by Hyperband; none trains all to the end"""
    sampler_seed: int = 0
    """seed of the sampler"""
    env_steps: Annotated[int | None, default_hint("the preset's", "INT")] = None
    """environment steps of each training, which ends with a whole rollout"""
    num_envs: Annotated[int | None, default_hint("the preset's", "INT")] = None
    """number of copies of the environment"""
    evaluations: int = 10
    """number of evaluations of each training, after which its trial may be stopped"""
    eval_episodes: int = 20
    """number of episodes of each evaluation"""
    fresh_seeds: int = 5
    """number of other seeds with which the best settings and the preset's train at the end; 0 for none"""


def study(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    if arguments == ["--list"]:
        _list_spaces()
        return 0
    if not arguments or (arguments[0] in ("-h", "--help")):
        text = f"{USAGE}\n\nSearch for better settings. `polyak study ppo CartPole-v1 --help` shows every flag."
        return print_usage(text, arguments)
    words = arguments[: next((i for i, word in enumerate(arguments) if word.startswith("-")), len(arguments))]
    if len(words) != 2:
        given = " ".join(words) or "none"
        return fail(f"polyak study takes an algorithm and an environment, got {given}: polyak study ALGO ENV --trials N")
    algorithm, env_id = words[0].lower(), words[1]
    if algorithm not in AGENTS:
        return fail(unknown_name(words[0], AGENTS, "algorithm"))
    try:
        description = f"Search for better settings of {algorithm} in {env_id}; trial 0 has the preset's."
        flags = parse(StudyFlags, arguments[2:], prog=f"polyak study {algorithm} {env_id}", description=description)
    except UsageError as error:
        return fail(error)
    return _search(algorithm, env_id, flags)


def _search(algorithm: str, env_id: str, flags: StudyFlags) -> int:
    from polyak.storage.run_files import RunError
    from polyak.studies.study import study as run_study
    from polyak.studies.training import StudyStopped
    from polyak.train.compilation_cache import compilation_cache

    find_env_module(env_id)
    directory = flags.directory or Path("studies") / f"{algorithm}-{env_id.replace('/', '-').replace(':', '-')}"
    values = {field.name: getattr(flags, field.name) for field in dataclasses.fields(flags)}
    values |= {"directory": directory, "seed": values.pop("sampler_seed")}
    received: list[int] = []
    try:
        with _raise_on_sigterm(received), compilation_cache(True, None, print_note):
            result = run_study(algorithm, env_id, **values)
    except (ValueError, TypeError, ImportError, RunError) as error:
        return fail(error)
    except (OSError, StudyStopped) as error:
        return fail(error, 1)
    except KeyboardInterrupt:
        name = "SIGTERM" if received else "Ctrl-C"
        print(f"stopped by {name}; the same command continues the study in {directory}", flush=True)
        return 128 + (received[0] if received else signal.SIGINT)
    _print_result(algorithm, env_id, result)
    return 0


@contextlib.contextmanager
def _raise_on_sigterm(received: list[int]) -> Iterator[None]:
    """Raise KeyboardInterrupt on SIGTERM while the block runs, and note the signal: nothing is lost, as by a kill."""

    def handle(number: int, frame: FrameType | None) -> None:
        received.append(number)
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _list_spaces() -> None:
    from polyak.presets.spaces import SPACES
    from polyak.studies.space import read_space

    for algorithm in SPACES:
        texts = [f"{name} {dimension}" for name, dimension in read_space(algorithm, "preset").items()]
        print(textwrap.fill(", ".join(texts), 110, initial_indent=f"{algorithm:8} ", subsequent_indent=" " * 9))


def _print_result(algorithm: str, env_id: str, result: Any) -> None:
    from polyak.studies.journal import BEST, PAGE
    from polyak.studies.page import describe_worth, setting_text

    best, baseline = result.best, result.trials[0]
    print(f"\n{describe_worth(best, baseline)}")
    if best.settings:
        print(f"{'setting':20} {'best':24} importance")
    for name, value in best.settings.items():
        importance = result.importances.get(name)
        print(f"{name:20} {setting_text(value):24} {'' if importance is None else f'{importance:.2f}'}".rstrip())
    if (result.directory / PAGE).exists():
        print(f"report: {result.directory / PAGE}")
    else:
        print("report: study.html needs Bokeh: pip install 'polyak[report]'; the same command then writes it")
    print(f"train with it: polyak train {algorithm} {env_id} --preset {result.directory / BEST}")
