"""The defaults of other libraries that the migration pages name, compared with the installed library, row by row.

    python benchmarks/migration.py stable-baselines3    # needs what requirements-sb3.txt names, and sb3-contrib
    python benchmarks/migration.py tf-agents            # needs what requirements-tf_agents.txt names

polyak is not imported: `tests/test_docs_defaults.py` compares polyak's side of the same rows with its fields. RL Coach can no
longer be installed, so only polyak's side of its page is compared.

The last cell of a row is read clause by clause (up to `;` or a full stop): `2048 there, 256 here`, or `DQN and QRDQN 4, the
others 1 in both`. Its values belong to the names of the row, in their order, for the agents that it names, else for all agents
of the table. A clause with any other word between its values and the side is left out.
"""

import functools
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

TUTORIALS = Path(__file__).parents[1] / "docs" / "tutorials"
# The class of each agent, by the name of the library's page.
TF_AGENTS = {"PPO": "PPO", "DQN": "Dqn", "C51": "CategoricalDqn", "SAC": "Sac", "TD3": "Td3", "DDPG": "Ddpg"}
CLASSES = {
    "stable-baselines3": {name: f"stable_baselines3.{name}" for name in ("PPO", "DQN", "SAC", "TD3", "DDPG")}
    | {name: f"sb3_contrib.{name}" for name in ("QRDQN", "TQC")},
    "tf-agents": {agent: f"tf_agents.agents.{name}Agent" for agent, name in TF_AGENTS.items()},
    "rl-coach": {name: name for name in ("PPO", "A2C", "REINFORCE", "DQN", "C51", "QRDQN", "SAC", "TD3", "DDPG")},
}
# Agents that only count for a table that names them.
WITHOUT_REPLAY = ("PPO", "A2C", "REINFORCE")
NUMBER = r"-?\d{1,3}(?:,\d{3})+|-?\d+(?:\.\d+)?(?:e-?\d+)?"
TOKEN = re.compile(
    r"(?P<side>in both\b|there\b|here\b)|(?P<agent>\b(?:PPO|A2C|REINFORCE|DQN|C51|QRDQN|SAC|TQC|TD3|DDPG|the others)\b)"
    rf"|(?P<value>-dim A(?: / 2)?|\(\d+, \d+\)|`\"[^`]+`|\b(?:off|True|False)\b|{NUMBER})|(?P<word>`[^`]+`|[^\W\d]+)"
)
NEUTRAL = {"and", "of", "environment", "gradient", "steps", "transitions", "ε"}
# What a value may stand for: None is "off".
MEANINGS: dict[Any, tuple[Any, ...]] = {None: (None, False, 0), "-dim A": (None, "auto"), "-dim A / 2": (None,)}


class Default(NamedTuple):
    """What a row says: the default of a name for an agent, on the side `"there"` or `"here"`."""

    side: str
    agent: str
    name: str
    value: Any
    is_agent_named: bool


def agrees(value: Any, default: Any) -> bool:
    return default in MEANINGS.get(value, (value,))


def to_value(text: str) -> Any:
    words = {"off": None, "True": True, "False": False}
    if text.startswith("("):
        return tuple(map(int, re.findall(r"\d+", text)))
    return float(text.replace(",", "")) if re.fullmatch(NUMBER, text) else words.get(text, text.strip('`"'))


def names_in(cell: str) -> list[str]:
    """The names of a cell: `gamma`, and for `Actor(hidden=..., activation=...)` `Actor.hidden` and `Actor.activation`."""
    names = []
    for span in re.findall(r"`([^`]+)`", cell):
        call = re.fullmatch(r"(\w+)\((.*)\)", span)
        names += [f"{call[1]}.{name}" for name in re.findall(r"(\w+)=", call[2])] if call else [span.split("=")[0]]
    return names


