"""Caches the last few compiled programs: another training run of an equal agent and environment compiles nothing."""

from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import lru_cache, wraps
from types import BuiltinFunctionType, FunctionType
from typing import Any, TypeVar

import jax
from jaxtyping import PRNGKeyArray

from polyak.core.types import Env, PyTree, TimeStep

T = TypeVar("T")


def cached_per_env(make: Callable[..., T]) -> Callable[..., T]:
    """Cache the results for the last 8 arguments, so that programs of equal environments and agents are compiled once.

    Nothing is cached for a mutable environment: frozen dataclasses are compared by their fields, while other objects compare
    equal to themselves even after an attribute has changed.
    """
    cached = lru_cache(maxsize=8)(make)

    @wraps(make)
    def make_cached(*arguments: Any) -> T:
        if any(isinstance(x, Env) and _is_mutable(x) for x in arguments):
            return make(*arguments)
        try:
            hash(arguments)
        except TypeError:  # an environment with arrays, or a mutable agent
            return make(*arguments)
        return cached(*arguments)

    return make_cached


def _is_mutable(x: Any) -> bool:
    """Return True if an object could change and still equal itself; recurses into dataclasses and tuples."""
    if x is None or isinstance(x, type | FunctionType | BuiltinFunctionType):
        return False
    children = list(x) if isinstance(x, tuple | frozenset) else []
    if is_dataclass(x):
        children = [getattr(x, field.name) for field in fields(x)]
        # A field that is not stored, the goals of a spec, is compared as a part of the replay that uses it.
        if not all(field.compare or not field.metadata.get("stored", True) for field in fields(x)):
            return True
    identity_hash: Any = object.__hash__
    return type(x).__hash__ is identity_hash or any(map(_is_mutable, children))


def shape_of(agent: Any, *others: Any) -> tuple[Any, ...]:
    """The tree structure, shapes and dtypes of the arguments, as a key for `cached_per_env`.

    If a setting of the agent (a user's network) is mutable, the key is unhashable, so that nothing is cached.
    """
    leaves, structure = jax.tree.flatten((agent, *others))
    return structure, tuple(jax.typeof(leaf) for leaf in leaves), [] if _is_mutable(agent) else None


@cached_per_env
def jitted_init(env: Env) -> Callable[[PRNGKeyArray], tuple[PyTree, TimeStep]]:
    """Return the jitted `env.init`."""
    return jax.jit(env.init)
