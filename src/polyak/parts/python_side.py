"""The Python half of a PythonPolicy: how it is asked, what it is shown, and what its answers are held against."""

import inspect
from collections.abc import Callable, Iterable
from typing import Any, Protocol, runtime_checkable

import jax
import numpy as np
import numpy.typing as npt

from polyak.core.python_calls import PythonCalls
from polyak.core.spaces import EnvSpec
from polyak.core.types import PolicyStep, PyTree, TimeStep
from polyak.ops.distributions import parameter_shapes
from polyak.parts.deadline import Deadline
from polyak.parts.python_answers import Answers, Wanted, first_values, wanted_actions, wanted_like, wanted_obs


@runtime_checkable
class ActingObject(Protocol):
    """A Python policy with a memory: its methods take NumPy arrays, of a batch or (unbatched) of one environment."""

    def initial_state(self, batch_size: int) -> PyTree:
        """The carry of so many fresh episodes; an unbatched one takes no argument, and gives one episode's."""
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


class PythonSide:
    """What of a PythonPolicy does not travel in a pytree; two are equal if they are the same.

    Attributes:
        spec: the spaces.
        calls: counts and errors.
        sees_all: it is given the whole time step and the carry, not the observation alone.
        takes_seed: it is given one.
        batched: it takes a batch.
        has_distribution: it offers one.
        actions, carries, infos, parameters: what its answers must look like.
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
        who = f"PythonPolicy {name!r}"
        self.spec, self.batched, self.target = spec, batched, target
        self.is_object = isinstance(target, ActingObject)
        self.has_distribution = isinstance(target, ObjectWithDistribution)
        self.sees_all, self.takes_seed, self._seed_by_name = _signature(target, self.is_object, who)
        if not self.sees_all and jax.tree.leaves((carry_spec, info_spec)):
            raise ValueError(f"{who}: carry_spec and info_spec are for a policy of (time_step, carry)")
        unseeded = f"{who} takes no seed and is not declared deterministic"
        self.calls = PythonCalls(who, None if self.takes_seed or deterministic else unseeded)
        self.actions = Answers(who, "action", wanted_actions(spec), check=check, clip=on_error == "clip")
        self.carries = Answers(who, "carry", wanted_like(carry_spec), check=check)
        self.infos = Answers(who, "info", wanted_like(info_spec), check=check)
        self.parameters = Answers(who, "distribution", wanted_parameters(spec), check=check)
        self._carries_given = Answers(who, "the carry that it is given", wanted_like(carry_spec), check=False)
        self._carry_spec, self._fresh = carry_spec, dict[int, PyTree]()
        self._obs = jax.tree.leaves(wanted_obs(spec)) if check else []
        self._call = _called if timeout is None else Deadline(timeout, who).call

    def __repr__(self) -> str:
        return self.calls.name

    def initial_state(self, batch_size: int) -> PyTree:
        """A row for each environment: the object's own, else what `carry_spec` says.

        Raises:
            TypeError, ValueError: the object's does not fit its `carry_spec`.
        """
        if batch_size not in self._fresh:
            self._fresh[batch_size] = self._begun(batch_size)
        return self._fresh[batch_size]

    def _begun(self, batch_size: int) -> PyTree:
        if not self.is_object:
            return first_values(self._carry_spec, batch_size)
        if self.batched:
            return self.carries.batch(self.target.initial_state(batch_size), batch_size)
        return self.carries.stacked([self.target.initial_state() for _ in range(batch_size)])

    def action_of_obs(self, target: Any, obs: PyTree, seed: Any) -> PyTree:
        """The action of a policy that sees the observation alone, for a batch in NumPy."""
        shown = self._shown(obs)
        answers = self._asked(target, (shown,), seed)
        return self.actions.batch(answers, _length(obs)) if self.batched else self.actions.stacked(answers)

    def step(self, target: Any, time_step: TimeStep, carry: PyTree, seed: Any) -> PolicyStep:
        """The answer of one that sees everything, for a batch in NumPy."""
        time_step, carry = self._all_shown(time_step, carry)
        answers = self._asked(target.action if self.is_object else target, (time_step, carry), seed)
        steps = [answers] if self.batched else answers
        for answer in steps:
            if not isinstance(answer, PolicyStep):
                kind = type(answer).__name__
                raise TypeError(f"{self.calls.name}: answered a {kind}, wanted a PolicyStep(action, carry, info)")
        parts = zip(*((answer.action, answer.carry, answer.info) for answer in steps), strict=True)
        return PolicyStep(*self._held((self.actions, self.carries, self.infos), parts, _length(time_step.obs)))

    def distribution(self, target: Any, time_step: TimeStep, carry: PyTree) -> tuple[PyTree, PyTree]:
        """The parameters of its own distribution for a batch in NumPy, and the next carry."""
        time_step, carry = self._all_shown(time_step, carry)
        answers = self._asked(target.distribution, (time_step, carry), None)
        pairs = [answers] if self.batched else answers
        for pair in pairs:
            if not isinstance(pair, tuple) or len(pair) != 2:
                raise TypeError(f"{self.calls.name}: distribution answered {type(pair).__name__}, wanted (parameters, carry)")
        params, carry = self._held((self.parameters, self.carries), zip(*pairs, strict=True), _length(time_step.obs))
        return params, carry

    def _held(self, against: tuple[Answers, ...], parts: Iterable[Any], batch_size: int) -> list[PyTree]:
        """The parts of an answer, each a sequence of one batch or of single rows, after the checks."""
        pairs = zip(against, parts, strict=True)
        if self.batched:
            return [answers.batch(part[0], batch_size) for answers, part in pairs]
        return [answers.stacked(part) for answers, part in pairs]

    def _asked(self, function: Callable[..., Any], given: tuple[Any, ...], seed: Any) -> Any:
        """One answer, or of an unbatched policy a list of one for each environment."""
        if seed is not None and self._seed_by_name:
            function = _by_name(function)
        if self.batched:
            return self._call(function, *given, *(() if seed is None else (int(seed),)))
        return [self._asked_for(i, function, given, seed) for i in range(_length(given))]

    def _asked_for(self, i: int, function: Callable[..., Any], given: tuple[Any, ...], seed: Any) -> Any:
        row = _row(given, i) if seed is None else (*_row(given, i), int(seed[i]))
        try:
            return self._call(function, *row)
        except BaseException as error:
            error.add_note(f"for environment {i}")
            raise

    def _shown(self, obs: PyTree) -> PyTree:
        """The observation, which must fit the spec, as arrays that cannot be written to."""
        if type(obs) is np.ndarray and len(self._obs) == 1:
            self._check_obs(self._obs[0], obs)
            return _read_only(obs)
        leaves, structure = jax.tree.flatten(obs)
        if self._obs and len(leaves) != len(self._obs):
            raise ValueError(f"{self.calls.name}: obs has {len(leaves)} arrays, wanted {len(self._obs)}, as {self.spec.obs}")
        for wanted, leaf in zip(self._obs, leaves, strict=False):
            self._check_obs(wanted, leaf)
        return jax.tree.unflatten(structure, [_read_only(leaf) for leaf in leaves])

    def _check_obs(self, wanted: Wanted, obs: Any) -> None:
        if obs.shape[1:] != wanted.shape or obs.dtype != wanted.dtype:
            path = f" at {wanted.path!r}" if wanted.path else ""
            rows = f"wanted {wanted.dtype} (N, {', '.join(map(str, wanted.shape))})"
            raise ValueError(f"{self.calls.name}: obs{path} is {obs.dtype} {obs.shape}, {rows}")

    def _all_shown(self, time_step: TimeStep, carry: PyTree) -> tuple[TimeStep, PyTree]:
        """What a policy is given that sees everything; the carry is reset where an episode begins."""
        obs = self._shown(time_step.obs)
        rest: Any = {field: _read_only(getattr(time_step, field)) for field in ("reward", "terminated", "truncated", "first")}
        mask = jax.tree.map(_read_only, time_step.action_mask)
        carry = self._carries_given.batch(carry, len(rest["first"]))
        if rest["first"].any():
            carry = _where_first(rest["first"], self.initial_state(len(rest["first"])), carry)
        return TimeStep(obs, **rest, action_mask=mask), jax.tree.map(_read_only, carry)


def wanted_parameters(spec: EnvSpec) -> PyTree:
    """Of the parameters of a distribution over the action space: float32, in the tree of `parameter_shapes`."""
    shapes = parameter_shapes(spec.action)
    return wanted_like(
        jax.tree.map(lambda shape: jax.ShapeDtypeStruct(shape, np.float32), shapes, is_leaf=lambda x: _is_shape(x))
    )


def _is_shape(node: Any) -> bool:
    return isinstance(node, tuple) and all(isinstance(length, int) for length in node)


def _called(function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


def _by_name(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: function(*args[:-1], seed=args[-1])


def _row(given: tuple[Any, ...], i: int) -> tuple[Any, ...]:
    if len(given) == 1 and type(given[0]) is np.ndarray:
        return (given[0][i],)
    row: tuple[Any, ...] = jax.tree.map(lambda x: x[i], given)
    return row


def _length(tree: PyTree) -> int:
    return len(tree) if type(tree) is np.ndarray else len(jax.tree.leaves(tree)[0])


def _read_only(x: Any) -> npt.NDArray[Any]:
    """A view that cannot be written to; the array is its owner's."""
    view = np.asarray(x)
    if view.flags.writeable:
        view = view.view()
        view.flags.writeable = False
    return view


