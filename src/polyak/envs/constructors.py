"""Create batches of environments, from a name, a function, an environment or a vector environment."""

import contextlib
import dataclasses
import difflib
import functools
import importlib
import importlib.util
import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, TypedDict, Unpack, overload

import numpy as np

from polyak.core.checks import check_choice, check_integer, check_number
from polyak.core.spaces import EnvSpec
from polyak.core.suggestions import suggest_arguments, unknown_name
from polyak.core.types import Env, HostEnv
from polyak.envs.autoreset import AutoReset, Dynamics
from polyak.envs.available import JAX_LIBRARIES, JAX_PREFIXES, names, register_atari, register_minatar
from polyak.envs.classic import DYNAMICS
from polyak.envs.info_reader import check_info_metrics
from polyak.envs.libraries import conversion, is_from
from polyak.envs.source import EnvSource, can_make_again

if TYPE_CHECKING:
    import gymnasium

    from polyak.envs.env_options import EnvOptions

JaxName: TypeAlias = Literal["jax/Acrobot-v1", "jax/CartPole-v1", "jax/MountainCar-v0", "jax/Pendulum-v1"]
Vectorization: TypeAlias = Literal["auto", "own", "sync", "async"]
# What a file or an argument may request: more would fill the memory, or run for hours, before anything is trained.
MAX_ENVS_IN_JAX = 2**20
MAX_ENVS_ON_HOST = 2**16
MAX_PROCESSES = 2**10
MAX_FRAME_SKIP = 1000


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
    import_modules: bool


@overload
def make(id: JaxName, **options: Unpack[MakeOptions]) -> Env: ...
@overload
def make(id: str, **options: Unpack[MakeOptions]) -> Env | HostEnv: ...
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
    import_modules: bool = True,
) -> Env | HostEnv:
    """Create a batch of environments.

    Args:
        id: a name (`"jax/CartPole-v1"`, `"gymnax/CartPole-v1"`, `"brax/ant"`, `"jumanji/Snake-v1"`, `"ALE/Pong-v5"`, or any of
            Gymnasium's), a function without arguments that creates a `gymnasium.Env` (with `vectorization="async"` it runs in
            the workers), such an environment itself for `num_envs=1`, a `gymnasium.vector.VectorEnv`, also of EnvPool and
            SuperSuit, which sets `num_envs`, or an environment of gymnax, Brax or Jumanji.
        num_envs: how many.
        action_scaling: Box actions are clipped to the bounds, or rescaled to them from [-1, 1].
        vectorization: of Gymnasium environments: the environment's `own` vectorized form, a loop in this process (`sync`), or
            a process each (`async`, faster only where a step takes milliseconds); `auto` is `own` where it exists, else `sync`.
        timeout: seconds that a step or reset of an `async` environment may take.
        nonfinite: how NaN and infinity in observations and rewards of a Gymnasium environment are handled; see `GymnasiumEnv`.
        out_of_bounds: how floats of observations outside their bounds are handled; see `GymnasiumEnv`.
        drop_unsupported_obs: remove the entries of a Gymnasium Dict observation, and of Dicts in it, whose spaces are not
            supported. None removes only texts, with a warning; False raises a `TypeError` for them too.
        action_mask_key: the entry of a Gymnasium Dict observation that is its action mask; it is removed from the observation.
            Masks in `info["action_mask"]` and of a method `action_masks()` are found without it.
        info_metrics: names of numbers in the `info` of a Gymnasium environment, whose means become the metrics `env/NAME`.
        env_kwargs: arguments of the environment's constructor, if `id` is a name; numbers of NumPy become Python's. Those of
            `ALE/` are the fields of `envs.atari.Atari`.
        import_modules: whether `"module:Name-v0"` may import the module, as in Gymnasium; pass False for a name from a file.

    Returns:
        An `Env` for environments in JAX, else a `HostEnv`.

    Raises:
        ValueError: there is no such environment (the closest name is suggested), or an argument is out of range.
        TypeError: `id` or an argument has another type, or a space is not supported.
        ImportError: a dependency of the environment is missing; the message says how to install it.
    """
    check_choice("make", "vectorization", vectorization, ("auto", "own", "sync", "async"))
    check_number("make", "timeout", timeout, above=0.0)
    if isinstance(getattr(id, "spec", None), EnvSpec):  # that of Gymnasium's environments is of another class
        if isinstance(id, Dynamics):
            name = id.__name__ if isinstance(id, type) else type(id).__name__
            raise TypeError(f"make: {name} is dynamics in JAX; pass AutoReset({name}(...), num_envs=...) in its place")
        raise TypeError(f"make: id is an environment of make already, of {id.spec.id}; use it as it is")
    is_jax = is_in_jax(id)
    most = MAX_ENVS_IN_JAX if is_jax else MAX_PROCESSES if vectorization == "async" else MAX_ENVS_ON_HOST
    check_integer("make", "num_envs", num_envs, at_most=most)
    # Numbers of Python, which a run stores, so that a resumed environment gets the same.
    settings = {k: v.item() if isinstance(v, np.number | np.bool_) else v for k, v in (env_kwargs or {}).items()}
    arguments: dict[str, Any] = {"action_scaling": action_scaling, "vectorization": vectorization, "timeout": timeout}
    arguments |= {"nonfinite": nonfinite, "out_of_bounds": out_of_bounds, "drop_unsupported_obs": drop_unsupported_obs}
    arguments |= {"action_mask_key": action_mask_key, "info_metrics": tuple(info_metrics), "env_kwargs": settings}
    if is_jax:
        _check_host_only(id, arguments)
        dynamics = _dynamics_by_name(id, settings) if isinstance(id, str) else _dynamics_of_object(id, settings)
        return AutoReset(dynamics, num_envs, action_scaling)
    from polyak.envs.env_options import EnvOptions
    from polyak.envs.gymnasium import GymnasiumEnv

    env_options = EnvOptions(drop_unsupported_obs, action_mask_key, check_info_metrics(info_metrics))
    options = _Options(num_envs, vectorization, timeout, env_options)
    source = EnvSource(id, arguments) if can_make_again(id) else None
    name, batch = _named_batch(id, options, settings, import_modules)
    try:
        return GymnasiumEnv(
            batch, name, action_scaling=action_scaling, nonfinite=nonfinite, out_of_bounds=out_of_bounds, source=source
        )
    except BaseException:
        # End the worker processes; the first error is raised.
        with contextlib.suppress(Exception):
            batch.close()
        raise


