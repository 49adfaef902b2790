"""Imports modules that are named on the command line; a name in a file is never imported."""

import importlib
import os
import sys
from typing import Annotated, Any, TypeAlias

import tyro

from polyak.cli.flags import UsageError

ImportFlag: TypeAlias = Annotated[
    str | None, tyro.conf.arg(name="import", metavar="MODULE", help_behavior_hint="(default: none)")
]


def check_import(env: str, module: str | None) -> bool:
    """Check that `--import` names the module of the run's environment; returns whether it may be imported.

    Raises:
        UsageError: the environment needs a module that `--import` does not name, or `--import` names another one.
    """
    needed = env.rpartition(":")[0]
    if module is not None and module != needed:
        advice = f"needs --import {needed}" if needed else "needs none"
        raise UsageError(f"--import {module}: the run's environment is {env}, which {advice}")
    if module is None and needed and needed not in sys.modules:
        raise UsageError(f"the run's environment {env} would import {needed!r}; if you trust it, add --import {needed}")
    return module is not None


def find_modules_here() -> None:
    """Append the working directory to `sys.path`, so that no file in it replaces an installed module."""
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())


def find_env_module(env: str) -> None:
    """Let the module in the name of an environment, `module:Name-v0`, be found in the working directory too."""
    if ":" in env:
        find_modules_here()


def import_object(text: str, flag: str) -> Any:
    """Import `module:name`; modules are found in the working directory too.

    Raises:
        UsageError: the text is not `module:name`, or the module or the name does not exist.
    """
    module, colon, name = text.partition(":")
    if not (colon and module and name.isidentifier()):
        raise UsageError(f"{flag} must be module:name, got {text!r}")
    find_modules_here()
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise UsageError(f"{flag} {text}: {error}; is it in this directory or on PYTHONPATH?") from None
    if name not in vars(found):
        raise UsageError(f"{flag} {text}: the module {module} has no {name!r}")
    return vars(found)[name]
