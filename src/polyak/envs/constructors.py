"""An environment by its name, its maker or itself."""

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
ONCE = "give a function that makes one"


def make(
    id: Any,
    *,
    num_envs: int = 1,
    action_scaling: Literal["clip", "rescale"] = "clip",
    vectorization: Vectorization = "auto",
    timeout: float = 60.0,
    nonfinite: Literal["error", "pass"] = "error",
    out_of_bounds: Literal["warn", "error", "clip"] = "warn",
    env_kwargs: Mapping[str, Any] | None = None,
    import_modules: bool = True,
) -> Env | HostEnv:
    """A batch of environments.

    Args:
        id: a name (`"jax/CartPole-v1"`, `"gymnax/CartPole-v1"`, `"ALE/Pong-v5"`, or any of Gymnasium's), a function without
            arguments that makes a `gymnasium.Env` (with `vectorization="async"` it runs in the workers), such an
            environment itself for `num_envs=1`, or a `gymnasium.vector.VectorEnv`, which brings its own number.
        num_envs: how many.
        action_scaling: Box actions are clipped to the bounds, or rescaled to them from [-1, 1].
        vectorization: of Gymnasium's: the environment's `own` vectorised form, a loop in this process (`sync`), or a process
            each (`async`, which pays only where a step takes milliseconds); `auto` is `own` where there is one, else `sync`.
        timeout: seconds that an `async` environment may take for one answer.
        nonfinite, out_of_bounds: what bad observations and rewards of a Gymnasium environment are; see `GymnasiumEnv`.
        env_kwargs: for the environment's constructor; for a name only. Those of `ALE/` are the fields of `envs.atari.Atari`.
        import_modules: whether `"module:Name-v0"` may import the module, as Gymnasium does; a name from a file should not.

    Returns:
        An `Env` for `jax/` and `gymnax/`, else a `HostEnv`.

    Raises:
        ValueError: no such environment (the nearest name is suggested), or an argument is out of range.
        TypeError: `id` or an argument is none of these, or a space is not supported.
        ImportError: what the environment needs is not installed; the message says how to install it.
    """
    check_choice("make", "vectorization", vectorization, ("auto", "own", "sync", "async"))
    check_number("make", "timeout", timeout, above=0.0)
    check_integer("make", "num_envs", num_envs)
    if isinstance(id, str) and id.startswith(("jax/", "gymnax/")):
        if vectorization != "auto":
            raise ValueError(f"make: {id} is batched as it is; vectorization must be 'auto', got {vectorization!r}")
        make_jax = _ours if id.startswith("jax/") else _gymnax
        return make_jax(id.split("/", 1)[1], num_envs, action_scaling, dict(env_kwargs or {}))
    from polyak.envs.gymnasium import GymnasiumEnv

    if isinstance(id, str):
        name, batch = id, _named_batch(id, num_envs, vectorization, timeout, dict(env_kwargs or {}), import_modules)
    else:
        if env_kwargs:
            raise TypeError("make: env_kwargs go with the name of an environment; a function can give them itself")
        name, batch = _given_batch(id, num_envs, vectorization, timeout)
    try:
        return GymnasiumEnv(batch, name, action_scaling=action_scaling, nonfinite=nonfinite, out_of_bounds=out_of_bounds)
    except BaseException:
        # No processes stay behind where nothing was made; what went wrong first is what counts.
        with contextlib.suppress(Exception):
            batch.close()
        raise


def _ours(name: str, num_envs: int, action_scaling: Literal["clip", "rescale"], settings: dict[str, Any]) -> Env:
    if name not in DYNAMICS:
        raise ValueError(f"make: {unknown_name(f'jax/{name}', tuple(f'jax/{known}' for known in DYNAMICS), 'environment')}")
    return AutoReset(DYNAMICS[name](**settings), num_envs, action_scaling)


def _gymnax(name: str, num_envs: int, action_scaling: Literal["clip", "rescale"], settings: dict[str, Any]) -> Env:
    from polyak.envs import gymnax

    return AutoReset(gymnax.dynamics(name, settings), num_envs, action_scaling)


