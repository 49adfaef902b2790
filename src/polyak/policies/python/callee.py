"""The Python half of a PythonPolicy: how it is called, with which inputs, and how its outputs are checked."""

import inspect
import operator
import weakref
from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
import numpy.typing as npt
from jax.extend.core import get_opaque_trace_state

from polyak.core.policy_faults import PythonCalls
from polyak.core.space_check import ArraySpec, action_specs, obs_specs
from polyak.core.spaces import EnvSpec, unflatten
from polyak.core.types import PolicyStep, PyTree, TimeStep
from polyak.core.warn import add_note
from polyak.ops.distributions import parameter_shapes
from polyak.policies.python.timeout import TimeLimitedCaller
from polyak.policies.python.validation import OutputChecker, describe_masked_actions, initial_carry_values, specs_like

# Copied in less than a microsecond.
COPIED_BYTES = 4096

_NOT_TRACING = get_opaque_trace_state()


@runtime_checkable
class ActingObject(Protocol):
    """A Python policy with a recurrent state: its methods take NumPy arrays, of a batch or (unbatched) of one environment."""

    def initial_state(self, batch_size: int) -> PyTree:
        """The carry at the start of `batch_size` episodes; unbatched: no argument, and the carry of one episode."""
        ...

    def action(self, time_step: TimeStep, carry: PyTree, seed: Any) -> PolicyStep:
        """An action, the next carry, and info; `seed` may be left out."""
        ...


@runtime_checkable
class ObjectWithDistribution(Protocol):
    """A Python policy that knows its distribution."""

    def distribution(self, time_step: TimeStep, carry: PyTree) -> tuple[PyTree, PyTree]:
        """`(parameters, carry)`, the parameters in the tree of `polyak.ops.distributions.parameter_shapes`."""
        ...


class CalleeRef:
    """A weak reference to the Python half of a policy: JAX's caches of programs hold it, and may not keep the policy alive.

    Two are equal if they are the same. A policy that is made while JAX traces lives as long as the program.
    """

    def __init__(self, callee: "PythonCallee") -> None:
        self.name = callee.calls.name
        self._weak = weakref.ref(callee)
        self._kept = callee if get_opaque_trace_state() != _NOT_TRACING else None

    def __call__(self) -> "PythonCallee":
        """The callee.

        Raises:
            ReferenceError: the policy is no longer there.
        """
        callee = self._weak()
        if callee is None:
            raise ReferenceError(f"{self.name} was garbage collected; keep a reference to the policy while its programs run")
        return callee

    def __repr__(self) -> str:
        return self.name


