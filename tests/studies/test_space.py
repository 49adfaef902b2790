import dataclasses

import numpy as np
import pytest

from polyak.agents import AGENTS, agent_class
from polyak.ops.schedules import Linear
from polyak.presets import PRESETS, preset
from polyak.presets.spaces import SPACES
from polyak.studies.space import PARTS, Choices, Range, read_space
from polyak.studies.training import Bench, Task

OF_ACTION_VALUES = {"bootstrapped_dqn", "c51", "dqn", "iqn", "pqn", "qrdqn", "rainbow", "rnd_dqn"}
FROM_DATA = {"bc", "cql", "discrete_cql", "fql", "iql", "td3_bc"}


def test_every_algorithm_that_learns_in_environments_has_a_space_of_settings_within_the_agent_s_bounds():
    assert SPACES.keys() == AGENTS.keys() - FROM_DATA >= {algorithm for algorithm, _ in PRESETS}
    for name in SPACES:
        assert {"learning_rate", "gamma", "hidden"} & read_space(name, "preset").keys()


def test_no_space_draws_the_number_of_gradient_steps_by_which_a_preset_resets():
    resets = {algorithm for algorithm, env in PRESETS if "reset_period" in preset(algorithm, env).values}
    assert resets >= {"bro", "sr_sac"} and not [name for name in resets if "updates_per_step" in SPACES[name]]


@pytest.mark.parametrize("algorithm", SPACES)
def test_draws_from_every_shipped_space_make_an_agent_that_can_train(algorithm):
    env = "jax/CartPole-v1" if algorithm in OF_ACTION_VALUES else "jax/Pendulum-v1"
    found, space = preset(algorithm, env), read_space(algorithm, "preset")
    with Bench(Task(algorithm, env, found.env_steps, found.num_envs, 1, 1)) as bench:
        for positions in np.random.default_rng(0).random((20, len(space))):
            drawn = {name: one.decode(one.from_unit(x)) for (name, one), x in zip(space.items(), positions, strict=True)}
            assert drawn.keys() - {"hidden", "activation"} <= bench.make_fields(drawn).keys()


def test_an_algorithm_without_a_space_needs_a_file():
    with pytest.raises(ValueError, match=r"study: there is no space of bc; pass a TOML file"):
        read_space("bc", "preset")
    assert list(read_space("bc", {"learning_rate": [1e-3, 1e-4]})) == ["learning_rate"]


def test_a_file_has_ranges_choices_and_a_group(tmp_path):
    file = tmp_path / "space.toml"
    file.write_text(
        "learning_rate = {low = 1e-5, high = 1e-2, log = true}\nnum_epochs = [1, 5]\ntarget_kl = ['None', 0.1]\n"
        "clip_range = ['linear:0.2', 0.1]\n[network]\nhidden = [[64], [64, 64]]\n"
    )
    assert read_space("ppo", file) == {
        "learning_rate": Range(1e-5, 1e-2, True),
        "num_epochs": Choices((1, 5)),
        "target_kl": Choices((None, 0.1)),
        "clip_range": Choices(("linear:0.2", 0.1)),
        "hidden": Choices(([64], [64, 64])),
    }


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must have at least one setting, got none"),
        ("gamma = ", "must be a TOML file"),
        ("lerning_rate = [0.1]", "unknown setting 'lerning_rate'; did you mean 'learning_rate'"),
        ("hidden = [[64]]", r"hidden belongs to the group \[network\]"),
        ("gamma = []", "gamma must have at least one value"),
        ("gamma = [0.9, 0.9]", "gamma must have different values"),
        ("gamma = [0.9, inf]", "gamma must have finite numbers"),
        ("gamma = 0.9", "gamma must be a list of values or"),
        ("gamma = {low = 1.0, high = 0.9}", "gamma: low must be below high, got low=1.0, high=0.9"),
        ("gamma = {low = 0.0, high = 0.9, log = true}", "gamma: low must be above 0 with log = true"),
        ("gamma = {low = 0.0, high = inf}", "gamma: low and high must be finite numbers, got inf"),
        (f"gamma = {{low = 0, high = 1{400 * '0'}}}", "gamma: low and high must be finite numbers, got 1000"),
        ("gamma = {low = 0.0, high = 1.0, log = 1}", "gamma: log must be true or false, got 1"),
        # The agent's own bounds.
        ("gamma = {low = 0.5, high = 1.5}", r"gamma must be a number in \[0, 1\], got 1.5"),
        ("gamma = [0.9, 'high']", "gamma must be a number"),
        ("num_epochs = {low = 1.0, high = 2.5}", "num_epochs must be an integer >= 1|num_epochs must be an integer in"),
        ("normalize_advantage = ['all']", "normalize_advantage must be one of"),
        ("clip_range = ['linear:x']", "must be a number or linear:START"),
        ("[network]\nhidden = [[64], [0]]", "hidden"),
        ("[network]\nactivation = ['sine']", "activation must be one of"),
    ],
)
def test_an_invalid_space_is_rejected(tmp_path, text, message):
    file = tmp_path / "space.toml"
    file.write_text(text)
    with pytest.raises(ValueError, match=f"space.toml: .*({message})") as caught:
        read_space("ppo", file)
    assert len(str(caught.value).splitlines()) == 1 or "TOML" in str(caught.value)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"none.toml: cannot be read: No such file"):
        read_space("ppo", tmp_path / "none.toml")


