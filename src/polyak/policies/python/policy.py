"""A policy that is ordinary Python (a rule, a planner, a model of another library, a remote service), in any loop."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, PRNGKeyArray

from polyak.core.checks import check_choice, check_number
from polyak.core.policy_faults import ExceptionRelay, PythonCalls
from polyak.core.printing import short_repr
from polyak.core.spaces import EnvSpec, check_env_spec
from polyak.core.struct import suggest_names
from polyak.core.types import Act, PolicyStep, PyTree, TimeStep
from polyak.ops.distributions import Deterministic, Distribution, for_space
from polyak.policies.predict import NumPyMethods
from polyak.policies.python.callback import ordered_call
from polyak.policies.python.callee import CalleeRef, PythonCallee


@short_repr("callee", "spec")
@dataclass(frozen=True, init=False, repr=False)
class PythonPolicy(NumPyMethods):
    """Acts by calling Python, with read-only NumPy arrays, exactly once a step.

    The target is a function `(obs) -> action` or `(time_step, carry) -> PolicyStep`, or an object with
    `initial_state(batch_size)` and `action(time_step, carry) -> PolicyStep`. One that has a last argument `seed` gets an
    integer derived from the key, the same in the compiled and the host loop. An unbatched target sees one environment at a
    time, without a batch dimension (its `initial_state` takes no argument), and its outputs are stacked.

    `predict` and the host loops call it directly where it stands by itself; inside a wrapper, and in compiled code, it goes
    through an ordered callback: once a step, in order, also where the action is not used. The loops raise its exceptions as
    they are; around a `jax.jit` of your own, use `raising()`. Its outputs are copied at once, so it may fill the same arrays
    again.
    An object's `initial_state` is called anew at every step at which an episode begins, and used for the environments where one
    does.

    Actions are an agent's: counted from 0, and within [-1, 1] where the environment rescales. Integers and floats of any width
    are cast to a Box's float32; integers of any width, bools, and floats without a fraction to integers; and so are lists of
    such numbers. Everything else is an error that names the policy, the returned value and the expected one.

    Attributes:
        variables: the arrays that the target declared, else `()`.
        callee: the Python half.

    Args:
        target: the function or object.
        spec: the environment's spaces.
        batched: the target takes a batch.
        carry_spec: a tree of spaces, of shapes with dtypes, or of arrays that are also the first values; for one environment.
        info_spec: the spec of the returned info, in the same form.
        name: for messages; None takes the name of the function or class.
        timeout: time limit of one call, in seconds; calls then run in another thread.
        on_error: `"clip"`: actions out of bounds are clipped, and counted in `clipped`; NaN is an error all the same.
        check: False skips the checks for NaN, bounds and actions that `action_mask` forbids, and the observation's.
        deterministic: equal observations get equal actions; a policy that neither is deterministic nor takes a seed is noted in
            checkpoints, which then are not bit-exact.
        variables: True if the target is a pytree whose arrays other policies may follow (`soft_update`); when it is called they
            are NumPy arrays.

    Raises:
        TypeError, ValueError: an argument is invalid, or the target can be called in none of the supported ways.

    >>> import numpy as np
    >>> from polyak.core.spaces import Box, Discrete
    >>> spec = EnvSpec(Box([-1.0] * 4, [1.0] * 4), Discrete(2))
    >>> PythonPolicy(lambda obs: obs[:, 2] > 0, spec, name="upright").predict(np.array([0.0, 0.0, 0.1, 0.0]))[0]
    np.int32(1)
    """

    variables: PyTree
    callee: PythonCallee

    @suggest_names
    def __init__(
        self,
        target: Any,
        spec: EnvSpec,
        *,
        batched: bool = True,
        carry_spec: PyTree = (),
        info_spec: PyTree = (),
        name: str | None = None,
        timeout: float | None = None,
        on_error: str = "raise",
        check: bool = True,
        deterministic: bool = False,
        variables: bool = False,
    ) -> None:
        check_env_spec("PythonPolicy", spec)
        check_choice("PythonPolicy", "on_error", on_error, ("raise", "clip"))
        check_number("PythonPolicy", "timeout", timeout, above=0, optional=True)
        flags = {"batched": batched, "check": check, "deterministic": deterministic, "variables": variables}
        for setting, value in flags.items():
            check_choice("PythonPolicy", setting, bool(value) if isinstance(value, np.bool_) else value, (True, False))
        callee = PythonCallee(
            target,
            spec,
            batched=batched,
            carry_spec=carry_spec,
            info_spec=info_spec,
            name=_name_of(target) if name is None else name,
            timeout=timeout,
            on_error=on_error,
            check=check,
            deterministic=deterministic,
        )
        if variables and jax.tree_util.all_leaves([target]):
            raise TypeError(f"{callee}: variables=True, but a {type(target).__name__} is no pytree")
        object.__setattr__(self, "callee", callee)
        object.__setattr__(self, "variables", jax.tree.map(jnp.asarray, target) if variables else ())

    @property
    def spec(self) -> EnvSpec:
        """The environment's spaces."""
        return self.callee.spec

    @property
    def python_calls(self) -> PythonCalls:
        """The calls of the function or object."""
        return self.callee.calls

    @property
    def num_calls(self) -> int:
        """Number of steps that the callee was called for."""
        return self.callee.calls.count

    @property
    def clipped(self) -> int:
        """Count of numbers in its actions that were out of bounds, with `on_error="clip"`."""
        return self.callee.actions.clipped

    def raising(self) -> ExceptionRelay:
        """A context around compiled code of your own that raises the policy's exceptions as they are."""
        return ExceptionRelay(self)

    def initial_state(self, batch_size: int) -> PyTree:
        """The object's own, else the declared carry."""
        return jax.tree.map(jnp.asarray, self.callee.initial_state(batch_size))

    def action(self, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray) -> PolicyStep:
        """Its step for a batch; the seed is derived from the key."""
        # The key is passed even without a seed: under `vmap` over keys, one call would otherwise serve all of them.
        return self._step(time_step, carry, self.seed(key, _batch_size(time_step)), jax.random.key_data(key))

    def distribution(self, time_step: TimeStep, carry: PyTree = ()) -> tuple[Distribution, PyTree]:
        """The object's own distribution, of the parameters that its `distribution(time_step, carry)` returns (see
        `polyak.ops.distributions.parameter_shapes`); else all probability on the action, for every space, with seed 0.
        """
        callee, size = self.callee, _batch_size(time_step)
        if not callee.has_distribution:
            step = self._step(time_step, carry, jnp.zeros(self._seed_shape(size), jnp.uint32))
            return Deterministic(step.action), step.carry
        shapes = callee.parameters.shapes(size), callee.carries.shapes(size)
        inputs = self.variables, (time_step, carry)
        params, carry = ordered_call(callee.ref, _calling(PythonCallee.distribution, self._declares), shapes, inputs)
        return for_space(self.spec.action, params, time_step.action_mask), carry

    def _step(self, time_step: TimeStep, carry: PyTree, seed: Array, *unused: Array) -> PolicyStep:
        callee, size = self.callee, _batch_size(time_step)
        seed_or_none = seed if callee.takes_seed else None
        if not callee.takes_time_step:
            inputs = self.variables, (time_step.obs, time_step.action_mask, seed_or_none)
            function = _calling(PythonCallee.action_of_obs, self._declares)
            return PolicyStep(ordered_call(callee.ref, function, callee.actions.shapes(size), inputs, unused), carry)
        shapes = PolicyStep(callee.actions.shapes(size), callee.carries.shapes(size), callee.infos.shapes(size))
        inputs = self.variables, (time_step, carry, seed_or_none)
        step: PolicyStep = ordered_call(callee.ref, _calling(PythonCallee.step, self._declares), shapes, inputs, unused)
        return step

    @property
    def _declares(self) -> bool:
        return not isinstance(self.variables, tuple) or self.variables != ()

    def seed(self, key: PRNGKeyArray, num_envs: int) -> Array:
        """The seed of a step: a number in [0, 2³¹), of an unbatched policy one for each environment."""
        shape = self._seed_shape(num_envs)
        if not self.callee.takes_seed:
            return jnp.zeros(shape, jnp.uint32)
        return jax.random.bits(key, shape, jnp.uint32) >> jnp.uint32(1)

    def _seed_shape(self, num_envs: int) -> tuple[int, ...]:
        return () if self.callee.batched else (num_envs,)

    def direct_call(self) -> Act:
        """`step(time_step, carry, seed)` in NumPy, for host loops."""
        callee, takes_seed, call = self.callee, self.callee.takes_seed, self.callee.calls.call
        target = self.variables if self._declares else callee.target

        def step(time_step: TimeStep, carry: PyTree, seed: Any) -> PolicyStep:
            return call(callee.step, target, time_step, carry, seed if takes_seed else None)

        def step_of_obs(time_step: TimeStep, carry: PyTree, seed: Any) -> PolicyStep:
            inputs = time_step.obs, time_step.action_mask, seed if takes_seed else None
            return PolicyStep(call(callee.action_of_obs, target, *inputs), carry)

        return step if callee.takes_time_step else step_of_obs

    def step_in_numpy(self, time_step: TimeStep, carry: PyTree, key: PRNGKeyArray | None) -> PolicyStep | None:
        """See `CallsPython`."""
        if key is None and self.callee.has_distribution:
            return None
        size = _batch_size(time_step)
        seed = np.zeros(self._seed_shape(size), np.uint32) if key is None else np.asarray(self.seed(key, size))
        policy: PythonPolicy = jax.tree.map(np.asarray, self) if self._declares else self
        return policy.direct_call()(time_step, jax.tree.map(np.asarray, carry), seed)


