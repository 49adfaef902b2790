"""Create batches of environments, from a name, a function, an environment or a vector environment."""

import importlib
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypedDict, Unpack, overload

import numpy as np

from polyak.core.checks import check_choice, check_integer, check_number
from polyak.core.spaces import EnvSpec
from polyak.core.suggestions import suggest_arguments, unknown_name
from polyak.core.types import Env, HostEnv
from polyak.envs.autoreset import AutoReset, Dynamics
from polyak.envs.available import JAX_LIBRARIES, JAX_PREFIXES, PACKAGES, JaxName
from polyak.envs.built_in import DYNAMICS
from polyak.envs.host_batches import BatchOptions, Vectorization, check_no_settings, closing_on_error, named_batch
from polyak.envs.info_reader import check_info_metrics
from polyak.envs.libraries import METHODS, has_dynamics, is_from
from polyak.envs.source import EnvSource, can_make_again

if TYPE_CHECKING:
    import gymnasium

# Limits for arguments and files: more environments would fill the memory, or take hours to create.
MAX_ENVS_IN_JAX = 2**20
MAX_ENVS_ON_HOST = 2**16
MAX_PROCESSES = 2**10

WITH_PARAMS = ("gymnax", "craftax", "xminigrid")
"""Libraries whose environments have parameters beside them."""

ENVS_PER_DRAWN_STATE = 8
"""Number of environments for each initial state that is drawn at a time."""


class MakeOptions(TypedDict, total=False):
    """The keyword arguments of `make`."""

    num_envs: int
    action_scaling: Literal["clip", "rescale"]
    vectorization: Vectorization
    timeout: float
    nonfinite: Literal["error", "pass"]
    out_of_bounds: Literal["warn", "error", "clip"]
    drop_unsupported_obs: bool | None
    action_mask_key: str | None
    info_metrics: Sequence[str]
    env_kwargs: Mapping[str, Any] | None
    reset_pool: Literal["auto"] | int | None
    import_modules: bool