def _check_host_only(env: Any, arguments: Mapping[str, Any]) -> None:
    """Check that the arguments of `make` for environments on the host have the values of their defaults.

    Raises:
        ValueError: one has another; its name and value.
    """
    defaults = inspect.signature(make).parameters
    for name, value in arguments.items():
        if name not in ("action_scaling", "env_kwargs") and value != defaults[name].default:
            raise ValueError(f"make: {name} is for Gymnasium environments and must be left out for {env}, got {value!r}")


def is_in_jax(env: Any) -> bool:
    """Whether an environment, or what `make` takes, is written in JAX."""
    if isinstance(env, str):
        return env.startswith(JAX_PREFIXES)
    return isinstance(env, Env) or any(is_from(library, env) for library in JAX_LIBRARIES)


def _named_batch(id: Any, options: "_Options", settings: dict[str, Any], import_modules: bool) -> tuple[str, Any]:
    if isinstance(id, str):
        _check_frame_skip(settings)
        return id, _batch_by_name(id, options, settings, import_modules)
    _check_no_settings(settings)
    return _batch_of_object(id, options)


def _dynamics_by_name(id: str, settings: dict[str, Any]) -> Dynamics:
    source, _, name = id.partition("/")
    match source:
        case "gymnax":
            from polyak.dynamics import gymnax

            return gymnax.dynamics(name, settings)
        case "brax":
            from polyak.dynamics import brax

            return brax.dynamics(name, settings)
        case "jumanji":
            from polyak.dynamics import jumanji

            return jumanji.dynamics(name, settings)
    if name not in DYNAMICS:
        raise ValueError(f"make: {unknown_name(id, tuple(f'jax/{known}' for known in DYNAMICS), 'environment')}")
    return DYNAMICS[name](**settings)


def _dynamics_of_object(env: Any, settings: dict[str, Any]) -> Dynamics:
    """The dynamics of an environment object of gymnax, Brax or Jumanji."""
    _check_no_settings(settings)
    name = type(getattr(env, "unwrapped", env)).__name__
    if is_from("gymnax", env):
        from polyak.dynamics import gymnax

        return gymnax.dynamics_of(env, env.default_params, f"gymnax/{name}")
    if is_from("brax", env):
        from polyak.dynamics import brax

        return brax.dynamics_of(env, f"brax/{name}")
    from polyak.dynamics import jumanji

    return jumanji.dynamics_of(env, f"jumanji/{name}")


def _check_no_settings(settings: dict[str, Any]) -> None:
    if settings:
        raise TypeError("make: env_kwargs must be None unless id is a name; set them in the function that creates the env")