class PythonCallee:
    """The static half of a PythonPolicy, compared by identity.

    Attributes:
        spec: the spaces.
        calls: counts and errors.
        takes_time_step: the callee takes time step and carry, not only the observation.
        takes_seed: the callee takes a seed.
        batched: the callee takes a batch.
        has_distribution: the callee has a method `distribution`.
        actions, carries, infos, parameters: checks of the callee's outputs.
    """

    def __init__(
        self,
        target: Any,
        spec: EnvSpec,
        *,
        batched: bool,
        carry_spec: PyTree,
        info_spec: PyTree,
        name: str,
        timeout: float | None,
        on_error: str,
        check: bool,
        deterministic: bool,
    ) -> None:
        policy = f"PythonPolicy {name!r}"
        if isinstance(target, type):
            raise TypeError(f"{policy}: give an instance, not the class {target.__name__}")
        self.spec, self.batched, self.target = spec, batched, target
        self.is_object = isinstance(target, ActingObject)
        self.has_distribution = isinstance(target, ObjectWithDistribution)
        self.takes_time_step, self.takes_seed, self._seed_by_name = _signature(target, self.is_object, policy)
        if not self.takes_time_step and jax.tree.leaves((carry_spec, info_spec)):
            raise ValueError(f"{policy}: carry_spec and info_spec are for a policy of (time_step, carry)")
        unseeded = f"{policy} takes no seed and is not declared deterministic"
        self.calls = PythonCalls(policy, None if self.takes_seed or deterministic else unseeded)
        self.actions = OutputChecker(
            policy, "action", unflatten(spec.action, action_specs(spec)), check=check, clip=on_error == "clip"
        )
        carry_specs = _read_declaration(policy, "carry_spec", carry_spec)
        self.carries = OutputChecker(policy, "carry", carry_specs, check=check)
        self.infos = OutputChecker(policy, "info", _read_declaration(policy, "info_spec", info_spec), check=check)
        self.parameters = OutputChecker(policy, "distribution", parameter_specs(spec), check=check)
        self._input_carries = OutputChecker(policy, "the input carry", carry_specs, check=False)
        self._carry_spec, self._check = carry_spec, check
        self._obs: list[ArraySpec]
        self._obs_structure: Any
        self._obs, self._obs_structure = jax.tree.flatten(unflatten(spec.obs, obs_specs(spec.obs)))
        self._obs_is_leaf = self._obs_structure == jax.tree.structure(0)
        self._call = operator.call if timeout is None else TimeLimitedCaller(timeout, policy).call
        self.ref = CalleeRef(self)

    def __repr__(self) -> str:
        return self.calls.name

    def initial_state(self, batch_size: int) -> PyTree:
        """The initial carry of each environment: from the object's `initial_state`, called every time, else from `carry_spec`.

        Raises:
            TypeError, ValueError: the object's carry does not fit its `carry_spec`.
        """
        if not self.is_object:
            return initial_carry_values(self._carry_spec, batch_size)
        begin = self.target.initial_state
        if self.batched:
            return self.carries.batch(self._call(begin, batch_size), batch_size)
        return self.carries.stack([self.carries.row(self._call(begin), i) for i in range(batch_size)])

    def action_of_obs(self, target: Any, obs: PyTree, mask: PyTree, seed: Any) -> PyTree:
        """The action of a policy that takes only the observation, for a batch in NumPy."""
        obs = self._check_obs(obs)
        if self.batched:
            action = self.actions.batch(self._call_target(target, (obs,), seed), _length(obs))
        else:
            (action,) = self._check_parts(target, (obs,), _length(obs), seed, _single, (self.actions,))
        self._check_mask(action, mask)
        return action

    def step(self, target: Any, time_step: TimeStep, carry: PyTree, seed: Any) -> PolicyStep:
        """The step of a policy of time step and carry, for a batch in NumPy."""
        function, inputs = target.action if self.is_object else target, self._check_inputs(time_step, carry)
        checkers, size = (self.actions, self.carries, self.infos), len(inputs[0].first)
        step = PolicyStep(*self._check_parts(function, inputs, size, seed, self._parts_of_step, checkers))
        self._check_mask(step.action, time_step.action_mask)
        return step

    def distribution(self, target: Any, time_step: TimeStep, carry: PyTree) -> tuple[PyTree, PyTree]:
        """The parameters of its own distribution for a batch in NumPy, and the next carry."""
        inputs, checkers = self._check_inputs(time_step, carry), (self.parameters, self.carries)
        size = len(inputs[0].first)
        params, carry = self._check_parts(target.distribution, inputs, size, None, self._parts_of_pair, checkers)
        return params, carry

    def _parts_of_step(self, output: Any) -> tuple[Any, ...]:
        if not isinstance(output, PolicyStep):
            raise TypeError(f"{self.calls.name}: must return a PolicyStep(action, carry, info), got {type(output).__name__}")
        return output.action, output.carry, output.info

    def _parts_of_pair(self, output: Any) -> tuple[Any, ...]:
        if not isinstance(output, tuple) or len(output) != 2:
            raise TypeError(f"{self.calls.name}: distribution must return (parameters, carry), got {type(output).__name__}")
        return output

    def _check_mask(self, action: PyTree, mask: PyTree) -> None:
        if self._check and mask is not None and (where := describe_masked_actions(self.spec, action, mask)):
            raise ValueError(f"{self.calls.name}: action is not allowed by action_mask: {where}")

    def _check_parts(
        self,
        function: Callable[..., Any],
        inputs: tuple[Any, ...],
        size: int,
        seed: Any,
        parts_of: Callable[[Any], tuple[Any, ...]],
        checkers: tuple[OutputChecker, ...],
    ) -> list[PyTree]:
        """The parts of its output for a batch of that size, checked; stacked for an unbatched policy."""
        if self.batched:
            output = self._call_target(function, inputs, seed)
            return [checker.batch(part, size) for checker, part in zip(checkers, parts_of(output), strict=True)]

        def rows_for(i: int) -> list[Any]:
            try:
                output = self._call_target(function, _row(inputs, i), None if seed is None else seed[i])
            except BaseException as error:
                add_note(error, f"for environment {i}")
                raise
            # Copied at once, because the next call may fill the same arrays again.
            return [checker.row(part, i) for checker, part in zip(checkers, parts_of(output), strict=True)]

        columns = zip(*map(rows_for, range(size)), strict=True)
        return [checker.stack(rows) for checker, rows in zip(checkers, columns, strict=True)]

    def _call_target(self, function: Callable[..., Any], inputs: tuple[Any, ...], seed: Any) -> Any:
        if seed is None:
            return self._call(function, *inputs)
        return self._call(_by_name(function) if self._seed_by_name else function, *inputs, int(seed))

    def _check_obs(self, obs: PyTree) -> PyTree:
        """The observation as read-only arrays that fit the spec."""
        if not self._check:
            return jax.tree.map(_read_only, obs)
        if type(obs) is np.ndarray and self._obs_is_leaf:
            self._check_obs_leaf(self._obs[0], obs, len(obs))
            return _read_only(obs)
        leaves, structure = jax.tree.flatten(obs)
        if structure != self._obs_structure:
            raise ValueError(f"{self.calls.name}: obs must have the tree of {self.spec.obs}, got {structure}")
        for wanted, leaf in zip(self._obs, leaves, strict=True):
            self._check_obs_leaf(wanted, leaf, len(leaves[0]))
        return jax.tree.unflatten(structure, [_read_only(leaf) for leaf in leaves])

    def _check_obs_leaf(self, wanted: ArraySpec, obs: Any, batch_size: int) -> None:
        if obs.shape != (batch_size, *wanted.shape) or obs.dtype != wanted.dtype:
            path = f" at {wanted.path!r}" if wanted.path else ""
            rows = f"wanted {wanted.dtype} ({', '.join(map(str, (batch_size, *wanted.shape)))})"
            raise ValueError(f"{self.calls.name}: obs{path} is {obs.dtype} {obs.shape}, {rows}")

    def _check_inputs(self, time_step: TimeStep, carry: PyTree) -> tuple[TimeStep, PyTree]:
        """Time step and carry as read-only arrays; the carry is reset where an episode begins."""
        obs = self._check_obs(time_step.obs)
        rest: Any = {field: _read_only(getattr(time_step, field)) for field in ("reward", "terminated", "truncated", "first")}
        mask = jax.tree.map(_read_only, time_step.action_mask)
        lengths = {_length(obs), *map(len, jax.tree.leaves((rest, mask)))}
        if len(lengths) > 1:
            raise ValueError(f"{self.calls.name}: all parts of the time step must have one batch size, got {sorted(lengths)}")
        carry = self._input_carries.batch(carry, len(rest["first"]))
        if rest["first"].any():
            carry = _where_first(rest["first"], self.initial_state(len(rest["first"])), carry)
        return TimeStep(obs, **rest, action_mask=mask), jax.tree.map(_read_only, carry)