def _named_batch(
    id: str, num_envs: int, vectorization: Vectorization, timeout: float, settings: dict[str, Any], import_modules: bool
) -> Any:
    import gymnasium

    spec = _spec(id, import_modules)
    if spec.namespace == "ALE":
        return _atari_batch(spec, num_envs, vectorization, settings)
    # The vectorised forms of phys2d leave all other rows where they are whenever one resets (Gymnasium 1.4).
    has_own = spec.vector_entry_point is not None and not id.startswith("phys2d/")
    if vectorization == "own" and not has_own:
        raise ValueError(f"make: {id} has no vectorised form of its own; use vectorization='sync' or 'async'")
    with _naming_extras(id, spec):
        if vectorization in ("auto", "own") and has_own:
            from polyak.envs.vector import VectorBatch

            own = gymnasium.make_vec(spec, num_envs=num_envs, vectorization_mode="vector_entry_point", **settings)
            return VectorBatch(own, id)
        # What Gymnasium's checker warns of in the first two steps, `GymnasiumEnv` checks in all. The registration goes along
        # because a worker process knows only Gymnasium's own.
        make_env = functools.partial(gymnasium.make, spec, disable_env_checker=True, **settings)
        return _batch_of(make_env, id, num_envs, vectorization, timeout)


def _atari_batch(spec: Any, num_envs: int, vectorization: Vectorization, settings: dict[str, Any]) -> Any:
    if vectorization not in ("auto", "own"):
        raise ValueError(
            f"make: {spec.id} runs in the threads of the ALE's own vectorised form; vectorization must be 'auto' or 'own', got "
            f"{vectorization!r}"
        )
    from polyak.envs.atari import Atari, AtariBatch

    registered = {name: value for name, value in spec.kwargs.items() if name != "game"}
    return AtariBatch(spec.kwargs["game"], num_envs, Atari(**registered | settings), spec.id)


def _batch_of(make_env: Callable[[], Any], name: str, num_envs: int, vectorization: Vectorization, timeout: float) -> Any:
    from polyak.envs.env_batch import InProcessEnvs, SingleBatch
    from polyak.envs.process_workers import WorkerProcesses

    if vectorization != "async":
        return SingleBatch(InProcessEnvs([make_env() for _ in range(num_envs)], name), name)
    workers = WorkerProcesses([make_env] * num_envs, name, timeout)
    try:
        return SingleBatch(workers, name)
    except BaseException:
        workers.close()
        raise


def _given_batch(given: Any, num_envs: int, vectorization: Vectorization, timeout: float) -> tuple[str, Any]:
    import gymnasium

    if isinstance(given, gymnasium.vector.VectorEnv):
        if num_envs not in (1, given.num_envs) or vectorization not in ("auto", "own"):
            raise ValueError(f"make: the vector environment given has {given.num_envs} environments and its own vectorization")
        return _vector_batch(given)
    if vectorization == "own":
        raise ValueError("make: vectorization='own' goes with the name of an environment, or give a VectorEnv")
    if isinstance(given, gymnasium.Env):
        if num_envs != 1 or vectorization == "async":
            raise ValueError(f"make: one environment cannot be {num_envs} nor go into another process; {ONCE}")
        name = _name_of(given)
        from polyak.envs.env_batch import InProcessEnvs, SingleBatch

        return name, SingleBatch(InProcessEnvs([given], name), name)
    if not callable(given):
        wanted = "a name, a function that makes a gymnasium.Env, or a gymnasium.vector.VectorEnv"
        raise TypeError(f"make: id must be {wanted}, got {type(given).__name__}")
    name = given.__name__ if isinstance(given, type) else getattr(given, "__name__", type(given).__name__)
    return name, _batch_of(given, name, num_envs, vectorization, timeout)


def _vector_batch(env: Any) -> tuple[str, Any]:
    import gymnasium

    from polyak.envs.env_batch import InProcessEnvs, SingleBatch
    from polyak.envs.vector import VectorBatch

    # A SyncVectorEnv is its environments: stepped by ourselves they reset on the next step whatever its mode.
    if type(env) is gymnasium.vector.SyncVectorEnv and env.observation_mode == "same":
        name = _name_of(env.envs[0])
        return name, SingleBatch(InProcessEnvs(env.envs, name), name)
    name = env.spec.id if env.spec is not None else type(env.unwrapped).__name__
    return name, VectorBatch(env, name)


def _name_of(env: Any) -> str:
    return str(env.spec.id) if env.spec is not None else type(env.unwrapped).__name__


def _spec(id: str, import_modules: bool) -> Any:
    """Gymnasium's registration of the name."""
    import gymnasium

    module, _, name = id.rpartition(":")
    if module and module not in sys.modules:
        if not import_modules:
            raise ValueError(f"make: {id} would import {module!r}; import it yourself, if you trust it")
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
def _naming_extras(id: str, spec: Any) -> Iterator[None]:
    """Say with which of our extras the missing dependency comes."""
    import gymnasium

    try:
        yield
    except gymnasium.error.DependencyNotInstalled as error:
        entry = str(spec.entry_point)
        extra = next((name for name in ("mujoco", "box2d") if f".{name}" in entry), None)
        how = f"pip install 'polyak[{extra}]'" if extra else str(error)
        raise ImportError(f"make: {id} needs something that is not installed: {how}") from error
