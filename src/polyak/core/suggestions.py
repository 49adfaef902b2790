"""Names in messages: suggestions for unknown names, and escaped control characters."""

import difflib
import functools
import inspect
import json
from collections.abc import Callable, Iterable
from importlib import resources
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])
T = TypeVar("T")

CLASS_METHODS = {"load": "polyak.load_policy(path) for the policy, or polyak.resume(run_dir) to continue the training"}
"""Replacements of class methods of other libraries' models."""


@functools.cache
def libraries() -> dict[str, dict[str, dict[str, Any]]]:
    """The arguments of other libraries and their replacements in polyak, by library; the first library with a name counts.

    A replacement is `NAME of OWNER` or `NAME=CODE of OWNER`. `everywhere` holds for all agents; `by_field` for agents with a
    certain field, of which the last counts; `of_functions` for arguments of functions, if the replacement depends on the agent;
    `attributes` for attributes of agents, models and environments; `module` for names in the top-level module.
    """
    names: dict[str, Any] = json.loads((resources.files("polyak") / "other_libraries.json").read_text("utf-8"))
    return names


@functools.cache
def _names_elsewhere(kind: str) -> dict[str, str]:
    """The replacements of all `attributes` of other libraries, or of all names in a `module`."""
    return {name: instead for names in libraries().values() for name, instead in names.get(kind, {}).items()}


def find_replacement(name: str, known: tuple[str, ...], kind: str) -> tuple[str, str] | None:
    """The library that has an argument of this name, and the replacement in polyak; None for other names.

    For an agent the replacement depends on the agent's fields; an argument of a function may be meant for any agent.
    """
    for library, names in libraries().items():
        found = [
            replacements[name] for field, replacements in names["by_field"].items() if field in known and name in replacements
        ]
        if not found and name in names["everywhere"]:
            found = [names["everywhere"][name]]
        if not found and kind == "argument":
            everywhere = (*names["by_field"].values(), names["of_functions"])
            found = [replacements[name] for replacements in everywhere if name in replacements]
        if found:
            return library, found[-1]
    return None


def is_name_elsewhere(name: str) -> bool:
    """Return True if an agent of another library has an argument of this name."""
    return any(name in replacements for names in libraries().values() for replacements in names["by_field"].values())


def unknown_name(name: str, known: Iterable[str], kind: str, *, cutoff: float = 0.6) -> str:
    """An error for an unknown name: the name, its replacement or the nearest name, and the known names.

    Args:
        cutoff: smallest similarity of suggested names, between 0 and 1.

    >>> unknown_name("gama", ("gamma", "tau"), "field")
    "unknown field 'gama'; did you mean 'gamma'? (fields: gamma, tau)"
    >>> unknown_name("n_steps", ("num_steps",), "field")
    "unknown field 'n_steps' of Stable-Baselines3; use num_steps of the agent"
    """
    known, hint = tuple(known), ""
    if kind in ("field", "argument") and (found := find_replacement(name, known, kind)):
        library, replacement = found
        return f"unknown {kind} {name!r} of {library}; use {replacement}"
    # polyak has no counterpart of such an argument, so no similar name is meant.
    if kind != "field" or not is_name_elsewhere(name):
        lower = [other.lower() for other in known]
        near = difflib.get_close_matches(name.lower(), lower, n=1, cutoff=cutoff)
        # Else the only name of which it is a word: `mask` of `action_mask`.
        near = near or [other for other in lower if name.lower() in other.split("_")]
        hint = "".join(f"; did you mean {other!r}?" for other in known if near == [other.lower()])
    kinds = f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"
    return f"unknown {kind} {name!r}{hint} ({kinds}: {', '.join(known)})"


EXAMPLES = {"key": "jax.random.key(0)", "seed": "0"}
"""Values of arguments, for messages."""


def suggest_arguments(owner: str) -> Callable[[F], F]:
    """Wrap a function so that the error for an unknown, missing or positional argument shows how to call it."""

    def decorate(function: F) -> F:
        parameters = inspect.signature(function).parameters
        names = tuple(name for name in parameters if name != "self")
        by_position = [name for name, p in parameters.items() if p.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        required = [name for name, p in parameters.items() if p.default is inspect.Parameter.empty]

        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            try:
                return function(*args, **kwargs)
            except TypeError:
                for name in [name for name in kwargs if name not in names]:
                    agent = kwargs.get("agent", args[0] if args else None)
                    has_settings = "settings" in names and isinstance(agent, str)
                    # A field of the agent is more likely than an argument that is only similar.
                    message = unknown_name(name, names, "argument", cutoff=0.85 if has_settings else 0.6)
                    if has_settings and message.startswith(f"unknown argument {name!r} ("):
                        message += f"; a field of the agent goes into settings={{{name!r}: ...}}"
                    raise TypeError(f"{owner}: {message}") from None
                if len(args) > len(by_position):
                    first = " and ".join(name for name in by_position if name != "self")
                    got = f"got {args[len(by_position)]!r:.80} too"
                    raise TypeError(f"{owner}: only {first} can be passed without a name, {got}") from None
                for name in [name for name in required[len(args) :] if name not in kwargs]:
                    raise TypeError(f"{owner}: {name} is missing; pass {name}={EXAMPLES.get(name, '...')}") from None
                raise

        return checked  # type: ignore[return-value]

    return decorate


def suggest_attributes(cls: type[T]) -> type[T]:
    """Add errors to a class and its objects that name the replacements of other libraries' attributes."""

    def missing(self: Any, name: str) -> Any:
        message = f"{type(self).__name__!r} object has no attribute {name!r}"
        instead = _names_elsewhere("attributes").get(name)
        raise AttributeError(f"{message}; use {instead}" if instead else message, name=name, obj=self)

    if "__getattr__" not in vars(cls):
        cls.__getattr__ = missing  # type: ignore[attr-defined]
    for name in CLASS_METHODS.keys() - vars(cls).keys() - vars(cls).get("__annotations__", {}).keys():
        setattr(cls, name, MissingFromClass(name))
    return cls


class MissingFromClass:
    """An attribute that neither a class nor its objects have; the error names the replacement.

    A class's own `__getattr__` serves its objects only.
    """

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, obj: Any, owner: type) -> Any:
        raise AttributeError(
            f"{owner.__name__!r} has no attribute {self._name!r}; use {CLASS_METHODS[self._name]}", name=self._name, obj=obj
        )


def missing_from_module(module: str, name: str, known: Iterable[str]) -> str:
    """The sentence for a name that a module does not have.

    >>> missing_from_module("polyak", "make_vec_env", ("PPO",))
    "module 'polyak' has no attribute 'make_vec_env'; use polyak.envs.make(id, num_envs=...)"
    """
    instead = _names_elsewhere("module").get(name)
    if instead:
        return f"module {module!r} has no attribute {name!r}; use {instead}"
    return f"module {module!r} has no attribute {name!r}; it has {', '.join(known)}"


def escape_control(text: str) -> str:
    r"""`text` with control characters escaped, so that a name from a file cannot rewrite the user's terminal.

    >>> escape_control("run\x07")
    'run\\x07'
    """
    return "".join(c if c.isprintable() or c in "\n\t" else c.encode("unicode_escape").decode() for c in text)