def _where_first(first: npt.NDArray[np.bool_], fresh: PyTree, carry: PyTree) -> PyTree:
    return jax.tree.map(lambda new, old: np.where(first.reshape(-1, *[1] * (old.ndim - 1)), new, old), fresh, carry)


def _signature(target: Any, is_object: bool, who: str) -> tuple[bool, bool, bool]:
    """Whether it sees everything, takes a seed, and takes it by name.

    Raises:
        TypeError: it can be asked in none of the ways.
    """
    function = target.action if is_object else target
    ways = "(time_step, carry[, seed])" if is_object else "(obs[, seed]) or (time_step, carry[, seed])"
    if not callable(function):
        raise TypeError(
            f"{who}: wanted a function of {ways}, or an object with initial_state and action, got {type(target).__name__}"
        )
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):
        raise TypeError(f"{who}: its signature cannot be read; wrap it, e.g. as lambda obs: policy(obs)") from None
    by_name = any(p.name == "seed" for p in parameters)
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) and p.default is p.empty for p in parameters)
    # A third one is the seed, whatever it is called.
    count -= any(p.name == "seed" and p.default is p.empty and p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
    if count not in ((2, 3) if is_object else (1, 2, 3)) or (by_name and count == 3):
        raise TypeError(f"{who}: takes {inspect.signature(function)}, wanted {ways}")
    return count > 1, by_name or count == 3, by_name