@dataclasses.dataclass(frozen=True)
class _Options:
    """The arguments of `make` that say how a batch of Gymnasium environments is made."""

    num_envs: int
    vectorization: Vectorization
    timeout: float
    env: "EnvOptions"


def _batch_by_name(id: str, options: _Options, settings: dict[str, Any], import_modules: bool) -> Any:
    import gymnasium

    vectorization = options.vectorization
    spec = _find_spec(id, import_modules)
    if spec.namespace == "ALE":
        return _atari_batch(spec, options, settings)
    # The vectorized forms of phys2d reset the state of no other environment whenever one resets (Gymnasium 1.4).
    has_own = spec.vector_entry_point is not None and not id.startswith("phys2d/")
    if vectorization == "own" and not has_own:
        raise ValueError(f"make: vectorization must be 'sync' or 'async', as {id} has no vectorized form, got 'own'")
    with _name_missing_extra(id, spec):
        if vectorization in ("auto", "own") and has_own:
            _check_render_mode(id, settings, spec.vector_entry_point)
            # Only `gymnasium.make` takes the option of the checker.
            own_settings = {name: value for name, value in settings.items() if name != "disable_env_checker"}
            own = gymnasium.make_vec(spec, num_envs=options.num_envs, vectorization_mode="vector_entry_point", **own_settings)
            with _closing_on_error([own]):
                return _vector_batch(own, id, options)
        _check_render_mode(id, settings, spec.entry_point)
        # `GymnasiumEnv` checks in every step what Gymnasium's checker warns of in the first two. The registration is passed
        # along because a worker process has only Gymnasium's own.
        make_env = functools.partial(gymnasium.make, spec, **{"disable_env_checker": True} | settings)
        return _single_batch(make_env, id, options)


@contextlib.contextmanager
def _closing_on_error(envs: Sequence[Any]) -> Iterator[None]:
    """Close the environments that exist if one cannot be used; the first error is raised."""
    try:
        yield
    except BaseException:
        for env in envs:
            with contextlib.suppress(Exception):  # it may have no close()
                env.close()
        raise


def _check_frame_skip(settings: dict[str, Any]) -> None:
    """Check the repetitions of an action: a step takes as many times longer."""
    for name in ("frame_skip", "frameskip"):
        if name in settings:
            check_integer("make", f"env_kwargs[{name!r}]", settings[name], at_most=MAX_FRAME_SKIP)


def _check_render_mode(id: str, settings: dict[str, Any], entry_point: Any) -> None:
    """Check `render_mode` before anything is created; Gymnasium only warns of an unknown one.

    Raises:
        ValueError: neither the environment nor a wrapper of Gymnasium's has it.
    """
    import gymnasium

    mode = settings.get("render_mode")
    creator = gymnasium.envs.registration.load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    metadata = getattr(creator, "metadata", None)
    if mode is None or metadata is None:
        return
    modes = list(metadata.get("render_modes", []))
    # Gymnasium's wrappers make these of arrays.
    from_arrays = {"rgb_array": ["human", "rgb_array_list"], "rgb_array_list": ["human"], "ansi": ["ansi_list"]}
    supported = modes + [name for own in modes for name in from_arrays.get(own, [])]
    if mode not in supported:
        expected = " or ".join(map(repr, dict.fromkeys(supported))) or "None"
        raise ValueError(f"make: env_kwargs['render_mode'] must be {expected} for {id}, got {mode!r}")


def _atari_batch(spec: Any, options: _Options, settings: dict[str, Any]) -> Any:
    if options.vectorization not in ("auto", "own"):
        raise ValueError(
            f"make: vectorization must be 'auto' or 'own' for {spec.id}, which runs in the ALE's threads, "
            f"got {options.vectorization!r}"
        )
    if options.env.info_metrics or options.env.action_mask_key is not None:
        raise ValueError(f"make: info_metrics and action_mask_key must be left out for {spec.id}, got {options.env}")
    from polyak.envs.atari import Atari, AtariBatch

    registered = {name: value for name, value in spec.kwargs.items() if name != "game"}
    return AtariBatch(spec.kwargs["game"], options.num_envs, Atari(**registered | settings), spec.id)


def _single_batch(make_env: Callable[[], Any], name: str, options: _Options) -> Any:
    from polyak.envs.env_batch import InProcessEnvs, SingleBatch
    from polyak.envs.process_workers import WorkerProcesses

    if options.vectorization != "async":
        envs: list[Any] = []
        with _closing_on_error(envs):
            for _ in range(options.num_envs):
                envs.append(make_env())
            return SingleBatch(InProcessEnvs(envs, name, options.env), name)
    workers = WorkerProcesses([make_env] * options.num_envs, name, options.timeout, options.env)
    try:
        return SingleBatch(workers, name)
    except BaseException:
        workers.close()
        raise


