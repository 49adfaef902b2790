"""Saves the complete state of a Gymnasium environment as plain data, and restores it exactly.

An environment is a chain of layers (wrappers, then the environment itself). The state of a layer is the result of its
`get_state()`, or the attributes of Gymnasium's own classes, which contain the complete state. A chain with any other layer
has no snapshot, and neither has a layer whose `get_state()` or `set_state(state)` has another meaning. Restoring sets
attributes to plain data and MuJoCo's arrays, and calls `set_state`; it runs no code that a snapshot names.

Plain data: dicts with string keys, lists, ints, floats, strings, bools, NumPy arrays of numbers. Other values (None, tuples,
deques, NumPy scalars, random generators, running means, dicts with other keys) are written as a dict with a `"kind"`.
"""

import collections
import contextlib
import copy
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from gymnasium.wrappers.utils import RunningMeanStd

from polyak.core.warn import warn
from polyak.envs.env_options import layers_of

# Gymnasium's environments with all state in attributes; the state of Box2D is in C++.
KNOWN_MODULES = (
    "gymnasium.envs.classic_control.",
    "gymnasium.envs.mujoco.",
    "gymnasium.envs.toy_text.",
    "gymnasium.wrappers.",
)
# Attributes that the constructor sets again, or that only rendering needs.
SETTINGS = """
    env spec metadata render_mode action_space observation_space _action_space _observation_space single_action_space
    single_observation_space _cached_spec _saved_kwargs _ezpickle_args _ezpickle_kwargs func P desc model
    mujoco_renderer screen screens surf clock isopen window_surface
    dtype _time_preprocess_func _append_data_func _obs_postprocess_func
"""
NOT_STATE = frozenset(SETTINGS.split())
BIT_GENERATORS = (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
GENERATORS = {generator.__name__: generator for generator in BIT_GENERATORS}
# Arrays that MuJoCo computed before the last state and environments read before the next step (positions of bodies lag
# behind the joints by a substep, so the state does not determine them). Floats only: indices from a file are not trusted.
MUJOCO_ARRAYS = """
    xpos xquat xmat xipos ximat xanchor xaxis geom_xpos geom_xmat site_xpos site_xmat subtree_com subtree_linvel
    subtree_angmom cinert cvel cacc cfrc_int cfrc_ext qacc qfrc_actuator qfrc_constraint qfrc_bias qfrc_passive
    actuator_force actuator_length actuator_velocity sensordata energy
"""
DERIVED = tuple(MUJOCO_ARRAYS.split())


class NotPlain(TypeError):
    """A value is neither plain data nor has a `"kind"`."""


@dataclasses.dataclass
class StateWarning:
    """Warns once that `get_state` and `set_state` of an environment give no snapshot, with the reason."""

    name: str
    is_due: bool = True

    def __call__(self, reason: str) -> None:
        """Warn, unless the warning was shown before."""
        if self.is_due:
            warn(f"{self.name}: {reason}; there is no snapshot, so that a resumed training begins new episodes")
        self.is_due = False


def save(env: Any, report: Callable[[str], None]) -> dict[str, Any] | None:
    """Return the state of every layer, or None if the state of a layer cannot be read.

    Args:
        report: called with the reason if `get_state` and `set_state` of a layer give no snapshot.
    """
    states = []
    for layer in layers_of(env):
        state = save_layer(layer, report)
        if state is None:
            return None
        states.append(state)
    return {"layers": states}


def load(env: Any, snapshot: dict[str, Any]) -> None:
    """Set every layer's state.

    Raises:
        ValueError: the snapshot is of another environment; nothing is changed.
    """
    layers, states = layers_of(env), snapshot["layers"]
    expected, got = ([_name(layer) for layer in layers], [state["class"] for state in states])
    if got != expected:
        raise ValueError(f"the snapshot must be of {' in '.join(expected)}, got {' in '.join(got)}")
    for layer, state in zip(layers, states, strict=True):
        load_layer(layer, state)


def _name(layer: Any) -> str:
    return type(layer).__qualname__


def save_layer(layer: Any, report: Callable[[str], None]) -> dict[str, Any] | None:
    """Return the state of one wrapper, environment or vectorized environment of Gymnasium, or None; see `save`."""
    if all(getattr(type(layer), name, None) is not None for name in ("get_state", "set_state")):
        try:
            own_state = _own_state(layer)
            # `get_state()` may lack the random generator of the next episodes.
            return {"class": _name(layer), **own_state, "generator": encode(vars(layer).get("_np_random"))}
        except NotPlain as error:
            report(str(error))
            return None
    if not type(layer).__module__.startswith(KNOWN_MODULES):
        return None
    attributes = {name: value for name, value in vars(layer).items() if name not in NOT_STATE}
    data = attributes.pop("data", None) if "model" in vars(layer) else None
    try:
        state: dict[str, Any] = {"class": _name(layer), "attributes": {k: encode(v) for k, v in attributes.items()}}
    except NotPlain:
        return None
    if data is not None:
        state["mujoco"] = _save_mujoco(layer.model, data)
    return state


def _own_state(layer: Any) -> dict[str, Any]:
    """Return the result of `get_state()`: a copy of plain data, else the encoded value.

    Raises:
        NotPlain: the result cannot be encoded, or one of the two methods has another meaning.
    """
    cls = type(layer)
    for name, arguments, form in (("get_state", (), "no argument"), ("set_state", (None,), "the state")):
        method, what = getattr(cls, name), f"{_name(layer)}.{name}"
        if not callable(method):
            raise NotPlain(f"{what} must be a method, got {type(method).__name__}")
        try:
            with contextlib.suppress(ValueError):  # A method in C has no signature.
                inspect.signature(getattr(layer, name)).bind(*arguments)
        except TypeError as error:
            raise NotPlain(f"{what}() must take {form}: {error}") from None
    try:
        own_state = cls.get_state(layer)
    except Exception as error:
        raise NotPlain(f"{_name(layer)}.get_state() raised {type(error).__name__}: {error}") from error
    try:
        if _is_plain(own_state):
            return {"given": copy.deepcopy(own_state)}  # The environment may change its state in place.
        return {"encoded": encode(own_state, f"{_name(layer)}.get_state()")}
    except RecursionError:
        raise NotPlain(f"{_name(layer)}.get_state() refers to itself") from None


def load_layer(layer: Any, state: dict[str, Any]) -> None:
    """Set the state of one wrapper or environment."""
    if "given" in state or "encoded" in state:
        type(layer).set_state(layer, state["given"] if "given" in state else decode(state["encoded"]))
        generator = decode(state["generator"])
        if generator is not None:
            layer._np_random = generator
        return
    for name in state["attributes"]:
        # A snapshot must not replace a method or a property.
        if not name.isidentifier() or name in NOT_STATE or _in_class(type(layer), name):
            raise ValueError(f"the snapshot of {_name(layer)} must hold only state, got the attribute {name!r}")
    values = {name: decode(value) for name, value in state["attributes"].items()}
    if "mujoco" in state:
        _load_mujoco(layer.model, layer.data, state["mujoco"])
    vars(layer).update(values)


def _in_class(cls: type, name: str) -> bool:
    found = inspect.getattr_static(cls, name, None)
    return callable(found) or isinstance(found, property | staticmethod | classmethod) or name.startswith("__")


def _save_mujoco(model: Any, data: Any) -> dict[str, Any]:
    import mujoco

    signature = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    state = np.empty(mujoco.mj_stateSize(model, signature))
    mujoco.mj_getState(model, data, state, signature)
    return {"state": state, "derived": {name: np.array(getattr(data, name)) for name in DERIVED}}


def _load_mujoco(model: Any, data: Any, saved: dict[str, Any]) -> None:
    import mujoco

    signature = int(mujoco.mjtState.mjSTATE_INTEGRATION)
    size = mujoco.mj_stateSize(model, signature)
    shapes = {name: getattr(data, name).shape for name in DERIVED}
    if saved["state"].shape != (size,) or {name: saved["derived"][name].shape for name in DERIVED} != shapes:
        raise ValueError(
            f"the snapshot's MuJoCo state must have {size} numbers, as this model has, got shape {saved['state'].shape}"
        )
    mujoco.mj_setState(model, data, np.asarray(saved["state"], np.float64), signature)
    for name in DERIVED:
        getattr(data, name)[...] = saved["derived"][name]


def encode(value: Any, path: str = "a value") -> Any:
    """Convert a value to plain data.

    Args:
        path: name of the value in errors.

    Raises:
        NotPlain: the value contains an object, a function or an array of objects.
    """
    if isinstance(value, np.str_):
        return str(value)
    if isinstance(value, np.generic):
        return {"kind": "scalar", "value": encode(np.array(value))}
    if type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray) and value.dtype.kind in "biuf":
        return np.array(value)
    if value is None:
        return {"kind": "none"}
    if type(value) in (tuple, list):
        items = [encode(item, f"{path}[{i}]") for i, item in enumerate(value)]
        return items if type(value) is list else {"kind": "tuple", "items": items}
    if type(value) is dict:
        items = [encode(item, f"{path}[{key!r}]") for key, item in value.items()]
        return {"kind": "dict", "keys": [encode(key, f"a key of {path}") for key in value], "values": items}
    if type(value) is collections.deque:
        return {"kind": "deque", "items": encode(list(value), path), "maxlen": encode(value.maxlen)}
    if type(value) is RunningMeanStd:
        return {"kind": "running_mean_std", "attributes": encode(vars(value), path)}
    if isinstance(value, np.random.Generator) and type(value.bit_generator).__name__ in GENERATORS:
        bits = value.bit_generator
        return {"kind": "generator", "name": type(bits).__name__, "state": encode(dict(bits.state))}
    kinds = "numbers, strings, None, and dicts, lists, tuples and arrays of these"
    raise NotPlain(f"{path} must be plain data ({kinds}), got {type(value).__name__}")


