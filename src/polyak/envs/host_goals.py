"""Rewards and ends of episodes as functions of goals, of Gymnasium environments."""

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt

from polyak.core.goals import ACHIEVED, DESIRED, FLAGS, Goals, Outcomes
from polyak.core.python_call import call_python
from polyak.core.spaces import Dict, EnvSpec, unflatten
from polyak.core.types import PyTree
from polyak.core.warn import warn
from polyak.envs.obs_reader import obs_leaves

PROBES = 6


class _Function(NamedTuple):
    """A function of an environment: `compute(achieved, desired, info)`, and True if it takes batches."""

    name: str
    compute: Callable[..., Any]
    is_vectorized: bool


class HostGoals(Goals):
    """The functions of goals of a Gymnasium environment, called from compiled programs, with a batch at a time.

    `check` compares a call with a batch with single calls. A function that does not take batches is called once for each goal,
    with a warning. `info` is always empty.

    Args:
        spec: the environment's spec.
        space: the environment's observation space.
        find_env: returns an environment with the functions; called by `check`.
    """

    is_python = True

    def __init__(self, spec: EnvSpec, space: Any, find_env: Callable[[], Any]) -> None:
        assert isinstance(spec.obs, Dict), "only environments with goals have these"
        self._id, self._find_env = spec.id, find_env
        self._spaces = {name: space[name] for name in (ACHIEVED, DESIRED)}
        self._specs = {name: EnvSpec(spec.obs.spaces[name], spec.action) for name in (ACHIEVED, DESIRED)}

    def __reduce__(self) -> tuple[type, tuple[()]]:
        # Other processes have environments of their own.
        return type(None), ()

    def check(self) -> None:
        """Find the functions, and check how they are called; see `Goals.check`."""
        _ = self._functions

    def outcomes(self, achieved: PyTree, desired: PyTree) -> Outcomes:
        """The results of the functions; see `Goals.outcomes`."""
        size = len(jax.tree.leaves(achieved)[0])
        names = [function.name for function in self._functions]
        shapes = [jax.ShapeDtypeStruct((size,), bool if name in FLAGS else jnp.float32) for name in names]
        leaves, structure = jax.tree.flatten((achieved, desired))

        def call(*arrays: Any, compiled: bool) -> list[Any]:
            return self._compute(*jax.tree.unflatten(structure, arrays))

        results = call_python(f"{self._id}: compute_reward", call, shapes, [jnp.asarray(leaf) for leaf in leaves])
        by_name = dict(zip(names, results, strict=True))
        return Outcomes(by_name["compute_reward"], *(by_name.get(name) for name in FLAGS))

    @functools.cached_property
    def _functions(self) -> list[_Function]:
        env = self._find_env()
        reward = _find(env, "compute_reward")
        if reward is None:
            raise ValueError(
                f"{self._id}: HindsightReplay needs a compute_reward(achieved_goal, desired_goal, info) of the "
                "environment, which has none"
            )
        flags = {name: _find(env, name) for name in FLAGS}
        goals = [self._sample_goals(name) for name in (ACHIEVED, DESIRED)]
        # A function that does not read goals, as in Gymnasium-Robotics, is the same for all goals.
        decided = {
            name: function
            for name, function in flags.items()
            if function is not None and not (_ignores_goals(function) and self._is_constant(name, function, *goals))
        }
        return [self._probe(name, function, *goals) for name, function in {"compute_reward": reward, **decided}.items()]

    def _sample_goals(self, name: str) -> PyTree:
        """Goals to try the functions with; every other pair of achieved and desired goals is equal."""
        space = copy.deepcopy(self._spaces[DESIRED])  # its random numbers are the environment's
        space.seed(0)
        samples = [space.sample() for _ in range(PROBES)]
        order = range(PROBES) if name == ACHIEVED else [i + i % 2 * (1 if i + 1 < PROBES else -1) for i in range(PROBES)]
        return jax.tree.map(lambda *x: np.stack(x), *[samples[i] for i in order])

    def _is_constant(self, name: str, function: Callable[..., Any], achieved: PyTree, desired: PyTree) -> bool:
        return len(set(self._call_one_by_one(name, function, achieved, desired).tolist())) == 1

    def _probe(self, name: str, function: Callable[..., Any], achieved: PyTree, desired: PyTree) -> _Function:
        """Compare a call with a batch with single calls.

        Raises:
            ValueError: a single call fails, or returns no number.
        """
        singles = self._call_one_by_one(name, function, achieved, desired)
        try:
            batch = np.asarray(function(achieved, desired, {}))
            is_vectorized = batch.shape == singles.shape and bool(np.allclose(batch, singles))
            got = f"returned an array of shape {batch.shape}" if batch.shape != singles.shape else "returned other numbers"
        except Exception as error:
            is_vectorized, got = False, f"raised {type(error).__name__}: {error}"
        if not is_vectorized:
            warn(
                f"{self._id}: {name} is called once for each goal, which is slow: with {PROBES} goals it {got:.200}; "
                "compute over the last axis, such as np.linalg.norm(achieved_goal - desired_goal, axis=-1)"
            )
        return _Function(name, function, is_vectorized)

    def _call_one_by_one(self, name: str, function: Callable[..., Any], achieved: PyTree, desired: PyTree) -> npt.NDArray[Any]:
        results = []
        for i in range(len(jax.tree.leaves(achieved)[0])):
            goals = [jax.tree.map(lambda x, i=i: x[i], goal) for goal in (achieved, desired)]
            try:
                result = np.asarray(function(*goals, {}))
            except Exception as error:
                advice = "; an info that steps return is not stored" if isinstance(error, KeyError | AttributeError) else ""
                raise ValueError(
                    f"{self._id}: {name}(achieved_goal, desired_goal, info) must take any goals and an empty info, it raised "
                    f"{type(error).__name__}: {error}{advice}"
                ) from error
            if result.size != 1 or result.dtype.kind not in "fiub":
                raise ValueError(f"{self._id}: {name} must return one number, got {result!r:.80}")
            results.append(result.item())
        return np.array(results)

    def _compute(self, achieved: PyTree, desired: PyTree) -> list[npt.NDArray[Any]]:
        goals = [self._native(name, goal) for name, goal in ((ACHIEVED, achieved), (DESIRED, desired))]
        size = len(jax.tree.leaves(achieved)[0])
        results = []
        for name, function, is_vectorized in self._functions:
            result = np.asarray(function(*goals, {})) if is_vectorized else self._call_one_by_one(name, function, *goals)
            if result.shape != (size,):
                raise ValueError(f"{self._id}: {name} must return an array of shape ({size},), got {result.shape}")
            results.append(result.astype(bool if name in FLAGS else np.float32))
        return results

    def _native(self, name: str, goal: PyTree) -> PyTree:
        """Goals in the environment's dtypes, with integers from the `start` of their space."""
        spec, leaves = self._specs[name], obs_leaves(self._spaces[name])
        arrays = jax.tree.leaves(spec.native_obs(jax.tree.map(np.asarray, goal)))
        return unflatten(spec.obs, [np.asarray(x, leaf.dtype) for x, leaf in zip(arrays, leaves, strict=True)])


def _find(env: Any, name: str) -> Any:
    """A method of an environment or of the outermost wrapper that has it; None if there is none."""
    layer = env
    while layer is not None:
        found = getattr(layer, name, None)
        if callable(found):
            return found
        layer = vars(layer).get("env")
    return None


def _ignores_goals(function: Callable[..., Any]) -> bool:
    """Return True if a function returns a flag for things that are no goals; `np.array_equal` does so too."""
    try:
        return isinstance(function(object(), object(), {}), bool | np.bool_)
    except Exception:
        return False
