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
    """

    def __init__(self, env: Any, attribute: str, randomization_fn: Callable[[Any, Array], tuple[Any, Any]] | None) -> None:
        self._env, self._attribute, self._randomize = env, attribute, randomization_fn

    def draw(self, key: Array) -> dict[int, Array]:
        """Draw the arrays of an episode, by their number in the flattened model; `key` is an array of integers."""
        if self._randomize is None:
            return {}
        models, in_axes = self._randomize(getattr(self._env, self._attribute), key[None])
        structure: Any = jax.tree.structure(models)
        pairs = zip(jax.tree.leaves(models), structure.flatten_up_to(in_axes), strict=True)
        return {i: leaf[0] for i, (leaf, axis) in enumerate(pairs) if axis is not None}

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