def decode(value: Any) -> Any:
    """Convert the result of `encode` back; arrays are writable copies.

    Raises:
        ValueError: the kind is unknown.
    """
    if isinstance(value, np.ndarray):
        return np.array(value)
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    match value.get("kind"):
        case "none":
            return None
        case "scalar":
            return decode(value["value"])[()]
        case "tuple":
            return tuple(decode(item) for item in value["items"])
        case "dict":
            return dict(zip(map(decode, value["keys"]), map(decode, value["values"]), strict=True))
        case "deque":
            return collections.deque(decode(value["items"]), decode(value["maxlen"]))
        case "running_mean_std":
            statistics = RunningMeanStd()
            vars(statistics).update({name: decode(value["attributes"])[name] for name in vars(statistics)})
            return statistics
        case "generator" if value["name"] in GENERATORS:
            bits = GENERATORS[value["name"]]()
            bits.state = decode(value["state"])
            return np.random.Generator(bits)
        case kind:
            raise ValueError(f"the snapshot holds a value of unknown kind {kind!r}")


def _is_plain(value: Any) -> bool:
    if type(value) is dict:
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    if type(value) is list:
        return all(map(_is_plain, value))
    return type(value) in (bool, int, float, str) or (isinstance(value, np.ndarray) and value.dtype.kind in "biuf")
