"""Flags from the source of an agent's class."""

import contextlib
import dataclasses
import io
import math
import subprocess
import sys
import typing
import warnings

import jax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyak.agents import AGENTS, agent_class
from polyak.agents.settings import Entries
from polyak.cli import agent_source
from polyak.cli.agent_flags import agent_flags, explicit_settings, setting_names
from polyak.cli.agent_source import agent_summary, takes_sequences
from polyak.cli.flags import UsageError, parse
from polyak.core.types import Scalar
from polyak.ops.schedules import Schedule
from polyak.presets.preset import LinearOverTraining, with_length
from tests.agents.test_unused_settings import make

MODULE = '''
"""An agent of a user."""

class Other:
    """Another class."""
    x: int = 1

class Agent:
    """Learns by trial.

    Attributes:
        rate: how fast
            it learns.
        kind: which.

    Text after the attributes: none of it is a description.
    """

    LIMIT: ClassVar[int] = 5
    spec: EnvSpec
    network: Network | None = None
    rate: Scalar = number(default=0.5, at_least=0)
    kind: Literal["a", "b"] | None = None
    steps: int = integer(default=8)
    goal: Scalar | Literal["auto"] | None = None
    other: Scalar | Other | None = None
    schedule: Schedule | None = setting(default=None, check=check)
    computed: int = 3 * 4

class Group:
    """Shared.

    Attributes:
        decay: how slowly.
        rate: the rate of a group.
    """

    decay: float = number(default=0.9)
    rate: Scalar = number(default=0.1)

class Leaf(Agent, Group):
    """A leaf.

    Attributes:
        steps: steps of a leaf.
    """

    steps: int = 16
    own: bool = False

class Cautious(polyak.SAC):
    """SAC with a penalty.

    Attributes:
        penalty: its coefficient.
    """

    penalty: float = 0.5
    gamma: Scalar = 0.9
'''


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "module_of_an_agent.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    return "module_of_an_agent"


def test_fields_of_simple_types_with_literal_defaults_are_flags(module):
    fields = dataclasses.fields(agent_flags(f"{module}:Agent", {}))
    assert {field.name: field.default for field in fields} == {
        "rate": 0.5,
        "kind": None,
        "steps": 8,
        "goal": None,
        "schedule": None,
    }
    assert module not in sys.modules


def test_defaults_of_a_preset_replace_those_of_the_class(module):
    fields = dataclasses.fields(agent_flags(f"{module}:Agent", {"steps": 9, "network": {}}))
    assert {field.name: field.default for field in fields}["steps"] == 9


@pytest.mark.parametrize(
    ("arguments", "changes"),
    [
        ([], {}),
        # Values of a preset or the class are set too if they are passed.
        (["--rate", "0.25"], {"rate": 0.25}),
        (["--kind", "b", "--steps", "9", "--schedule", "None"], {"kind": "b", "steps": 9, "schedule": None}),
        (["--steps", "8"], {"steps": 8}),
        (["--goal", "auto"], {"goal": "auto"}),
        (["--goal", "-1.5"], {"goal": -1.5}),
    ],
)
def test_settings_that_are_passed_are_set_to_their_defaults_too(arguments, changes, module):
    flags = parse(agent_flags(f"{module}:Agent", {"rate": 0.25}), arguments, prog="polyak", description="")
    assert flags.rate == 0.25 and explicit_settings(flags, arguments) == changes


def test_descriptions_are_those_of_the_docstring(module):
    hints = typing.get_type_hints(agent_flags(f"{module}:Agent", {}), include_extras=True)
    texts = {name: hint.__metadata__[-1].help for name, hint in hints.items()}
    assert texts == {"rate": "how fast it learns.", "kind": "which.", "steps": "", "goal": "", "schedule": ""}
    assert agent_summary(f"{module}:Agent") == "Learns by trial."


def test_inherited_fields_are_flags_with_their_texts_and_the_nearest_default(module):
    kind = agent_flags(f"{module}:Leaf", {})
    defaults = {field.name: field.default for field in dataclasses.fields(kind)}
    wanted = {"steps": 16, "own": False, "rate": 0.5, "kind": None, "goal": None, "schedule": None, "decay": 0.9}
    assert defaults == wanted and list(defaults) == list(wanted)
    hints = typing.get_type_hints(kind, include_extras=True)
    texts = {name: hint.__metadata__[-1].help for name, hint in hints.items()}
    assert (texts["steps"], texts["rate"], texts["decay"]) == ("steps of a leaf.", "how fast it learns.", "how slowly.")


