import dataclasses
import json
import subprocess

import jax.numpy as jnp
import numpy as np
import pytest

from polyak.core import spaces
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, MultiBinary, MultiDiscrete, Tuple
from polyak.core.struct import static, struct
from polyak.storage.config import ConfigError, from_json, to_json
from polyak.storage.files import dump_json, parse_json


@struct
class Net:
    hidden: tuple[int, ...] = static(default=(64, 64))
    activation: str = static(default="tanh")


@struct
class Agent:
    spec: EnvSpec = static()
    network: Net = static(default=Net())
    gamma: float = 0.99
    learning_rate: object = 3e-4
    target_kl: float | None = None

    def __post_init__(self):
        if not 0 <= self.gamma <= 1:
            raise ValueError(f"Agent: gamma must be in [0, 1], got {self.gamma}")


CLASSES = {
    name: getattr(spaces, name) for name in ("Box", "Discrete", "MultiDiscrete", "MultiBinary", "Dict", "Tuple", "EnvSpec")
} | {"Net": Net, "Agent": Agent}
SPEC = EnvSpec(
    obs=Dict(
        {
            "image": Box(0, 255, (84, 84, 3), np.uint8),
            "state": Tuple((Box([-1.0, -np.inf], [0.1, np.inf]), MultiBinary((2, 3)))),
        }
    ),
    action=Tuple((Discrete(3, start=-1), MultiDiscrete((2, 5)))),
    id="Everything-v0",
)


def through_json(obj):
    return from_json(parse_json(dump_json(to_json(obj), "x"), "x"), CLASSES)


def test_settings_survive_a_round_trip():
    agent = Agent(spec=SPEC, network=Net((8, 8), "relu"), gamma=0.5, target_kl=None)
    assert through_json(agent) == agent
    assert through_json({"agent": agent, "seed": 3, "tags": ("a", None)}) == {"agent": agent, "seed": 3, "tags": ("a", None)}


def test_nan_and_infinity_survive_a_round_trip():
    agent = Agent(spec=SPEC, learning_rate=[float("inf"), 2**100, -0.0, 1e-320], target_kl=float("nan"))
    back = through_json(agent)
    assert back.learning_rate == agent.learning_rate
    assert str(back.learning_rate[2]) == "-0.0"
    assert np.isnan(back.target_kl)


def test_scalar_jax_arrays_are_written_as_numbers():
    data = to_json(Agent(spec=SPEC, gamma=jnp.float32(0.5), learning_rate=jnp.array([0.1, 0.2])))
    assert data["gamma"] == 0.5
    np.testing.assert_array_equal(from_json(data, CLASSES).learning_rate, np.float32([0.1, 0.2]))


def test_the_json_is_readable():
    data = to_json(Agent(spec=EnvSpec(Discrete(2), Discrete(3))))
    assert data == {
        "$class": "Agent",
        "spec": {
            "$class": "EnvSpec",
            "obs": {"$class": "Discrete", "n": 2, "start": 0},
            "action": {"$class": "Discrete", "n": 3, "start": 0},
            "id": "",
            "action_scaling": "clip",
            "has_action_mask": False,
        },
        "network": {"$class": "Net", "hidden": {"$tuple": [64, 64]}, "activation": "tanh"},
        "gamma": 0.99,
        "learning_rate": 3e-4,
        "target_kl": None,
    }


def test_an_image_space_takes_little_room():
    assert len(json.dumps(to_json(SPEC))) < 2000


def test_fields_with_defaults_may_be_missing():
    assert from_json({"$class": "Net", "activation": "relu"}, CLASSES) == Net(activation="relu")


def test_unsupported_field_raises_or_is_described():
    agent = Agent(spec=SPEC, learning_rate={"schedule": (print,)})
    with pytest.raises(
        TypeError, match=r"Agent\.learning_rate\.schedule\[0\]: must be dicts, lists, .*, got a builtin_function"
    ):
        to_json(agent)
    data = to_json(agent, on_unknown="describe")
    assert data["learning_rate"] == {"schedule": {"$tuple": [{"$unsupported": "<built-in function print>"}]}}
    dump_json(data, "x")
    message = r"config\.learning_rate\.schedule\[0\]: <built-in function print> could not be stored with the run"
    with pytest.raises(ConfigError, match=message):
        from_json(data, CLASSES)


def test_mutable_dataclass_is_rejected():
    @dataclasses.dataclass
    class Open:
        x: int = 1

    with pytest.raises(TypeError, match=r"must be .*, got a Open"):
        to_json(Open())


def test_an_unknown_field_is_rejected_with_the_nearest():
    with pytest.raises(ConfigError, match=r"config\.agent: Net: unknown field 'hiden'; did you mean 'hidden'\?"):
        from_json({"agent": {"$class": "Net", "hiden": 3}}, CLASSES)
    with pytest.raises(ConfigError, match=r"config: Discrete: unknown field 'strat'; did you mean 'start'\?"):
        from_json({"$class": "Discrete", "n": 3, "strat": 1}, CLASSES)


def test_constructor_errors_are_reported_with_their_path():
    with pytest.raises(ConfigError, match=r"run/config\.json\.agent: Agent: gamma must be in \[0, 1\], got 1\.5"):
        from_json({"agent": to_json(Agent(spec=SPEC)) | {"gamma": 1.5}}, CLASSES, what="run/config.json")
    for value in (1.5, 1, np.ones(2), "true"):
        spec = to_json(SPEC) | {"has_action_mask": to_json(value)}
        with pytest.raises(ConfigError, match=r"^config\.agent\.spec\.has_action_mask: must be true or false, got "):
            from_json({"agent": to_json(Agent(spec=SPEC)) | {"spec": spec}}, CLASSES)
    with pytest.raises(ConfigError, match=r"config: .*missing 1 required .*'spec'"):
        from_json({"$class": "Agent"}, CLASSES)


@pytest.mark.parametrize(
    "name", ["os.system", "builtins.eval", "subprocess.Popen", "Popen", "__import__", "Agent.__class__", "", 3, None, ["Net"]]
)
def test_only_registered_names_are_built(name):
    with pytest.raises(ConfigError, match=r"config: unknown class name .*; pass a user-defined agent again as agent="):
        from_json({"$class": name}, CLASSES)


def test_nothing_is_called_and_nothing_imported(tmp_path, monkeypatch):
    def called(*args, **kwargs):
        raise AssertionError("called")

    monkeypatch.setattr(subprocess, "Popen", called)
    for payload in (
        {"_target_": "os.system", "_args_": ["touch x"]},
        {"()": "@os.system()"},
        {"__reduce__": ["os.system", ["touch x"]]},
    ):
        assert from_json({"agent": payload}, CLASSES) == {"agent": payload}, "plain data stays plain data"
    with pytest.raises(ConfigError, match="malformed or unknown tag"):
        from_json({"$call": "os.system"}, CLASSES)
    with pytest.raises(ConfigError, match="unknown field '__class__'"):
        from_json({"$class": "Net", "__class__": "Agent"}, CLASSES)


def test_arbitrary_json_raises_only_config_errors():
    deep = []
    for _ in range(5000):
        deep = [deep]
    box = {"$class": "Box", "low": 0, "high": 1}
    for data in (
        deep,
        {"$array": 3},
        {"$class": "Discrete", "n": "x"},
        {"$class": "Box", "low": None, "high": None},
        {"$class": "Box", "low": 0, "high": 10**400},
        {"$class": "EnvSpec", "obs": box, "action": "Discrete"},
        {**box, "shape": [10**6, 10**6]},
    ):
        with pytest.raises(ConfigError):
            from_json(data, CLASSES)