@overload
def make(id: JaxName, **options: Unpack[MakeOptions]) -> Env: ...
@overload
def make(id: str, **options: Unpack[MakeOptions]) -> Env | HostEnv: ...
@overload
def make(id: Dynamics | type[Dynamics], **options: Unpack[MakeOptions]) -> Env: ...
@overload
def make(
    id: "Callable[[], gymnasium.Env[Any, Any]] | gymnasium.Env[Any, Any] | gymnasium.vector.VectorEnv[Any, Any, Any]",
    **options: Unpack[MakeOptions],
) -> HostEnv: ...
@suggest_arguments("make")
def make(
    id: Any,
    *,
    num_envs: int = 1,
    action_scaling: Literal["clip", "rescale"] = "clip",
    vectorization: Vectorization = "auto",
    timeout: float = 60.0,
    nonfinite: Literal["error", "pass"] = "error",
    out_of_bounds: Literal["warn", "error", "clip"] = "warn",
    drop_unsupported_obs: bool | None = None,
    action_mask_key: str | None = None,
    info_metrics: Sequence[str] = (),
    env_kwargs: Mapping[str, Any] | None = None,
    reset_pool: Literal["auto"] | int | None = "auto",
    import_modules: bool = True,
) -> Env | HostEnv:
    """Create a batch of environments.

    Args:
        id: a name (`"jax/CartPole-v1"`, `"gymnax/CartPole-v1"`, `"brax/ant"`, `"jumanji/Snake-v1"`,
            `"playground/CheetahRun"`, `"craftax/Craftax-Symbolic-v1"`, `"navix/Navix-DoorKey-8x8-v0"`,
            `"xminigrid/MiniGrid-DoorKey-8x8"`, `"pgx/2048"`, `"ALE/Pong-v5"`, or any of Gymnasium's), a function without
            arguments that creates a `gymnasium.Env` (with `vectorization="async"` it runs in the workers), such an environment
            itself for `num_envs=1`, a `gymnasium.vector.VectorEnv`, also of EnvPool and SuperSuit, which sets `num_envs`, or an
            environment in JAX or its class: `Dynamics` of your own, or an environment of gymnax, Brax, Jumanji, MuJoCo
            Playground, Craftax, NAVIX, XLand-MiniGrid or Pgx; also a pair of environment and parameters, as gymnax and
            XLand-MiniGrid return it.
        num_envs: number of environments.
        action_scaling: Box actions are clipped to the bounds, or rescaled to them from [-1, 1].
        vectorization: for Gymnasium environments: the environment's `own` vectorized form, a loop in this process (`sync`), or
            one process each (`async`, faster only if a step takes milliseconds); `auto` is `own` if it exists, else `sync`.
        timeout: maximum seconds of a step or reset of an `async` environment.
        nonfinite: how NaN and infinity in observations and rewards of a Gymnasium environment are handled; see `GymnasiumEnv`.
        out_of_bounds: how floats of observations outside their bounds are handled; see `GymnasiumEnv`.
        drop_unsupported_obs: remove the entries of a Gymnasium Dict observation, and of nested Dicts, whose spaces are not
            supported. None removes only texts, with a warning; False removes none, and unsupported spaces raise a `TypeError`.
        action_mask_key: entry of a Gymnasium Dict observation that is the action mask, which is removed from the observation.
            Masks in `info["action_mask"]` and from a method `action_masks()` need no key.
        info_metrics: names of numbers in the `info` of a Gymnasium environment, whose means become the metrics `env/NAME`.
        env_kwargs: arguments of the environment's constructor, if `id` is a name or the class of an environment in JAX; NumPy
            numbers become Python numbers. For `ALE/`, the arguments are the fields of `envs.atari.Atari`.
        reset_pool: how an environment in JAX draws the initial states of its episodes, which are all different: a number draws
            so many whenever so many have been used, `None` draws one for every environment in every step; see `AutoReset`.
            `"auto"` is an eighth of `num_envs` for Brax, Jumanji, MuJoCo Playground, Craftax, XLand-MiniGrid and dynamics of
            your own with `has_costly_reset = True`, and `None` for others, whose resets are cheap.
        import_modules: allow `"module:Name-v0"` to import the module, as in Gymnasium; pass False for a name from a file.

    Returns:
        An `Env` for environments in JAX, else a `HostEnv`.

    Raises:
        ValueError: there is no such environment (the closest name is suggested), or an argument is out of range.
        TypeError: `id` or an argument has another type, or a space is not supported.
        ImportError: a dependency of the environment is missing; the message says how to install it.
    """
    check_choice("make", "vectorization", vectorization, ("auto", "own", "sync", "async"))
    check_number("make", "timeout", timeout, above=0.0)
    _check_not_made(id)
    is_jax = is_in_jax(id)
    most = MAX_ENVS_IN_JAX if is_jax else MAX_PROCESSES if vectorization == "async" else MAX_ENVS_ON_HOST
    check_integer("make", "num_envs", num_envs, at_most=most)
    if not isinstance(env_kwargs, Mapping | None):
        raise TypeError(f"make: env_kwargs must be a dict of the constructor's arguments or None, got {env_kwargs!r:.80}")
    # Python numbers, which a run can store, so that a resumed environment gets equal arguments.
    settings = {k: v.item() if isinstance(v, np.number | np.bool_) else v for k, v in (env_kwargs or {}).items()}
    arguments: dict[str, Any] = {"action_scaling": action_scaling, "vectorization": vectorization, "timeout": timeout}
    arguments |= {"nonfinite": nonfinite, "out_of_bounds": out_of_bounds, "drop_unsupported_obs": drop_unsupported_obs}
    arguments |= {"action_mask_key": action_mask_key, "env_kwargs": settings}
    arguments |= {"info_metrics": check_info_metrics(info_metrics), "reset_pool": reset_pool}
    _check_options(id, arguments, is_jax=is_jax)
    if is_jax:
        dynamics = _dynamics_by_name(id, settings) if isinstance(id, str) else _dynamics_of_object(id, settings)
        return AutoReset(dynamics, num_envs, action_scaling, _choose_reset_pool(reset_pool, dynamics, num_envs))
    from polyak.envs.env_options import EnvOptions

    env_options = EnvOptions(drop_unsupported_obs, action_mask_key, arguments["info_metrics"])
    return _make_on_host(id, BatchOptions(num_envs, vectorization, timeout, env_options), arguments, import_modules)


def _make_on_host(id: Any, options: BatchOptions, arguments: Mapping[str, Any], import_modules: bool) -> HostEnv:
    """Create a batch of Gymnasium environments; `arguments` has the other arguments of `make`."""
    from polyak.envs.gymnasium import GymnasiumEnv

    source = EnvSource(id, arguments) if can_make_again(id) else None
    name, batch = named_batch(id, options, arguments["env_kwargs"], import_modules)
    checks = {option: arguments[option] for option in ("action_scaling", "nonfinite", "out_of_bounds")}
    with closing_on_error([batch]):
        return GymnasiumEnv(batch, name, source=source, **checks)