def _read_declaration(policy: str, setting: str, tree: PyTree) -> PyTree:
    try:
        return specs_like(tree)
    except TypeError as error:
        raise TypeError(f"{policy}: {setting} {error}") from None


def _single(output: Any) -> tuple[Any, ...]:
    return (output,)


def parameter_specs(spec: EnvSpec) -> PyTree:
    """The specs of the parameters of a distribution over the action space: float32, in the tree of `parameter_shapes`."""
    shapes = parameter_shapes(spec.action)
    return specs_like(jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, np.float32), shapes, is_leaf=_is_shape))


def _is_shape(node: Any) -> bool:
    return isinstance(node, tuple) and all(isinstance(length, int) for length in node)


def _by_name(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: function(*args[:-1], seed=args[-1])


def _row(inputs: tuple[Any, ...], i: int) -> tuple[Any, ...]:
    if len(inputs) == 1 and type(inputs[0]) is np.ndarray:
        return (inputs[0][i],)
    row: tuple[Any, ...] = jax.tree.map(lambda x: x[i], inputs)
    return row


def _length(tree: PyTree) -> int:
    return len(tree) if type(tree) is np.ndarray else len(jax.tree.leaves(tree)[0])


def _read_only(x: Any) -> npt.NDArray[Any]:
    """The array, read-only: a copy where that is cheap, else a view."""
    array = np.asarray(x)
    if array.flags.writeable:
        array = array.copy() if array.nbytes <= COPIED_BYTES else array.view()
        array.flags.writeable = False
    return array


def _where_first(first: npt.NDArray[np.bool_], fresh: PyTree, carry: PyTree) -> PyTree:
    return jax.tree.map(lambda new, old: np.where(first.reshape(-1, *[1] * (old.ndim - 1)), new, old), fresh, carry)


def _signature(target: Any, is_object: bool, policy: str) -> tuple[bool, bool, bool]:
    """Return three flags: the function takes the time step, takes a seed, and takes the seed by name.

    Raises:
        TypeError: the function can be called in none of the supported ways.
    """
    function = target.action if is_object else target
    ways = "(time_step, carry[, seed])" if is_object else "(obs[, seed]) or (time_step, carry[, seed])"
    if not callable(function):
        is_model = callable(getattr(target, "predict", None))
        hint = f"; pass its method, PythonPolicy({type(target).__name__.lower()}.predict, env.spec)" if is_model else ""
        expected = f"a function of {ways}, or an object with initial_state and action"
        raise TypeError(f"{policy}: the target must be {expected}, got {type(target).__name__}{hint}")
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise TypeError(f"{policy}: its signature cannot be read; wrap it, e.g. as lambda obs: policy(obs)") from None
    by_name = any(p.name == "seed" for p in parameters)
    positional = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    # A parameter with a default is the user's own setting, unless it is named carry.
    count = sum(p.default is p.empty or p.name == "carry" for p in positional)
    # A third parameter is the seed, whatever its name.
    count -= any(p.name == "seed" and p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    if count not in ((2, 3) if is_object else (1, 2, 3)) or (by_name and count == 3):
        raise TypeError(f"{policy}: must take {ways}, got {inspect.signature(function)}")
    return count > 1, by_name or count == 3, by_name