def test_a_subclass_of_one_of_our_agents_has_its_flags(module):
    sac, cautious = (agent_flags(agent, {}) for agent in (AGENTS["sac"], f"{module}:Cautious"))
    defaults = {field.name: field.default for field in dataclasses.fields(cautious)}
    assert defaults == {field.name: field.default for field in dataclasses.fields(sac)} | {"penalty": 0.5, "gamma": 0.9}
    assert "replay" in setting_names(f"{module}:Cautious")
    assert takes_sequences(f"{module}:Cautious") and not takes_sequences(f"{module}:Agent")


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("from polyak import DQN\nclass DQN(DQN):\n    pass", "DQN"),
        ("from package import Base\nclass Leaf(Base):\n    own: int = 3", "Leaf"),
        ("from nowhere import Base\nclass Leaf(Base):\n    own: int = 3", "Leaf"),
    ],
)
def test_bases_are_found_by_way_of_a_package_and_by_the_same_name(text, name, tmp_path, monkeypatch):
    (tmp_path / "package").mkdir()
    (tmp_path / "package/__init__.py").write_text("from .inner import Base\n")
    (tmp_path / "package/inner.py").write_text("class Base:\n    rate: float = 0.5\n")
    (tmp_path / "leaves.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    agent_source._tree_of.cache_clear()
    names = [field.name for field in dataclasses.fields(agent_flags(f"leaves:{name}", {}))]
    wanted = {"DQN": "huber_delta", "Leaf": "rate" if "package" in text else "own"}[name]
    assert wanted in names
    assert wanted not in [field.name for field in dataclasses.fields(agent_flags(f"leaves:{name}", {}, [wanted]))]


@pytest.mark.parametrize("agent", ["sys:X", "nowhere:Agent", "module_of_an_agent:Missing"])
def test_an_agent_that_does_not_exist_is_an_import_error(agent, module):
    with pytest.raises(ImportError, match=r"no module '(nowhere|sys)'|defines no class 'Missing'"):
        agent_flags(agent, {})


@pytest.mark.parametrize("name", AGENTS)
def test_flags_read_from_the_source_are_the_fields_of_the_class(name):
    hints = typing.get_type_hints(agent_class(name))
    simple = {bool, int, float, str, Scalar, Schedule, int | None, float | None, Scalar | None, Schedule | None}
    simple |= {Entries | None}
    fields = {
        field.name: field.default
        for field in dataclasses.fields(agent_class(name))
        if hints[field.name] in simple or "Literal" in str(hints[field.name])
    }
    flags = agent_flags(AGENTS[name], {})
    assert takes_sequences(AGENTS[name]) == getattr(agent_class(name), "takes_sequences", False)
    assert {field.name: field.default for field in dataclasses.fields(flags)} == fields
    for text in (hint.__metadata__[-1].help for hint in typing.get_type_hints(flags, include_extras=True).values()):
        assert text


TEXT = st.text(max_size=6).filter(lambda text: text not in ("-h", "--help") and "\0" not in text)
VALUES = st.one_of(
    st.sampled_from(["nan", "inf", "1e400", "-1", "0", "1", "3", "0.5", "2.0", "1e-3"]),
    st.sampled_from(["linear:0.5:0.1", "linear:nan", "linear:-1", "None", "True", "9" * 40, "auto", "batch", "", "--"]) | TEXT,
)


def is_meant(value, text):
    """Whether a flag with this text has this value."""
    if isinstance(value, LinearOverTraining):
        numbers = [float(number) for number in text.split(":")[1:]]
        return dataclasses.astuple(value)[: len(numbers)] == tuple(numbers)
    if isinstance(value, int | float) and not isinstance(value, bool):
        return type(value)(text) == value or math.isnan(value)
    return value == (text,) if isinstance(value, tuple) else str(value) == text


@pytest.mark.slow
@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_arbitrary_settings_of_any_algorithm_are_what_they_say_or_an_error_that_names_one(data):
    """Any arguments."""
    algorithm = data.draw(st.sampled_from(sorted(AGENTS)))
    kind = agent_flags(AGENTS[algorithm], {})
    texts = data.draw(st.dictionaries(st.sampled_from(dataclasses.fields(kind)), VALUES, min_size=1, max_size=2))
    words = []
    for field in texts:
        # A switch has no value.
        texts[field] = "True" if isinstance(field.default, bool) else texts[field]
        words += [f"--{field.name.replace('_', '-')}"] + ([] if isinstance(field.default, bool) else [texts[field]])
    try:
        with contextlib.redirect_stderr(io.StringIO()) as err:
            flags = parse(kind, words, prog="", description="")
    except UsageError:
        return
    except SystemExit as left:
        assert left.code == 2 and err.getvalue()
        return
    assert all(is_meant(getattr(flags, field.name), text) for field, text in texts.items())
    values = {name: with_length(value, 100) for name, value in explicit_settings(flags, words).items()}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of settings without effect
            agent = make(algorithm, **values)
    except (TypeError, ValueError) as error:
        assert str(error).startswith(f"{agent_class(algorithm).__name__}: ") and any(name in str(error) for name in values)
        return
    numbers = [leaf for name in values for leaf in jax.tree.leaves(getattr(agent, name)) if isinstance(leaf, int | float)]
    assert all(map(math.isfinite, numbers))


PROGRAM = """
import resource, sys
from polyak.cli import main
try:
    main(sys.argv[1:])
except SystemExit:
    pass
used = resource.getrusage(resource.RUSAGE_SELF)
print("jax" in sys.modules, used.ru_utime + used.ru_stime)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", ["list", "train ppo CartPole-v1 --help", "train ppo HalfCheetah-v5 --help", "train ppo CartPole-v1 --gama 1"]
)
def test_lists_help_and_misspelt_flags_import_no_jax_and_take_less_than_half_a_second(words):
    seconds = []
    for _ in range(4):
        done = subprocess.run([sys.executable, "-c", PROGRAM, *words.split()], capture_output=True, text=True, check=True)
        has_jax, cpu_seconds = done.stdout.splitlines()[-1].split()
        assert has_jax == "False"
        seconds.append(float(cpu_seconds))
    # CPU time, as tests share their cores with others; with JAX it is 1.2 s.
    assert min(seconds) < 0.5