def clauses(text: str, agents: Sequence[str]) -> Iterator[tuple[str, list[str], list[Any]]]:
    """The side, agents (empty if none is named) and values of each group of values in a last cell."""
    known: dict[str, list[str]] = {"there": [], "here": []}
    for clause in re.split(r";|\. ", re.sub(r"\((?!\d+, \d+\))[^)]*\)", "", text)):
        groups: list[tuple[list[str], list[Any]]] = [([], [])]
        before, is_clear = [], True
        for token in TOKEN.finditer(clause):
            match token.lastgroup, token[0]:
                case "word", word:
                    is_clear &= word in NEUTRAL
                case "value", value:
                    groups[-1][1].append(to_value(value))
                case "agent", agent:
                    if groups[-1][1]:
                        groups.append(([], []))
                    groups[-1][0].append(agent)
                case _, words:
                    before = [agent for named, _ in groups for agent in named] or before
                    for side in ("there", "here") if words == "in both" else (words,):
                        for named, values in groups if is_clear else ():
                            others = [agent for agent in agents if agent not in known[side]]
                            each = others if named == ["the others"] else named or before
                            known[side] += each
                            yield side, each, values
                    groups, is_clear = [([], [])], True


def read_page(library: str) -> Iterator[tuple[str, list[Default]]]:
    """Each row of the tables of arguments, with the defaults in it."""
    classes = {path.split(".")[-1]: agent for agent, path in CLASSES[library].items()}
    page = (TUTORIALS / f"from-{library}.md").read_text()
    for section in re.findall(r"^## (Every .*?)(?=^## |\Z)", page, re.MULTILINE | re.DOTALL):
        for header, rows in re.findall(r"\n(\|.*)\n\|-.*\n((?:\|.*\n)*)", section):
            words = re.findall(r"\w+", f"{section.splitlines()[0]} {header}")
            agents = [agent for name, agent in classes.items() if name in words]
            agents = agents or [agent for agent in classes.values() if agent not in WITHOUT_REPLAY]
            for row in rows.splitlines():
                theirs, ours, *text = row.strip("|").split(" | ")
                sides, found = {"there": names_in(theirs), "here": names_in(ours)}, []
                for side, named, values in clauses(text[0] if text else "", agents):
                    # One "off" is for all names.
                    pairs = dict(zip(sides[side], values * len(sides[side]) if values == [None] else values, strict=False))
                    for agent in named or agents:
                        found += [Default(side, agent, name, value, bool(named)) for name, value in pairs.items()]
                yield row, found


@functools.cache
def defaults_of(library: str, agent: str) -> dict[str, Any]:
    """The defaults of an agent's arguments; with Stable-Baselines3 also those of its policy, read from a model."""
    module, name = CLASSES[library][agent].rsplit(".", 1)
    create = getattr(importlib.import_module(module), name)
    found = {key: parameter.default for key, parameter in inspect.signature(create).parameters.items()}
    if library == "stable-baselines3":
        small = {"buffer_size": 10} if "buffer_size" in found else {}
        policy = create("MlpPolicy", "CartPole-v1" if "DQN" in agent else "Pendulum-v1", **small).policy
        found |= {key: parameter.default for key, parameter in inspect.signature(type(policy)).parameters.items()}
        found |= {key: value for key, value in getattr(policy, "critic_kwargs", {}).items() if key == "n_critics"}
        optimizer = getattr(policy, "optimizer", None) or policy.actor.optimizer
        found |= {"net_arch": tuple(policy.net_arch), "optimizer_kwargs": optimizer.defaults["eps"]}
    return found


def main(library: str) -> None:
    rows, compared, wrong = list(read_page(library)), [], 0
    for row, defaults in rows:
        known = [d for d in defaults if d.is_agent_named or d.name in defaults_of(library, d.agent)]
        compared.append([default for default in known if default.side == "there"])
        for default in compared[-1]:
            installed = defaults_of(library, default.agent).get(default.name, "no such argument")
            if not agrees(default.value, installed):
                wrong += 1
                print(f"{default.agent} {default.name}: {default.value!r} on the page, {installed!r} installed\n    {row}")
    counts = f"{len(rows)} rows read, {sum(map(bool, compared))} compared ({sum(map(len, compared))} values)"
    print(f"from-{library}.md: {counts}, {wrong} values disagree")
    sys.exit(wrong > 0)


if __name__ == "__main__":
    main(sys.argv[1]) if sys.argv[1:] in (["stable-baselines3"], ["tf-agents"]) else sys.exit(__doc__)
