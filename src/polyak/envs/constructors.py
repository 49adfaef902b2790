"""Create batches of environments, from a name, a function, an environment or a vector environment."""

import contextlib
import difflib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, TypeAlias

from polyak.core.checks import check_choice, check_integer, check_number
from polyak.core.names import unknown_name
from polyak.core.types import Env, HostEnv
from polyak.envs.autoreset import AutoReset
from polyak.envs.available import names, register_atari
from polyak.envs.classic import DYNAMICS

Vectorization: TypeAlias = Literal["auto", "own", "sync", "async"]
# What a file or an argument may request: more would fill the memory, or run for hours, before anything is trained.
MAX_ENVS_IN_JAX = 2**20
MAX_ENVS_ON_HOST = 2**16
MAX_PROCESSES = 2**10
MAX_FRAME_SKIP = 1000


def make(
    id: Any,
    *,
    num_envs: int = 1,
    action_scaling: Literal["clip", "rescale"] = "clip",
    vectorization: Vectorization = "auto",
    timeout: float = 60.0,
    nonfinite: Literal["error", "pass"] = "error",
    out_of_bounds: Literal["warn", "error", "clip"] = "warn",
    drop_unsupported_obs: bool = False,
    env_kwargs: Mapping[str, Any] | None = None,
    import_modules: bool = True,
) -> Env | HostEnv:
    """Create a batch of environments.

    Args:
        id: a name (`"jax/CartPole-v1"`, `"gymnax/CartPole-v1"`, `"ALE/Pong-v5"`, or any of Gymnasium's), a function without
            arguments that creates a `gymnasium.Env` (with `vectorization="async"` it runs in the workers), such an
            environment itself for `num_envs=1`, or a `gymnasium.vector.VectorEnv`, also of EnvPool, which sets `num_envs`.
        num_envs: how many.
        action_scaling: Box actions are clipped to the bounds, or rescaled to them from [-1, 1].
        vectorization: of Gymnasium environments: the environment's `own` vectorised form, a loop in this process (`sync`), or
            a process each (`async`, faster only where a step takes milliseconds); `auto` is `own` where it exists, else `sync`.
        timeout: seconds that a step or reset of an `async` environment may take.
        nonfinite: how NaN and infinity in observations and rewards of a Gymnasium environment are handled; see `GymnasiumEnv`.
        out_of_bounds: how observations outside their bounds are handled; see `GymnasiumEnv`.
        drop_unsupported_obs: remove the entries of a Gymnasium Dict observation whose spaces are not supported, such as text,
            by `FilterObservation`; False raises a `TypeError`.
        env_kwargs: arguments of the environment's constructor, if `id` is a name. Those of `ALE/` are the fields of
            `envs.atari.Atari`.
        import_modules: whether `"module:Name-v0"` may import the module, as in Gymnasium; pass False for a name from a file.

    Returns:
        An `Env` for `jax/` and `gymnax/`, else a `HostEnv`.

    Raises:
        ValueError: there is no such environment (the closest name is suggested), or an argument is out of range.
        TypeError: `id` or an argument has another type, or a space is not supported.
        ImportError: a dependency of the environment is missing; the message says how to install it.
    """
    check_choice("make", "vectorization", vectorization, ("auto", "own", "sync", "async"))
    check_number("make", "timeout", timeout, above=0.0)
    is_jax = isinstance(id, str) and id.startswith(("jax/", "gymnax/"))
    most = MAX_ENVS_IN_JAX if is_jax else MAX_PROCESSES if vectorization == "async" else MAX_ENVS_ON_HOST
    check_integer("make", "num_envs", num_envs, at_most=most)
    settings = dict(env_kwargs or {})
    if is_jax:
        if vectorization != "auto":
            raise ValueError(f"make: vectorization must be 'auto' for {id}, got {vectorization!r}")
        make_jax = _make_jax if id.startswith("jax/") else _make_gymnax
        return make_jax(id.split("/", 1)[1], num_envs, action_scaling, settings)
    from polyak.envs.gymnasium import GymnasiumEnv

    if isinstance(id, str):
        _check_frame_skip(settings)
        name, batch = id, _batch_by_name(id, num_envs, vectorization, timeout, settings, import_modules, drop_unsupported_obs)
    else:
        if env_kwargs:
            raise TypeError("make: env_kwargs must be None unless id is a name; set them in the function that creates the env")
        name, batch = _batch_of_object(id, num_envs, vectorization, timeout, drop_unsupported_obs)
    try:
        return GymnasiumEnv(batch, name, action_scaling=action_scaling, nonfinite=nonfinite, out_of_bounds=out_of_bounds)
    except BaseException:
        # End the worker processes; the first error is raised.
        with contextlib.suppress(Exception):
            batch.close()
        raise


def _make_jax(name: str, num_envs: int, action_scaling: Literal["clip", "rescale"], settings: dict[str, Any]) -> Env:
    if name not in DYNAMICS:
        raise ValueError(f"make: {unknown_name(f'jax/{name}', tuple(f'jax/{known}' for known in DYNAMICS), 'environment')}")
    return AutoReset(DYNAMICS[name](**settings), num_envs, action_scaling)


def _make_gymnax(name: str, num_envs: int, action_scaling: Literal["clip", "rescale"], settings: dict[str, Any]) -> Env:
    from polyak.envs import gymnax

    return AutoReset(gymnax.dynamics(name, settings), num_envs, action_scaling)