def _flatten(policy: PythonPolicy) -> tuple[tuple[PyTree], CalleeRef]:
    return (policy.variables,), policy.callee.ref


def _flatten_with_keys(policy: PythonPolicy) -> tuple[tuple[tuple[Any, PyTree]], CalleeRef]:
    return ((jax.tree_util.GetAttrKey("variables"), policy.variables),), policy.callee.ref


def _unflatten(ref: CalleeRef, children: Iterable[PyTree]) -> PythonPolicy:
    policy = object.__new__(PythonPolicy)
    object.__setattr__(policy, "variables", next(iter(children)))
    object.__setattr__(policy, "callee", ref())
    return policy


# The structure of the tree, which JAX's caches hold, has a weak reference; the policy itself has a strong one.
jax.tree_util.register_pytree_with_keys(PythonPolicy, _flatten_with_keys, _unflatten, _flatten)


def _calling(method: Callable[..., PyTree], declares: bool) -> Callable[[PythonCallee, PyTree], PyTree]:
    """`method(callee, target, *inputs)` as a function of `(callee, (variables, inputs))`."""
    return lambda callee, both: method(callee, both[0] if declares else callee.target, *both[1])


def _batch_size(time_step: TimeStep) -> int:
    return int(jax.tree.leaves(time_step.obs)[0].shape[0])


def _name_of(target: Any) -> str:
    return str(getattr(target, "__name__", type(target).__name__))
