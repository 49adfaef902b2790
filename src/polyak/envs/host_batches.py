"""Creates batches of host environments from names that Gymnasium has registered, from objects, and from functions."""

import contextlib
import dataclasses
import difflib
import functools
import importlib
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from polyak.core.checks import check_integer
from polyak.envs.available import names, register_atari, register_minatar
from polyak.envs.libraries import conversion, is_from

if TYPE_CHECKING:
    from polyak.envs.env_options import EnvOptions

Vectorization: TypeAlias = Literal["auto", "own", "sync", "async"]
MAX_FRAME_SKIP = 1000
"""Limit for arguments and files: a step with more frames would take hours."""


@dataclasses.dataclass(frozen=True)
class BatchOptions:
    """The arguments of `make` for a batch of Gymnasium environments; see `make`."""

    num_envs: int
    vectorization: Vectorization
    timeout: float
    env: "EnvOptions"


def named_batch(id: Any, options: BatchOptions, settings: dict[str, Any], import_modules: bool) -> tuple[str, Any]:
    """Create a batch of host environments from the first argument of `make`; returns its name and the batch.

    Raises:
        ValueError, TypeError, ImportError: see `make`.
    """
    if isinstance(id, str):
        _check_frame_skip(settings)
        return id, _batch_by_name(id, options, settings, import_modules)
    check_no_settings(settings)
    return _batch_of_object(id, options)


def check_no_settings(settings: dict[str, Any]) -> None:
    """Check that `env_kwargs` is empty, for an environment that is not created by name.

    Raises:
        TypeError: `env_kwargs` is not empty.
    """
    if settings:
        raise TypeError(
            f"make: env_kwargs must be None unless id is a name or a class in JAX, got {settings!r:.80}; set them where the "
            "environment is created"
        )


def _batch_by_name(id: str, options: BatchOptions, settings: dict[str, Any], import_modules: bool) -> Any:
    import gymnasium

    vectorization = options.vectorization
    spec = _find_spec(id, import_modules)
    if spec.namespace == "ALE":
        return _atari_batch(spec, options, settings)
    # Environments of a vectorized phys2d stand still in the step in which another one resets (Gymnasium 1.4).
    has_own = spec.vector_entry_point is not None and not id.startswith("phys2d/")
    if vectorization == "own" and not has_own:
        raise ValueError(f"make: vectorization must be 'sync' or 'async', as {id} has no vectorized form, got 'own'")
    with _name_missing_extra(id, spec):
        if vectorization in ("auto", "own") and has_own:
            _check_render_mode(id, settings, spec.vector_entry_point)
            # Only `gymnasium.make` takes the option of the checker.
            own_settings = {name: value for name, value in settings.items() if name != "disable_env_checker"}
            own = gymnasium.make_vec(spec, num_envs=options.num_envs, vectorization_mode="vector_entry_point", **own_settings)
            with closing_on_error([own]):
                return _vector_batch(own, id, options)
        _check_render_mode(id, settings, spec.entry_point)
        # `GymnasiumEnv` checks every step, Gymnasium's checker only the first two. The registration is passed along because a
        # worker process has only Gymnasium's own registrations.
        make_env = functools.partial(gymnasium.make, spec, **{"disable_env_checker": True} | settings)
        return _single_batch(make_env, id, options)


@contextlib.contextmanager
def closing_on_error(envs: Sequence[Any]) -> Iterator[None]:
    """Close the existing environments if the block fails; the first error is raised."""
    try:
        yield
    except BaseException:
        for env in envs:
            with contextlib.suppress(Exception):  # it may have no close()
                env.close()
        raise


def _check_frame_skip(settings: dict[str, Any]) -> None:
    """Check the number of repetitions of an action, which multiplies the time of a step."""
    for name in ("frame_skip", "frameskip"):
        if name in settings:
            check_integer("make", f"env_kwargs[{name!r}]", settings[name], at_most=MAX_FRAME_SKIP)


def _check_render_mode(id: str, settings: dict[str, Any], entry_point: Any) -> None:
    """Check `render_mode` before anything is created; Gymnasium only warns of an unknown mode.

    Raises:
        ValueError: neither the environment nor Gymnasium's wrappers support the mode.
    """
    import gymnasium

    mode = settings.get("render_mode")
    creator = gymnasium.envs.registration.load_env_creator(entry_point) if isinstance(entry_point, str) else entry_point
    metadata = getattr(creator, "metadata", None)
    if mode is None or metadata is None:
        return
    modes = list(metadata.get("render_modes", []))
    # Modes that Gymnasium's wrappers create from arrays.
    from_arrays = {"rgb_array": ["human", "rgb_array_list"], "rgb_array_list": ["human"], "ansi": ["ansi_list"]}
    supported = modes + [name for own in modes for name in from_arrays.get(own, [])]
    if not supported and mode == "rgb_array":
        raise ValueError(f"make: {id} draws no images: its metadata has no render mode, so render_mode must be left out")
    if mode not in supported:
        expected = " or ".join(map(repr, dict.fromkeys(supported))) or "None"
        raise ValueError(f"make: env_kwargs['render_mode'] must be {expected} for {id}, got {mode!r}")


