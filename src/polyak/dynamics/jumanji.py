"""Jumanji environments as dynamics, with their action masks; terminal states have a discount of 0."""

import math
from typing import Any

import jax.numpy as jnp
import numpy as np

from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, MultiBinary, MultiDiscrete, Space
from polyak.dynamics.foreign import ForeignDynamics, ForeignState, explain_missing, raw_key
from polyak.dynamics.names import check_name, jumanji_names


def dynamics(name: str, settings: dict[str, Any]) -> ForeignDynamics:
    """The dynamics of a Jumanji environment, by name.

    Raises:
        ImportError: Jumanji is not installed.
        TypeError, ValueError: no such environment or setting, or its spaces or rewards are not supported.
    """
    with explain_missing("jumanji", "jumanji"):
        import jumanji
    check_name("jumanji", name, jumanji_names())
    return dynamics_of(jumanji.make(name, **settings), f"jumanji/{name}")


def dynamics_of(env: Any, id: str) -> ForeignDynamics:
    """The dynamics of an environment of `jumanji.make`.

    Its observation becomes a Dict by the names of its fields, without `action_mask`. Where that masks the joint choices of a
    MultiDiscrete action, such as the row and column of a board, the action becomes one Discrete of all of them.

    Raises:
        TypeError: the action is of another kind.
        ValueError: there is a reward for each of several agents, or the mask has another shape than the action.
    """
    if env.reward_spec.shape != ():
        raise ValueError(
            f"make: {id} must have one reward, got rewards of shape {env.reward_spec.shape}, one for each agent; wrap it with "
            "jumanji.wrappers.MultiToSingleWrapper"
        )
    parts = _parts(env.observation_spec)
    mask_spec = parts.pop("action_mask", None)
    obs_space = Dict({name: _space(part) for name, part in parts.items()}) if parts else _space(env.observation_spec)
    action_space = _space(env.action_spec)
    joint_shape = None
    if mask_spec is not None:
        if isinstance(action_space, MultiDiscrete) and mask_spec.shape == action_space.nvec:
            joint_shape, action_space = action_space.nvec, Discrete(math.prod(action_space.nvec))
        _check_mask(mask_spec.shape, action_space, id)

    def read(state: Any, time_step: Any) -> ForeignState:
        obs = {name: _tree(part, getattr(time_step.observation, name)) for name, part in parts.items()}
        if mask_spec is None:
            return ForeignState(state, obs if parts else time_step.observation)
        mask = time_step.observation.action_mask
        if joint_shape is not None:
            mask = mask.reshape(-1)
        # In a final state nothing may be allowed; no action is chosen there.
        return ForeignState(state, obs, (mask | ~mask.any(axis=-1, keepdims=True)).reshape(-1))

    def reset_one(key: Any) -> ForeignState:
        return read(*env.reset(raw_key(key)))

    def step_one(key: Any, state: Any, action: Any) -> tuple[ForeignState, Any, Any, Any]:
        if joint_shape is not None:
            action = jnp.stack(jnp.unravel_index(action, joint_shape))
        after, time_step = env.step(state, action.astype(env.action_spec.dtype))
        terminated = time_step.last() & (time_step.discount == 0)
        return read(after, time_step), time_step.reward, terminated, time_step.last() & ~terminated

    spec = EnvSpec(obs_space, action_space, id, has_action_mask=mask_spec is not None)
    return ForeignDynamics(env, None, spec, reset_one, step_one, has_costly_reset=True)


def _check_mask(shape: tuple[int, ...], space: Space, id: str) -> None:
    expected: tuple[int, ...] = ()
    if isinstance(space, Discrete):
        expected = (space.n,)
    if isinstance(space, MultiDiscrete) and len(set(space.nvec)) == 1:
        expected = (len(space.nvec), space.nvec[0])
    if math.prod(shape) != math.prod(expected) or not expected:
        raise ValueError(f"make: {id}: the action_mask of shape {shape} must be that of the action {space}")


def _parts(spec: Any) -> dict[str, Any]:
    """The named parts of a Jumanji spec; none of an array."""
    from jumanji import specs

    if isinstance(spec, specs.Array):
        return {}
    return {name: part for name, part in vars(spec).items() if isinstance(part, specs.Spec)}


def _tree(spec: Any, value: Any) -> Any:
    """Nested observations, which are named tuples and dataclasses, as dicts."""
    parts = _parts(spec)
    return {name: _tree(part, getattr(value, name)) for name, part in parts.items()} if parts else value


def _space(spec: Any) -> Space:
    from jumanji import specs

    parts = _parts(spec)
    if parts:
        return Dict({name: _space(part) for name, part in parts.items()})
    if isinstance(spec, specs.DiscreteArray):
        return Discrete(int(spec.num_values))
    if isinstance(spec, specs.MultiDiscreteArray) and len(spec.shape) == 1:
        return MultiDiscrete(tuple(int(n) for n in spec.num_values))
    if spec.dtype == bool:
        return MultiBinary(tuple(spec.shape))
    dtype = np.dtype(spec.dtype)
    limits = (-np.inf, np.inf) if dtype.kind == "f" else (np.iinfo(dtype).min, np.iinfo(dtype).max)
    bounds = (spec.minimum, spec.maximum) if isinstance(spec, specs.BoundedArray) else limits
    low, high = (np.broadcast_to(np.asarray(bound, dtype), spec.shape) for bound in bounds)
    return Box(low, high, dtype=dtype)
