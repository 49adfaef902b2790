"""What a command may import: what a person names on the command line, nothing by a name in a file."""

import importlib
import sys
from typing import Annotated, Any, TypeAlias

import tyro

from polyak.cli.flags import UsageError

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


def named_object(text: str, flag: str) -> Any:
    """What `module:name` says, imported as `python -m module` would find it.

    Raises:
        UsageError: it has another form, there is no such module, or nothing of that name in it.
    """
    module, colon, name = text.partition(":")
    if not (colon and module and name.isidentifier()):
        raise UsageError(f"{flag} must be module:name, got {text!r}")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(f"{flag} {text}: {error}; is it on PYTHONPATH? (PYTHONPATH=. is this directory)") from None
    if name not in vars(found):
        raise UsageError(f"{flag} {text}: the module {module} has no {name!r}")
    return vars(found)[name]
