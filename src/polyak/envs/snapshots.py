"""The whole state of a Gymnasium environment as plain data, and back: exact, or not at all.

An environment is a chain of layers (wrappers, then the environment itself). A layer's state is what its `get_state()`
answers; for Gymnasium's own classes, whose whole state is known to stand in their attributes, it is those. A chain with
any other layer has no snapshot. Restoring sets attributes to plain data and MuJoCo's arrays, and calls `set_state`; it runs
nothing that a snapshot names.

Plain data: dicts with string keys, lists, ints, floats, strings, bools, NumPy arrays of numbers. What is none of these (None,
tuples, scalars of NumPy, random generators, dicts with other keys) is written as a dict with a `"kind"`.
"""

import inspect
from typing import Any

import gymnasium
import numpy as np

# Gymnasium's environments that keep all their state in attributes; Box2D's worlds live in C++.
KNOWN_MODULES = (
    "gymnasium.envs.classic_control.",
    "gymnasium.envs.mujoco.",
    "gymnasium.envs.toy_text.",
    "gymnasium.wrappers.",
)
# Settings that the constructor makes again, and what only rendering needs.
SETTINGS = """
    env spec metadata render_mode action_space observation_space _action_space _observation_space single_action_space
    single_observation_space _cached_spec _saved_kwargs _ezpickle_args _ezpickle_kwargs func P desc model
    mujoco_renderer screen screens surf clock isopen window_surface
"""
NOT_STATE = frozenset(SETTINGS.split())
BIT_GENERATORS = (np.random.PCG64, np.random.PCG64DXSM, np.random.MT19937, np.random.Philox, np.random.SFC64)
GENERATORS = {generator.__name__: generator for generator in BIT_GENERATORS}
# What MuJoCo computed on the way to the last state and environments read before the next step (positions of bodies lag
# behind the joints by a substep, so that they cannot be had from the state alone). Floats only: indices are not to be trusted.
MUJOCO_ARRAYS = """
    xpos xquat xmat xipos ximat xanchor xaxis geom_xpos geom_xmat site_xpos site_xmat subtree_com subtree_linvel
    subtree_angmom cinert cvel cacc cfrc_int cfrc_ext qacc qfrc_actuator qfrc_constraint qfrc_bias qfrc_passive
    actuator_force actuator_length actuator_velocity sensordata energy
"""
DERIVED = tuple(MUJOCO_ARRAYS.split())


class NotPlain(TypeError):
    """A value that plain data cannot hold."""


def save(env: Any) -> dict[str, Any] | None:
    """The state of every layer, or None where a layer's state cannot be had.

    Raises:
        TypeError: a `get_state()` answered something that is no plain data.
    """
    states = []
    for layer in _layers(env):
        state = save_layer(layer)
        if state is None:
            return None
        states.append(state)
    return {"layers": states}


def load(env: Any, snapshot: dict[str, Any]) -> None:
    """Set every layer's state.

    Raises:
        ValueError: the snapshot is of another environment; nothing was changed.
    """
    layers, states = _layers(env), snapshot["layers"]
    ours, theirs = [_name(layer) for layer in layers], [state["class"] for state in states]
    if ours != theirs:
        raise ValueError(f"the snapshot is of {' in '.join(theirs)}, this environment is {' in '.join(ours)}")
    for layer, state in zip(layers, states, strict=True):
        load_layer(layer, state)


def _layers(env: Any) -> list[Any]:
    """From the outermost wrapper to the environment itself."""
    layers = [env]
    # Not until `env.unwrapped`: that of an adapter to another library is no environment of Gymnasium's.
    while isinstance(env, gymnasium.Wrapper):
        env = env.env
        layers.append(env)
    return layers


def _name(layer: Any) -> str:
    return type(layer).__qualname__


def save_layer(layer: Any) -> dict[str, Any] | None:
    """The state of one wrapper or environment (also one of Gymnasium's vectorised ones), or None."""
    get_state, set_state = (getattr(type(layer), name, None) for name in ("get_state", "set_state"))
    if get_state is not None and set_state is not None:
        given = get_state(layer)
        _check_plain(given, f"{_name(layer)}.get_state()")
        # Where an environment's own account leaves the generator out, its episodes' starts would differ.
        return {"class": _name(layer), "given": given, "generator": encode(vars(layer).get("_np_random"))}
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


def load_layer(layer: Any, state: dict[str, Any]) -> None:
    """Set the state of one wrapper or environment."""
    if "given" in state:
        type(layer).set_state(layer, state["given"])
        generator = decode(state["generator"])
        if generator is not None:
            layer._np_random = generator
        return
    for name in state["attributes"]:
        # A snapshot may hold what was computed, never stand in for a method or a property.
        if not name.isidentifier() or name in NOT_STATE or _in_class(type(layer), name):
            raise ValueError(f"the snapshot of {_name(layer)} has an attribute {name!r}, which is no state")
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
        raise ValueError(f"the snapshot's MuJoCo state is not of this model: wanted {size} numbers, got {saved['state'].shape}")
    mujoco.mj_setState(model, data, np.asarray(saved["state"], np.float64), signature)
    for name in DERIVED:
        getattr(data, name)[...] = saved["derived"][name]


def encode(value: Any) -> Any:
    """Plain data for a value.

    Raises:
        NotPlain: for objects, functions, arrays of objects.
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
        items = [encode(item) for item in value]
        return items if type(value) is list else {"kind": "tuple", "items": items}
    if type(value) is dict:
        return {"kind": "dict", "keys": [encode(key) for key in value], "values": [encode(item) for item in value.values()]}
    if isinstance(value, np.random.Generator) and type(value.bit_generator).__name__ in GENERATORS:
        bits = value.bit_generator
        return {"kind": "generator", "name": type(bits).__name__, "state": encode(dict(bits.state))}
    raise NotPlain(f"{type(value).__name__} is no plain data")


def decode(value: Any) -> Any:
    """What `encode` was given; arrays are copies, to be written to.

    Raises:
        ValueError: no such kind.
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
        case "generator" if value["name"] in GENERATORS:
            bits = GENERATORS[value["name"]]()
            bits.state = decode(value["state"])
            return np.random.Generator(bits)
        case kind:
            raise ValueError(f"a snapshot holds a value of unknown kind {kind!r}")


def _check_plain(value: Any, path: str) -> None:
    if type(value) is dict and all(type(key) is str for key in value):
        for key, item in value.items():
            _check_plain(item, f"{path}[{key!r}]")
    elif type(value) is list:
        for i, item in enumerate(value):
            _check_plain(item, f"{path}[{i}]")
    elif type(value) not in (bool, int, float, str) and not (isinstance(value, np.ndarray) and value.dtype.kind in "biuf"):
        wanted = "dicts with string keys, lists, ints, floats, strings, bools and arrays of numbers"
        raise TypeError(f"{path} is a {type(value).__name__}; a snapshot holds {wanted}")
