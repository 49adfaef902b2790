"""The model card of a packed policy, in Markdown with the header that model hubs read."""

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from polyak.core.printing import format_number
from polyak.reports.records import RunRecord
from polyak.reports.tags import EVAL_RETURN


def public_command(system: Mapping[str, Any]) -> list[str]:
    """Return the command line of `polyak train` without `--run-dir`; [] for a training in Python."""
    words = system.get("command_line")
    if not isinstance(words, list) or len(words) < 2:
        return []
    program = Path(str(words[0])).parts
    if program[-1:] != ("polyak",) and program[-2:] != ("polyak", "__main__.py"):
        return []
    command = ["polyak"]
    rest = iter(map(str, words[1:]))
    for word in rest:
        flag, _, value = word.partition("=")
        if flag.replace("_", "-") != "--run-dir":
            command.append(word)
        elif not value:
            next(rest, None)
    return command


def make_card(record: RunRecord, env_steps: int, file: str, members: Sequence[str], *, is_best: bool, needs_agent: bool) -> str:
    """Return the model card: a header in YAML, whose texts are JSON strings, and Markdown.

    Args:
        record: the run.
        env_steps: env_steps of the policy.
        file: name of the packed file.
        members: names of the files in it.
        is_best: the policy has the best evaluation, else it is the newest.
        needs_agent: the network is user-defined, so loading takes an agent.
    """
    loading = f"{json.dumps(file)}{', agent=agent' if needs_agent else ''}"
    evaluating = f"{shlex.quote(file)}{' --agent MODULE:NAME' if needs_agent else ''}"
    algorithm, env = record.algorithm, record.env
    name = f"{algorithm.upper().replace('_', '-')} in {env}"
    score = _score(record, env_steps, is_best=is_best)
    header = ["---", "library_name: polyak", "tags:", "- reinforcement-learning", f"- {json.dumps(algorithm)}"]
    header += [f"- {json.dumps(env)}"]
    if score is not None:
        header += [
            "model-index:",
            f"- name: {json.dumps(name)}",
            "  results:",
            "  - task: {type: reinforcement-learning, name: reinforcement-learning}",
            f"    dataset: {{name: {json.dumps(env)}, type: {json.dumps(env)}}}",
            f"    metrics: [{{type: mean_reward, name: mean_reward, value: {json.dumps(score)}}}]",
        ]
    header.append("---")
    command = public_command(record.system)
    parts = [
        "\n".join(header),
        f"# {_inline(name)}",
        f"A policy of {env_steps:,} {record.unit}, trained with polyak"
        + (f". Return of the greedy policy: **{score}**." if score is not None else "."),
        f"![Returns by {record.unit}](curve.svg)" if "curve.svg" in members else "",
        "".join(f"[Video of an episode]({member})" for member in members if member.startswith("video")),
        "## Use",
        f"```python\nimport polyak\n\npolicy = polyak.load_policy({loading})\naction, _ = policy.predict(obs)\n```",
        f"```sh\npolyak evaluate {evaluating}\n```",
        "Loading runs no code of the file.",
        f"## Training\n\n{_block(shlex.join(command))}" if command else "",
        "## Settings\n\n| setting | value |\n|---|---|\n"
        + "\n".join(f"| {_code(key)} | {_code(value)} |" for key, value in record.settings.items()),
        "## Versions\n\n| package | version |\n|---|---|\n"
        + "\n".join(f"| {_code(key)} | {_code(value)} |" for key, value in _versions(record.system).items()),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _score(record: RunRecord, env_steps: int, *, is_best: bool) -> str | None:
    """Return `500.0 ± 0.0 over 20 episodes`; None if the policy was not evaluated."""
    if is_best:
        evaluations = record.evaluations
        means = [m for n, m in zip(evaluations["env_steps"], evaluations.get(EVAL_RETURN, ()), strict=False) if n == env_steps]
        return f"{format_number(means[0])} over {record.config.get('eval_episodes')} episodes" if means else None
    summary = record.summary or {}
    mean, std, episodes = (summary.get(f"eval_{name}") for name in ("mean_return", "std_return", "episodes"))
    # While a resumed run trains, or after it was killed, the summary describes an earlier policy.
    if mean is None or std is None or summary.get("env_steps") != env_steps:
        return None
    return f"{format_number(mean)} ± {format_number(std)} over {episodes} episodes"


def _versions(system: Mapping[str, Any]) -> dict[str, Any]:
    packages = system.get("packages")
    return {"python": system.get("python")} | (packages if isinstance(packages, dict) else {})


def _inline(text: str) -> str:
    """Escape the characters that have a meaning in Markdown and HTML."""
    return "".join(f"\\{c}" if c in "\\`*_{}[]<>()#!|~" else c for c in text)


def _block(command: str) -> str:
    """Return a block of code, with more backticks around it than in it."""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", command)), default=0))
    return f"{fence}sh\n{command}\n{fence}"


def _code(value: Any) -> str:
    """Return a value as code in a table."""
    text = " ".join(str(value).split()).replace("|", "\\|")
    fence = "``" if "`" in text else "`"
    return f"{fence} {text} {fence}" if "`" in text or not text else f"`{text}`"
