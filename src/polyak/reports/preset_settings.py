"""The settings of a run that differ from its preset, as texts."""

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from polyak.agents import AGENTS
from polyak.core.printing import text_of
from polyak.core.text_table import NOTHING
from polyak.reports.flat_settings import flatten_settings

MAX_TEXT = 200
"""Maximum number of characters of a setting's text."""


def setting_text(value: Any) -> str:
    """Return the text of a setting, shortened.

    >>> setting_text(3e-4), setting_text([64, 64]), setting_text("host")
    ('0.0003', '[64, 64]', 'host')
    """
    text = value if isinstance(value, str) else text_of(value)
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 3]}..."


def inside_rnd(agent: Any) -> Any:
    """Return the description of the agent that `polyak.RND` surrounds; None for one without RND."""
    return agent.get("agent") if isinstance(agent, Mapping) and agent.get("$class") == "RND" else None


def algorithm_of(config: Mapping[str, Any]) -> str:
    """Return the algorithm of a run, or of the agent inside RND."""
    inner = inside_rnd(config.get("agent"))
    name = inner.get("$class") if isinstance(inner, Mapping) else None
    return next((known for known, source in AGENTS.items() if source.endswith(f":{name}")), str(config.get("algorithm")))


def changed_settings(config: Mapping[str, Any]) -> list[tuple[str, str, str]] | None:
    """Return the agent's settings that differ from the preset's, each as (name, value, value of the preset).

    Settings of RND are compared with its defaults.

    Returns:
        None if there is no preset to compare with: the agent's class is user-defined, or the description is damaged.
    """
    agent, env_steps = config.get("agent"), config.get("env_steps")
    has_rnd = inside_rnd(agent) is not None
    inner = inside_rnd(agent) if has_rnd else agent
    if not isinstance(inner, Mapping) or "spec" not in inner or type(env_steps) is not int:
        return None
    preset = _preset_settings(algorithm_of(config), str(config.get("env")), env_steps, json.dumps(inner["spec"]), has_rnd)
    if preset is None:
        return None
    own = {name: setting_text(value) for name, value in flatten_settings({"agent": agent}).items()}
    names = [*own, *(name for name in preset if name not in own)]
    pairs = [(name, own.get(name, NOTHING), preset.get(name, NOTHING)) for name in names]
    return [(name, value, before) for name, value, before in pairs if value != before]


@lru_cache(64)
def _preset_settings(algorithm: str, env: str, env_steps: int, spec: str, has_rnd: bool) -> dict[str, str] | None:
    """Return the settings of the agent that the preset makes for this run."""
    # JAX takes most of a second, which a comparison of runs does without.
    from polyak.agents import agent_class
    from polyak.presets import preset
    from polyak.runs import config_classes
    from polyak.storage.config import from_json, to_json

    if algorithm not in AGENTS:
        return None
    try:
        env_spec = from_json(json.loads(spec), config_classes())
        agent = agent_class(algorithm)(spec=env_spec, **preset(algorithm, env).settings(env_steps))
        agent = agent_class("rnd")(agent) if has_rnd else agent
    except (TypeError, ValueError):
        return None
    settings = flatten_settings({"agent": to_json(agent, on_unknown="describe")})
    return {name: setting_text(value) for name, value in settings.items()}