def _batch_of_object(id: Any, options: _Options) -> tuple[str, Any]:
    """The name and the batch of a vector environment, an environment, or a function that creates one."""
    import gymnasium

    num_envs, vectorization = options.num_envs, options.vectorization
    if isinstance(id, gymnasium.vector.VectorEnv):
        if num_envs not in (1, id.num_envs) or vectorization not in ("auto", "own"):
            raise ValueError(
                f"make: num_envs and vectorization must be left out for a vector environment (it has {id.num_envs} "
                f"environments), got {num_envs} and {vectorization!r}"
            )
        # A SyncVectorEnv is stepped through its environments, which then reset on the next step whatever its mode.
        if type(id) is gymnasium.vector.SyncVectorEnv and id.observation_mode == "same":
            return _name_of(id.envs[0]), _batch_of_envs(id.envs, options)
        return _name_of(id), _vector_batch(id, _name_of(id), options)
    if vectorization == "own":
        raise ValueError("make: vectorization='own' needs the name of an environment, or pass a VectorEnv")
    if isinstance(id, gymnasium.Env):
        if num_envs != 1 or vectorization == "async":
            raise ValueError(
                f"make: num_envs must be 1 and vectorization not 'async' for a single environment, got {num_envs} and "
                f"{vectorization!r}; pass a function that creates it"
            )
        return _name_of(id), _batch_of_envs([id], options)
    if not callable(id):
        expected = "a name, a function that creates a gymnasium.Env, or a gymnasium.vector.VectorEnv"
        raise TypeError(f"make: id must be {expected}, got {type(id).__name__}{conversion(id)}")
    name = getattr(id, "__name__", type(id).__name__)
    return name, _single_batch(id, name, options)


def _batch_of_envs(envs: Any, options: _Options) -> Any:
    """A batch of environments that exist."""
    from polyak.envs.env_batch import InProcessEnvs, SingleBatch

    name = _name_of(envs[0])
    return SingleBatch(InProcessEnvs(envs, name, options.env), name)


def _vector_batch(env: Any, name: str, options: _Options) -> Any:
    from polyak.envs.vector import VectorBatch

    if is_from("envpool", env):
        from polyak.envs.envpool import SeededEnvPool

        env = SeededEnvPool(env)
    if is_from("supersuit", env):
        from polyak.envs.supersuit import SuperSuitEnv

        env = SuperSuitEnv(env)
    return VectorBatch(env, name, options.env)


def _name_of(env: Any) -> str:
    """The registered name; that of the class where there is none, as in EnvPool, whose spec has no `id`."""
    return str(getattr(env.spec, "id", type(env.unwrapped).__name__))


def _find_spec(id: str, import_modules: bool) -> Any:
    """Gymnasium's registration of a name."""
    import gymnasium

    module, _, name = id.rpartition(":")
    if module and module not in sys.modules:
        if not import_modules:
            raise ValueError(f"make: {id} must not import the module {module!r} here; if you trust it, import it before")
        try:
            importlib.import_module(module)
        except ModuleNotFoundError as error:
            raise ImportError(f"make: {id} needs the module {module!r}: {error}") from error
    if name.startswith("ALE/") and not register_atari():
        raise ImportError(f"make: {id} needs ale-py: pip install 'polyak[atari]'")
    if name.startswith("MinAtar/") and not register_minatar():
        raise ImportError(f"make: {id} needs MinAtar: pip install minatar")
    if name not in gymnasium.registry:
        known = [n for group in names().values() for n in group]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"if it is of another package, name that too: 'package:{name}'"
        if name in gymnasium.registry:  # An older name of the ALE's, which `names` has registered.
            game = re.split(r"NoFrameskip|Deterministic|-", name)[0]
            hint = f"take 'ALE/{game}-v5', or the ALE's older 'ale_py:{name}' without preprocessing"
        raise ValueError(f"make: unknown environment {id!r}; {hint} (`polyak list` or polyak.envs.names() shows all)")
    return gymnasium.spec(name)


@contextlib.contextmanager
def _name_missing_extra(id: str, spec: Any) -> Iterator[None]:
    """Name the extra of polyak that installs a missing dependency."""
    import gymnasium

    try:
        yield
    except gymnasium.error.DependencyNotInstalled as error:
        entry = str(spec.entry_point)
        extra = next((name for name in ("mujoco", "box2d") if f".{name}" in entry), None)
        how = f"pip install 'polyak[{extra}]'" if extra else str(error)
        raise ImportError(f"make: {id} needs a package that is not installed: {how}") from error
