"""Parsers for the values of flags, with errors that say what to write."""

import contextlib
import dataclasses
import math
import re
from types import UnionType
from typing import Any, Union, get_args, get_origin

import tyro
from tyro.constructors import (
    ConstructorRegistry,
    PrimitiveConstructorSpec,
    PrimitiveTypeInfo,
    UnsupportedTypeAnnotationError,
)

VALUE_RULES = ConstructorRegistry()
"""Rules for numbers, widths and optional values; use as a context manager."""


@VALUE_RULES.primitive_rule
def _number_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    if info.type not in (int, float):
        return None
    return PrimitiveConstructorSpec(
        nargs=1,
        metavar=info.type.__name__.upper(),
        instance_from_str=lambda words: _parse_number(info.type, words[0]),
        is_instance=lambda value: isinstance(value, int if info.type is int else int | float),
        str_from_instance=lambda value: [str(value)],
    )


def _parse_number(kind: type[int | float], word: str) -> int | float:
    try:
        return kind(word)
    except ValueError:
        value = parse_value(word)
        whole = f"; write {int(value)}" if isinstance(value, float) and value.is_integer() else ""
        expected = "an integer" if kind is int else "a number"
        raise ValueError(f"must be {expected}, got {word!r}{whole}") from None


@VALUE_RULES.primitive_rule
def _widths_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    if info.type != tuple[int, ...]:
        return None
    return PrimitiveConstructorSpec(
        nargs="*",
        metavar="INT [INT ...]",
        instance_from_str=_parse_widths,
        is_instance=lambda value: isinstance(value, tuple),
        str_from_instance=lambda value: [str(width) for width in value],
    )


def _parse_widths(words: list[str]) -> tuple[int, ...]:
    numbers = [part for word in words for part in re.split(r"[,\[\]()\s]+", word) if part]
    if numbers and numbers != words and all(map(str.isdecimal, numbers)):
        raise ValueError(f"must be integers with spaces between them, got {' '.join(words)!r}; write {' '.join(numbers)}")
    return tuple(int(_parse_number(int, word)) for word in words)


@VALUE_RULES.primitive_rule
def _optional_rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
    """Parse a type or the word None; flags with `DisallowNone`, for which None means not set, reject the word."""
    kinds = [kind for kind in get_args(info.type) if kind is not type(None)]
    if get_origin(info.type) not in (UnionType, Union) or len(kinds) != 1:
        return None
    spec = ConstructorRegistry.get_primitive_spec(PrimitiveTypeInfo.make(kinds[0], info.markers))
    if isinstance(spec, UnsupportedTypeAnnotationError):
        return None
    has_none = tyro.conf.DisallowNone not in info.markers

    def parse_optional(words: list[str]) -> Any:
        if not has_none:
            return spec.instance_from_str(words)
        if words == ["None"]:
            return None
        try:
            return spec.instance_from_str(words)
        except ValueError as error:
            raise ValueError(re.sub("^must be ", "must be None or ", str(error))) from None

    return dataclasses.replace(
        spec,
        metavar=f"{{None{',' if spec.metavar.startswith('{') else '}|'}{spec.metavar.lstrip('{')}"
        if has_none
        else spec.metavar,
        instance_from_str=parse_optional,
        is_instance=lambda value: value is None or spec.is_instance(value),
        str_from_instance=lambda value: ["None"] if value is None else spec.str_from_instance(value),
        choices=(*spec.choices, "None") if has_none and spec.choices else spec.choices,
    )


def parse_value(text: str) -> bool | int | float | str | None:
    """Parse a bool, a finite number or a text; None for an empty text, other numbers, and other spellings of True and False."""
    if text.title() in ("True", "False", ""):
        return text == "True" if text in ("True", "False") else None
    for kind in (int, float):
        with contextlib.suppress(ValueError):
            value = kind(text)
            return None if isinstance(value, float) and not math.isfinite(value) else value
    return text