def _atari_batch(spec: Any, options: BatchOptions, settings: dict[str, Any]) -> Any:
    if options.vectorization not in ("auto", "own"):
        raise ValueError(
            f"make: vectorization must be 'auto' or 'own' for {spec.id}, which runs in the ALE's threads, "
            f"got {options.vectorization!r}"
        )
    if options.env.info_metrics or options.env.action_mask_key is not None:
        raise ValueError(f"make: info_metrics and action_mask_key must be left out for {spec.id}, got {options.env}")
    from polyak.envs.atari import Atari, AtariBatch

    registered = {name: value for name, value in spec.kwargs.items() if name != "game"}
    # Gymnasium's checker is for single environments.
    fields = {name: value for name, value in settings.items() if name not in ("disable_env_checker", "render_mode")}
    mode = settings.get("render_mode")
    if mode not in (None, "rgb_array"):
        raise ValueError(f"make: env_kwargs['render_mode'] must be 'rgb_array' for {spec.id}, got {mode!r}")
    draws = mode is not None
    return AtariBatch(spec.kwargs["game"], options.num_envs, Atari(**registered | fields), spec.id, draws=draws)


def _single_batch(make_env: Callable[[], Any], name: str, options: BatchOptions) -> Any:
    from polyak.envs.env_batch import InProcessEnvs, SingleBatch
    from polyak.envs.process_workers import WorkerProcesses

    if options.vectorization != "async":
        envs: list[Any] = []
        with closing_on_error(envs):
            for _ in range(options.num_envs):
                envs.append(make_env())
            return SingleBatch(InProcessEnvs(envs, name, options.env), name)
    workers = WorkerProcesses([make_env] * options.num_envs, name, options.timeout, options.env)
    with closing_on_error([workers]):
        return SingleBatch(workers, name)


def _batch_of_object(id: Any, options: BatchOptions) -> tuple[str, Any]:
    """Create a batch from a vector environment, an environment, or a function that creates one; returns name and batch."""
    import gymnasium

    num_envs, vectorization = options.num_envs, options.vectorization
    if isinstance(id, gymnasium.vector.VectorEnv):
        if num_envs not in (1, id.num_envs) or vectorization not in ("auto", "own"):
            raise ValueError(
                f"make: num_envs and vectorization must be left out for a vector environment (it has {id.num_envs} "
                f"environments), got {num_envs} and {vectorization!r}"
            )
        # The environments of a SyncVectorEnv are stepped directly, and so reset on the next step in any mode.
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


def _batch_of_envs(envs: Any, options: BatchOptions) -> Any:
    """Create a batch of existing environments."""
    from polyak.envs.env_batch import InProcessEnvs, SingleBatch

    name = _name_of(envs[0])
    return SingleBatch(InProcessEnvs(envs, name, options.env), name)


def _vector_batch(env: Any, name: str, options: BatchOptions) -> Any:
    from polyak.envs.vector import VectorBatch

    if is_from("envpool", env):
        from polyak.envs.envpool import SeededEnvPool

        env = SeededEnvPool(env)
    if is_from("supersuit", env):
        from polyak.envs.supersuit import SuperSuitEnv

        env = SuperSuitEnv(env)
    return VectorBatch(env, name, options.env)


def _name_of(env: Any) -> str:
    """Return the registered name, or the name of the class if there is none, as in EnvPool, whose spec has no `id`."""
    return str(getattr(env.spec, "id", type(env.unwrapped).__name__))


def _find_spec(id: str, import_modules: bool) -> Any:
    """Return Gymnasium's registration of a name."""
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
        hint = "".join(f"did you mean {other!r}? " for other in near)
        if module:
            hint += f"{module!r} registers no such environment"
            hint += f"; pass your own class or function itself, or --env {id} to polyak train" if name.isidentifier() else ""
        else:
            hint += f"if another package registers it, write 'package:{name}'"
        if name in gymnasium.registry:  # An older name of the ALE, which `names` has registered.
            game = re.split(r"NoFrameskip|Deterministic|-", name)[0]
            hint = f"use 'ALE/{game}-v5', or the ALE's older 'ale_py:{name}' without preprocessing"
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