def _batch_by_name(
    id: str,
    num_envs: int,
    vectorization: Vectorization,
    timeout: float,
    settings: dict[str, Any],
    import_modules: bool,
    drop_unsupported_obs: bool,
) -> Any:
    import gymnasium

    spec = _find_spec(id, import_modules)
    if spec.namespace == "ALE":
        return _atari_batch(spec, num_envs, vectorization, settings)
    # The vectorised forms of phys2d reset the state of no other environment whenever one resets (Gymnasium 1.4).
    has_own = spec.vector_entry_point is not None and not id.startswith("phys2d/")
    if vectorization == "own" and not has_own:
        raise ValueError(f"make: vectorization must be 'sync' or 'async', as {id} has no vectorised form, got 'own'")
    with _name_missing_extra(id, spec):
        if vectorization in ("auto", "own") and has_own:
            _check_render_mode(id, settings, spec.vector_entry_point)
            own = gymnasium.make_vec(spec, num_envs=num_envs, vectorization_mode="vector_entry_point", **settings)
            return _vector_batch(own, id, drop_unsupported_obs)
        _check_render_mode(id, settings, spec.entry_point)
        # `GymnasiumEnv` checks in every step what Gymnasium's checker warns of in the first two. The registration is passed
        # along because a worker process has only Gymnasium's own.
        make_env = functools.partial(gymnasium.make, spec, disable_env_checker=True, **settings)
        return _single_batch(make_env, id, num_envs, vectorization, timeout, drop_unsupported_obs)


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


def _atari_batch(spec: Any, num_envs: int, vectorization: Vectorization, settings: dict[str, Any]) -> Any:
    if vectorization not in ("auto", "own"):
        raise ValueError(
            f"make: vectorization must be 'auto' or 'own' for {spec.id}, which runs in the ALE's threads, got {vectorization!r}"
        )
    from polyak.envs.atari import Atari, AtariBatch

    registered = {name: value for name, value in spec.kwargs.items() if name != "game"}
    return AtariBatch(spec.kwargs["game"], num_envs, Atari(**registered | settings), spec.id)


def _single_batch(
    make_env: Callable[[], Any],
    name: str,
    num_envs: int,
    vectorization: Vectorization,
    timeout: float,
    drop_unsupported_obs: bool,
) -> Any:
    from polyak.envs.env_batch import InProcessEnvs, SingleBatch
    from polyak.envs.process_workers import WorkerProcesses

    if drop_unsupported_obs:
        make_env = functools.partial(_make_filtered, make_env)
    if vectorization != "async":
        return SingleBatch(InProcessEnvs([make_env() for _ in range(num_envs)], name), name)
    workers = WorkerProcesses([make_env] * num_envs, name, timeout)
    try:
        return SingleBatch(workers, name)
    except BaseException:
        workers.close()
        raise


def _make_filtered(make_env: Callable[[], Any]) -> Any:
    from polyak.envs.obs_reader import filter_unsupported

    return filter_unsupported(make_env())


def _batch_of_object(
    id: Any, num_envs: int, vectorization: Vectorization, timeout: float, drop_unsupported_obs: bool
) -> tuple[str, Any]:
    """The name and the batch of a vector environment, an environment, or a function that creates one."""
    import gymnasium

    if isinstance(id, gymnasium.vector.VectorEnv):
        if num_envs not in (1, id.num_envs) or vectorization not in ("auto", "own"):
            raise ValueError(
                f"make: num_envs and vectorization must be left out for a vector environment (it has {id.num_envs} "
                f"environments), got {num_envs} and {vectorization!r}"
            )
        # A SyncVectorEnv is stepped through its environments, which then reset on the next step whatever its mode.
        if type(id) is gymnasium.vector.SyncVectorEnv and id.observation_mode == "same":
            return _name_of(id.envs[0]), _batch_of_envs(id.envs, drop_unsupported_obs)
        return _name_of(id), _vector_batch(id, _name_of(id), drop_unsupported_obs)
    if vectorization == "own":
        raise ValueError("make: vectorization='own' needs the name of an environment, or pass a VectorEnv")
    if isinstance(id, gymnasium.Env):
        if num_envs != 1 or vectorization == "async":
            raise ValueError(
                f"make: num_envs must be 1 and vectorization not 'async' for a single environment, got {num_envs} and "
                f"{vectorization!r}; pass a function that creates it"
            )
        return _name_of(id), _batch_of_envs([id], drop_unsupported_obs)
    if not callable(id):
        expected = "a name, a function that creates a gymnasium.Env, or a gymnasium.vector.VectorEnv"
        raise TypeError(f"make: id must be {expected}, got {type(id).__name__}")
    name = getattr(id, "__name__", type(id).__name__)
    return name, _single_batch(id, name, num_envs, vectorization, timeout, drop_unsupported_obs)


def _batch_of_envs(envs: Any, drop_unsupported_obs: bool) -> Any:
    """A batch of environments that exist."""
    from polyak.envs.env_batch import InProcessEnvs, SingleBatch
    from polyak.envs.obs_reader import filter_unsupported

    name = _name_of(envs[0])
    if drop_unsupported_obs:
        envs = [filter_unsupported(env) for env in envs]
    return SingleBatch(InProcessEnvs(envs, name), name)


def _vector_batch(env: Any, name: str, drop_unsupported_obs: bool) -> Any:
    from polyak.envs.envpool import SeededEnvPool, is_envpool
    from polyak.envs.obs_reader import filter_unsupported
    from polyak.envs.vector import VectorBatch

    if is_envpool(env):
        env = SeededEnvPool(env)
    if drop_unsupported_obs:
        env = filter_unsupported(env)
    return VectorBatch(env, name)


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
    if name not in gymnasium.registry:
        known = [n for group in names().values() for n in group]
        near = difflib.get_close_matches(name, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise ValueError(f"make: unknown environment {id!r}{hint} (`polyak list` or polyak.envs.names() shows all)")
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