@pytest.mark.parametrize(
    "dimension",
    [Range(1e-5, 1e-2, True), Range(0.5, 2.0), Range(1, 10), Choices((0.9, 0.99, 0.999)), Choices(("tanh", "relu"))],
)
def test_values_survive_optuna_and_cma(dimension):
    values = dimension.bounds
    assert [dimension.decode(dimension.encode(value)) for value in values] == list(values)
    for value in values:
        number = dimension.encode(value)
        assert dimension.from_unit(dimension.to_unit(number)) == pytest.approx(number, rel=1e-12)
    with pytest.raises(ValueError, match="must be"):
        dimension.encode(17.5)


def test_integer_bounds_are_of_integers_only_for_a_setting_that_is_an_integer():
    space = read_space("ppo", {"gamma": {"low": 0, "high": 1}, "num_epochs": {"low": 1, "high": 20}})
    drawn = {name: dimension.distribution() for name, dimension in space.items()}
    assert [type(one).__name__ for one in drawn.values()] == ["FloatDistribution", "IntDistribution"]
    shipped = {
        name
        for algorithm in SPACES
        for name, one in read_space(algorithm, "preset").items()
        if isinstance(one, Range) and isinstance(one.low, int)
    }
    assert shipped == {"target_period", "num_steps", "num_quantiles", "dropped_quantiles"}


def test_only_increasing_numbers_are_ordered():
    assert Choices((1, 2, 5)).is_ordered and Choices((0.9, 1)).is_ordered
    assert not any(Choices(values).is_ordered for values in [(2, 1), (False, True), (None, 0.1), ("a", "b")])


def test_parts_are_fields_that_no_space_can_have():
    fields = {field.name for name in (*AGENTS, "rnd") for field in dataclasses.fields(agent_class(name))}
    assert set(PARTS) <= fields


def test_the_group_of_rnd_has_the_settings_of_the_agent_around_the_algorithm():
    group = {"coefficient": {"low": 0.1, "high": 1}, "num_epochs": [1, 2], "learning_rate": ["linear:0.1", 0.01]}
    space = read_space("ppo", {"rnd": group, "gamma": [0.9, 0.99]})
    assert space == {
        "rnd_coefficient": Range(0.1, 1.0),
        "rnd_num_epochs": Choices((1, 2)),
        "rnd_learning_rate": Choices(("linear:0.1", 0.01)),
        "gamma": Choices((0.9, 0.99)),
    }
    for wrong, message in (({"coefficient": [-1.0]}, "coefficient must be"), ({"value": [1]}, "unknown setting 'value'")):
        with pytest.raises(ValueError, match=message):
            read_space("ppo", {"rnd": wrong})
    with Bench(Task("ppo", "jax/CartPole-v1", 500, 8, 1, 1)) as bench:
        made = bench.surround({"gamma": 0.9}, {"coefficient": 0.25, "learning_rate": "linear:0.1"})
        assert (made.coefficient, made.learning_rate, made.agent.gamma) == (0.25, Linear(0.1, 0.0, 500), 0.9)
        with pytest.raises(ValueError, match="RND: num_minibatches=7 must divide"):
            bench.surround({}, {"num_minibatches": 7})
    for algorithm, message in (("dqn", "got DQN"), ("a3c", "RND sends no gradients; use A2C or IMPALA")):
        with Bench(Task(algorithm, "jax/CartPole-v1", 500, 8, 1, 1)) as bench, pytest.raises(TypeError, match=message):
            bench.check(space)