def _choose_reset_pool(reset_pool: Literal["auto"] | int | None, dynamics: Dynamics, num_envs: int) -> int | None:
    """Return the number of initial states that are drawn at a time, or None for no pool.

    Raises:
        TypeError, ValueError: `reset_pool` is neither `"auto"` nor None nor such a number.
    """
    if reset_pool == "auto":
        return math.ceil(num_envs / ENVS_PER_DRAWN_STATE) if getattr(dynamics, "has_costly_reset", False) else None
    check_integer("make", "reset_pool, where it is not 'auto',", reset_pool, optional=True, at_most=MAX_ENVS_IN_JAX)
    return reset_pool


def _check_not_made(id: Any) -> None:
    """Check that the argument of `make` is neither an environment created by `make` nor incomplete dynamics.

    Raises:
        TypeError: it is one of these.
    """
    # Gymnasium's specs have another class.
    if not isinstance(getattr(id, "spec", None), EnvSpec) or has_dynamics(id):
        return
    if isinstance(id, Env | HostEnv):
        raise TypeError(f"make: id is already an environment created by make ({id.spec.id}); use it directly")
    name = getattr(id, "__name__", type(id).__name__)
    missing = ", ".join(method for method in METHODS if not callable(getattr(id, method, None)))
    raise TypeError(f"make: {name} must have the methods {', '.join(METHODS)} of dynamics in JAX, has no {missing}")


def _check_options(env: Any, arguments: Mapping[str, Any], *, is_jax: bool) -> None:
    """Check that arguments of `make` for environments of the other kind, in JAX or not, have their default values.

    Raises:
        ValueError: an argument has another value; the message has its name and value.
    """
    defaults = inspect.signature(make).parameters
    other = "Gymnasium environments" if is_jax else "environments in JAX"
    for name, value in arguments.items():
        is_of_other = name not in ("action_scaling", "env_kwargs", "reset_pool") if is_jax else name == "reset_pool"
        if is_of_other and value not in (defaults[name].default, None):
            raise ValueError(f"make: {name} is for {other} and must be left out for {env}, got {value!r}")


def is_in_jax(env: Any) -> bool:
    """Return True if an environment, or an argument of `make`, is a JAX environment or the class of one."""
    if isinstance(env, str):
        return env.startswith(JAX_PREFIXES)
    env = env[0] if isinstance(env, tuple) and env else env
    # A wrapper of gymnax or Brax for Gymnasium is from both; PettingZoo's environments have the methods of dynamics.
    if is_from("gymnasium", env) or is_from("pettingzoo", env):
        return False
    # A class may set its spec in __init__.
    is_dynamics = has_dynamics(env) if isinstance(env, type) else isinstance(env, Dynamics | Env)
    return is_dynamics or _library_of(env) is not None


def _dynamics_by_name(id: str, settings: dict[str, Any]) -> Dynamics:
    source, _, name = id.partition("/")
    if source != "jax":
        made: Dynamics = _import_adapter(source).dynamics(name, settings)
        return made
    if name not in DYNAMICS:
        raise ValueError(f"make: {unknown_name(id, tuple(f'jax/{known}' for known in DYNAMICS), 'environment')}")
    return DYNAMICS[name](**settings)


def _dynamics_of_object(env: Any, settings: dict[str, Any]) -> Dynamics:
    """The dynamics of an environment in JAX or its class, or of a pair of environment and parameters."""
    if isinstance(env, type):
        env, settings = env(**settings), {}
    check_no_settings(settings)
    pair, (env, *params) = env, env if isinstance(env, tuple) else (env,)
    if isinstance(env, type):
        raise TypeError(f"make: a pair must have an environment, not its class, got {pair!r:.80}")
    library = _library_of(env)
    if params and (library not in WITH_PARAMS or len(params) > 1):
        raise TypeError(f"make: a pair must be an environment of {', '.join(WITH_PARAMS)} and its parameters, got {pair!r:.80}")
    if library is None:
        _check_not_made(env)
        own: Dynamics = env
        return own
    name = type(getattr(env, "unwrapped", env)).__name__
    made: Dynamics = _import_adapter(library).dynamics_of(env, f"{library}/{name}", *params)
    return made


def _library_of(env: Any) -> str | None:
    """Return the library in JAX that defines the class of an environment, or one of its base classes."""
    return next((library for library in JAX_LIBRARIES if is_from(PACKAGES.get(library, library), env)), None)


def _import_adapter(library: str) -> Any:
    """Import the module with `dynamics` and `dynamics_of` of a library's environments."""
    assert library in JAX_LIBRARIES, library
    return importlib.import_module(f"polyak.dynamics.{library}")
