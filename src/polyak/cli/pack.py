"""polyak pack RUN -o FILE: a trained policy with settings, scores, curve, video and model card as one zip file."""

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from polyak.cli.flags import UsageError, fail, parse_for_run
from polyak.cli.imports import ImportFlag
from polyak.cli.user_code import config_with_agent
from polyak.cli.user_flags import UserGroupOfRun
from polyak.packs import pack as pack_run
from polyak.storage.checkpoint import CheckpointError
from polyak.storage.config import ConfigError
from polyak.storage.run_directory import RunError, open_run


@dataclasses.dataclass(frozen=True)
class PackFlags:
    """Policy and output file."""

    user: UserGroupOfRun

    output: Annotated[Path, tyro.conf.arg(metavar="FILE", aliases=["-o"])]
    """file to write, replaced if it exists; it ends in .zip"""
    best: bool = False
    """pack the policy with the best evaluation (--eval-every) in place of the newest"""
    imports: ImportFlag = None
    """with --agent: module of the run's environment if config.json names it as module:Name; it is then imported"""


def pack(arguments: list[str]) -> int:
    """Run the command; returns the exit code."""
    description = "Pack the greedy policy of RUN, with settings, scores, curve, newest video and a model card, into one file."
    try:
        directory, flags = parse_for_run(PackFlags, arguments, command="pack", description=description)
        config = config_with_agent(open_run(directory), flags.user, flags.imports)
        agent = None if flags.user.agent is None else config.agent
        path = pack_run(directory, flags.output, best=flags.best, agent=agent)
    except (UsageError, TypeError, ValueError, ImportError, RunError, ConfigError, CheckpointError) as error:
        return fail(error)
    loading = f"{str(path)!r}{'' if agent is None else ', agent=agent'}"
    print(f"wrote {path} ({path.stat().st_size:,} bytes); policy = polyak.load_policy({loading})")
    return 0
