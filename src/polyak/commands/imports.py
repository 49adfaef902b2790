"""Which module a run's environment may import: the one that a person names, none by a name in a file."""

import sys
from typing import Annotated, TypeAlias

import tyro

from polyak.commands.flags import UsageError

ImportFlag: TypeAlias = Annotated[
    str | None, tyro.conf.arg(name="import", metavar="MODULE", help_behavior_hint="(default: none)")
]


def check_import(env: str, module: str | None) -> bool:
    """Whether the run's environment may import its module, because `--import` names it.

    Raises:
        UsageError: it would import one that was not named, or the one named is not its own.
    """
    needed = env.rpartition(":")[0]
    if module is not None and module != needed:
        its_own = f"needs --import {needed}" if needed else "needs none"
        raise UsageError(f"--import {module}: the run's environment is {env}, which {its_own}")
    if module is None and needed and needed not in sys.modules:
        raise UsageError(f"the run's environment {env} would import {needed!r}; if you trust it, add --import {needed}")
    return module is not None
