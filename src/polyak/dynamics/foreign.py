"""Environments of other JAX libraries, written for one copy, as batched dynamics."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, PRNGKeyArray

from polyak.core.printing import short_repr
from polyak.core.spaces import Box, Dict, EnvSpec, MultiBinary, Space, map_space
from polyak.core.struct import struct
from polyak.core.types import PyTree
from polyak.core.warn import add_note


@struct
class ForeignState:
    """The library's own state, its observation, and its action mask or None."""

    state: PyTree
    obs: PyTree
    action_mask: PyTree = None


@short_repr("spec")
class ForeignDynamics:
    """Dynamics (see `autoreset.Dynamics`) of an environment of another library.

    Args:
        env: the library's environment; loops reuse the programs of dynamics with equal environments and settings.
        settings: other values that its functions depend on.
        spec: spec of one environment.
        reset_one: `key -> ForeignState` of one environment.
        step_one: `(key, state, action) -> (ForeignState, reward, terminated, truncated)` of one environment.
        info_one: numbers that the library's state of one environment reports, by name; see `autoreset.ReportingDynamics`.
        render_one: the image of the library's state of one environment, or None if there are no images.
        render_fps: steps in a second of the environment's time; the default is for environments without a time.
        has_costly_reset: a reset costs more than a step; see `polyak.envs.make`.
    """

    def __init__(
        self,
        env: Any,
        settings: Any,
        spec: EnvSpec,
        reset_one: Callable[[PRNGKeyArray], ForeignState],
        step_one: Callable[[PRNGKeyArray, PyTree, PyTree], tuple[ForeignState, Any, Any, Any]],
        info_one: Callable[[PyTree], Mapping[str, Any]] = lambda state: {},
        render_one: Callable[[PyTree], Any] | None = None,
        render_fps: float = 10.0,
        *,
        has_costly_reset: bool = False,
    ) -> None:
        self.env, self.settings, self.spec = env, settings, spec
        self._reset_one, self._step_one, self._info_one = reset_one, step_one, info_one
        self._render_one = render_one
        self.render_fps, self.has_costly_reset = render_fps, has_costly_reset

    def __eq__(self, other: object) -> bool:
        mine = self.env, self.settings, self.spec
        return isinstance(other, ForeignDynamics) and mine == (other.env, other.settings, other.spec)

    def __hash__(self) -> int:
        return hash((self.env, self.spec.id))

    def reset(self, key: PRNGKeyArray, num_envs: int) -> ForeignState:
        """Initial states."""
        with own_promotion(self.spec.id):
            fresh = jax.vmap(self._reset_one)(jax.random.split(key, num_envs))
        # A weak type would change in the first step, which would compile twice.
        return self._cast_obs(jax.tree.map(lambda x: jax.lax.convert_element_type(x, x.dtype), fresh))

    def step(
        self, state: ForeignState, action: PyTree, key: PRNGKeyArray
    ) -> tuple[ForeignState, Float[Array, " B"], Bool[Array, " B"], Bool[Array, " B"]]:
        """Step every environment; see `Dynamics`."""
        num_envs = jax.tree.leaves(action)[0].shape[0]
        with own_promotion(self.spec.id):
            after, *rest = jax.vmap(self._step_one)(jax.random.split(key, num_envs), state.state, action)
        after = self._cast_obs(after)
        # The carry of a scan must keep its types, which some environments change.
        after = jax.tree.map(lambda new, old: new.astype(old.dtype), after, state)
        reward, terminated, truncated = (jnp.reshape(x, num_envs) for x in rest)
        return after, reward.astype(jnp.float32), terminated.astype(bool), truncated.astype(bool)

    def observe(self, state: ForeignState) -> PyTree:
        """The observation."""
        return state.obs

    def action_mask(self, state: ForeignState) -> PyTree:
        """The action mask, or None."""
        return state.action_mask

    def info(self, state: ForeignState) -> dict[str, Float[Array, " B"]]:
        """The numbers that the environments report, by name; arrays that they report are left out."""
        with own_promotion(self.spec.id):
            info = jax.vmap(self._info_one)(state.state)
        return {name: jnp.asarray(x, jnp.float32) for name, x in info.items() if x.ndim == 1}

    @property
    def render(self) -> Callable[[ForeignState], Any] | None:
        """The function that draws the state of one environment as an image `[H, W, 3]`; None without images."""
        draw = self._render_one
        return None if draw is None else lambda state: draw(state.state)

    def _cast_obs(self, state: ForeignState) -> ForeignState:
        obs = map_space(lambda leaf, x: x.astype(leaf.dtype), self.spec.obs, state.obs)
        return ForeignState(state.state, obs, state.action_mask)


@contextlib.contextmanager
def explain_missing(library: str, name: str) -> Iterator[None]:
    """Import a library whose environments begin with `library/`; the error of a missing one has the extra that installs it.

    Args:
        name: the library's own name.

    Raises:
        ImportError: the library, or one that it imports, is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        raise ImportError(f"{library} environments need {name}: pip install 'polyak[{library}]' ({error})") from error


@contextlib.contextmanager
def own_promotion(id: str) -> Iterator[None]:
    """Run a library under JAX's default promotion, on which it relies; a note marks errors of its code."""
    try:
        with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
            yield
    except Exception as error:
        add_note(error, f"{id}: raised in the code of {id.partition('/')[0]}")
        raise


def obs_space(example: Any) -> Space:
    """The space of observations like `example`, an array or a dict of arrays, bounded by the dtypes alone."""
    if not isinstance(example, jax.ShapeDtypeStruct):
        return Dict({key: obs_space(part) for key, part in example.items()})
    dtype = np.dtype(example.dtype)
    if dtype.kind == "b":
        return MultiBinary(example.shape)
    if dtype.kind in "iu":
        return Box(np.iinfo(dtype).min, np.iinfo(dtype).max, example.shape, dtype)
    return Box(-np.inf, np.inf, example.shape)


def raw_key(key: PRNGKeyArray) -> Array:
    """A key as an array of integers, for libraries that keep it in their state or read its shape."""
    return jax.random.bits(key, jax.eval_shape(jax.random.PRNGKey, 0).shape, jnp.uint32)
