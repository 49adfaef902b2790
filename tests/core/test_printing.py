"""Printed forms: short, and without what equals a default."""

import dataclasses
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import polyak
from polyak import envs, loops, policies, schedules, train
from polyak.core.printing import MAX_LINES, MAX_WIDTH, format_number, short_repr, text_of
from polyak.core.spaces import Box, Dict, Discrete, EnvSpec, MultiBinary, MultiDiscrete, Tuple
from polyak.core.struct import static, struct
from polyak.presets import ppo as ppo_presets
from tests.loops.setting import AGENT, ENV, KEY

WIDE = Dict({f"sensor-{i}": Tuple((Box(np.arange(400.0), np.arange(400.0) + 1), MultiDiscrete((3,) * 400))) for i in range(40)})
WIDE_SPEC = EnvSpec(WIDE, Dict({f"joint-{i}": Discrete(3, start=1) for i in range(40)}), "A" * 200)


@pytest.fixture(scope="module")
def objects():
    """One object of every public kind, the large ones as large as they get."""
    result = loops.compiled(AGENT, ENV, env_steps=60, key=KEY)
    greedy = AGENT.policy(result.state)
    host_env = envs.make("CartPole-v1", num_envs=2)
    uniform = policies.Uniform(WIDE_SPEC)
    box = EnvSpec(Box([-1.0], [1.0]), Box([-1.0], [1.0]))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        changed = {field.name: getattr(AGENT, field.name) for field in dataclasses.fields(AGENT)}
    return [
        polyak.PPO(WIDE_SPEC),
        polyak.PPOKL.tf_agents(ENV.spec),
        polyak.PPO(ENV.spec, optimizer=optax.chain(optax.clip(1.0), optax.adam(1e-3))),
        polyak.PPO(**changed),
        jax.tree.map(lambda x: jnp.full(3, x), AGENT),
        result,
        result.progress,
        result.state,
        result.loop_state,
        jax.eval_shape(lambda: result.loop_state),
        result.state.copies,
        result.state.copies.online,
        train.evaluate(greedy, ENV, episodes=4, key=KEY),
        train.collect(greedy, ENV, 3, key=KEY),
        host_env.reset(0),
        greedy.action(ENV.init(KEY)[1], (), KEY),
        greedy,
        greedy.as_python(),
        AGENT.collect_policy(result.state),
        uniform,
        policies.EpsilonGreedy(greedy, schedules.Linear(1.0, env_steps=100)),
        policies.Boltzmann(greedy, 1.0),
        policies.Mixture((greedy, greedy), (0.5, 0.5)),
        policies.GaussianNoise(policies.Uniform(box), 0.1),
        policies.Scripted(box, [(1, [0.0])] * 500),
        policies.PythonPolicy(lambda obs: 0, WIDE_SPEC, name="B" * 300),
        policies.StableBaselinesPolicy(greedy),
        policies.with_info(greedy),
        polyak.MLP((64,) * 100, head=polyak.PolicyAndValue()),
        polyak.NatureCNN(head=polyak.PolicyAndValue()),
        polyak.LSTM(head=polyak.PolicyAndValue()),
        polyak.FlaxNNX(lambda spec, rngs: None),
        polyak.Follow(tau=0.005),
        polyak.Linear(3e-4),
        schedules.Piecewise(tuple(schedules.Linear(1.0) for _ in range(100)), tuple(range(1, 100))),
        *ppo_presets.PRESETS.values(),
        ENV,
        host_env,
        ENV.init(KEY)[0],
        WIDE,
        WIDE_SPEC,
        *WIDE.spaces["sensor-0"].spaces,
        Discrete(3),
        MultiBinary((3, 4)),
    ]


@pytest.mark.slow
def test_every_public_object_prints_in_ten_lines(objects):
    for value in objects:
        lines = repr(value).splitlines()
        assert len(lines) <= MAX_LINES and max(map(len, lines)) <= MAX_WIDTH, repr(value)
        assert type(value).__name__ in lines[0] and " at 0x" not in lines[0], repr(value)


def test_settings_print_only_what_differs_from_the_defaults():
    assert repr(polyak.PPO(EnvSpec(Box([0.0], [1.0]), Discrete(2)), gamma=0.98)) == (
        "PPO(\n    spec=EnvSpec(obs=Box(0, 1, shape=(1,), dtype=float32), action=Discrete(n=2)), "
        "network=MLP(head=PolicyAndValue()),\n    gamma=0.98,\n)"
    )


def test_a_setting_that_none_or_no_entry_switches_off_is_printed():
    spec = EnvSpec(Box([0.0], [1.0]), Discrete(2))
    assert repr(polyak.DQN(spec, huber_delta=None)).endswith("network=MLP(head=QValues()),\n    huber_delta=None,\n)")
    assert repr(polyak.GRU(8, hidden=())) == "GRU(width=8, hidden=())"
    assert repr(polyak.PolicyAndValue(value_hidden=())) == "PolicyAndValue(value_hidden=())"  # None: those of the actor


def test_a_setting_that_is_an_array_prints_its_value_or_its_shape():
    @struct
    class Settings:
        one: float = 0.5
        many: float = 0.5

    assert repr(Settings(jnp.float32(0.25), np.zeros(3))) == "Settings(one=0.25, many=float64[3])"


def test_structs_print_while_traced_and_after_donation():
    @struct
    class Pair:
        count: int
        name: str = static(default="pair")

    seen = []
    jax.jit(lambda pair: seen.append(repr(pair)) or pair.count)(Pair(jnp.int32(3)))
    assert seen == ["Pair(count=int32[])"]
    pair = Pair(jnp.int32(3))
    pair.count.delete()
    assert repr(pair) == "Pair(count=int32[])"
    assert repr(Pair(jax.random.key(0))) == "Pair(count=key<fry>[])"


def test_large_trees_print_their_number_of_arrays():
    assert text_of({"a": [np.zeros((2, 3))] * 5}) == "5 arrays of 30 numbers"
    assert text_of({"a": np.zeros(3, np.float32)}) == "{'a': float32[3]}"


def test_boxes_of_one_bound_and_of_many_print_shortly():
    assert repr(Box(np.full((2, 2), -1), np.ones((2, 2)))) == "Box(-1, 1, shape=(2, 2), dtype=float32)"
    assert repr(Box([0.0, 1.0, 2.0], [3.0] * 3)) == "Box([0, 1, ...], [3, 3, ...], shape=(3,), dtype=float32)"


def test_an_own_repr_is_kept():
    @short_repr("x")
    class Named:
        x = 1

        def __repr__(self):
            return "mine"

    assert repr(Named()) == "mine"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (21.25, "21.2"),
        (-1500.0, "-1500.0"),
        (999_999.0, "999999.0"),
        (61_728_384.0, "6.173e+07"),
        (-5e39, "-5e+39"),
        (np.inf, "inf"),
    ],
)
def test_large_numbers_are_short(value, text):
    assert format_number(value) == text
