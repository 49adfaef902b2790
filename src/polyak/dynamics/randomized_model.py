"""Domain randomization: arrays of a physics model that differ between episodes, in the environment's state."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import jax
from jaxtyping import Array


class RandomizedModel:
    """The model of an environment of Brax or MuJoCo Playground, with arrays drawn for each episode.

    Args:
        env: the environment without wrappers.
        attribute: its attribute with the model.
        randomization_fn: `(model, keys) -> (models, in_axes)`, as in the trainings of these libraries: models for keys `[N]`,
            and the axes of `vmap` over them, a tree with 0 for arrays that differ and None for others; None draws nothing.

    Raises:
        TypeError: `randomization_fn` is not a function.
        ValueError: the environment has no model; from `draw`, for other axes, or if no array differs.
    """

    def __init__(self, env: Any, attribute: str, randomization_fn: Callable[[Any, Array], tuple[Any, Any]] | None) -> None:
        if randomization_fn is not None and not callable(randomization_fn):
            raise TypeError(f"make: randomization_fn must be a function (model, keys), got {randomization_fn!r}")
        if randomization_fn is not None and getattr(env, attribute, None) is None:
            raise ValueError(f"make: randomization_fn must be None for {type(env).__name__}, which has no physics")
        self._env, self._attribute, self._randomize = env, attribute, randomization_fn

    def draw(self, key: Array) -> dict[int, Array]:
        """Draw the arrays of an episode, by their number in the flattened model; `key` is an array of integers."""
        if self._randomize is None:
            return {}
        models, in_axes = self._randomize(getattr(self._env, self._attribute), key[None])
        structure: Any = jax.tree.structure(models)
        axes = structure.flatten_up_to(in_axes)
        if set(axes) not in ({0}, {0, None}):
            got = sorted(map(str, set(axes)))
            raise ValueError(f"make: in_axes of randomization_fn must be 0 for some arrays, None for others, got {got}")
        return {i: leaf[0] for i, (leaf, axis) in enumerate(zip(jax.tree.leaves(models), axes, strict=True)) if axis == 0}

    @contextlib.contextmanager
    def use(self, arrays: dict[int, Array]) -> Iterator[None]:
        """Let the environment compute with these arrays; for use while it is traced."""
        if not arrays:
            yield
            return
        model = getattr(self._env, self._attribute)
        leaves, structure = jax.tree.flatten(model)
        setattr(self._env, self._attribute, jax.tree.unflatten(structure, [arrays.get(i, x) for i, x in enumerate(leaves)]))
        try:
            yield
        finally:
            setattr(self._env, self._attribute, model)
