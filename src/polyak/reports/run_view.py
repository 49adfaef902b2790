"""The page of one run: summary, warnings, curves, times, evaluations, video, settings, command and machine."""

import base64
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from polyak.core.printing import format_number
from polyak.core.tags import RETURN
from polyak.core.text_table import NOTHING
from polyak.reports.charts import MAX_POINTS, STEPS, TIME, Chart, Line
from polyak.reports.curves import elapsed_seconds, thin
from polyak.reports.findings import Curve, Finding, find_faults
from polyak.reports.flat_settings import flatten_settings
from polyak.reports.preset_settings import algorithm_of, changed_settings, inside_rnd, setting_text
from polyak.reports.records import RunRecord
from polyak.reports.statistics import Floats
from polyak.reports.tags import EVAL_RETURN, group_tags, healthy_curve
from polyak.reports.views import Cell, ChartGroup, Column, Row, RunView, Status, Table, Tile, TimePart, Video, number_cell
from polyak.storage.columns import ENV_STEPS, EVALUATION, Columns, has_evaluation
from polyak.storage.files import read_bytes

MAX_ROWS = 4_000
"""Maximum number of rows of the metrics that a report of one run reads; rows between them are left out."""

MAX_VIDEO_BYTES = 2 * 2**20
"""Size above which a video is linked instead of being part of the page."""

KINDS = {"training": "busy", "done": "good", "stopped": "", "diverged": "bad", "failed": "bad", "killed": "bad"}
"""Color of each status."""


def describe_run(record: RunRecord, video_source: str | None = None, output: Path | None = None) -> RunView:
    """Return the page of a run.

    Args:
        record: the run.
        video_source: address of the newest video; None puts it into the page, or links it from `output`.
        output: file of the page.

    Raises:
        RunError: the metrics cannot be read or are damaged.
    """
    columns = record.read_metrics(max_rows=MAX_ROWS)
    agent = record.config.get("agent")
    agent = agent if isinstance(agent, Mapping) else {}
    curves = {tag: curve for tag in columns if tag != ENV_STEPS and len(curve := _curve(columns, tag))}
    changed = changed_settings(record.config)
    groups = _chart_groups(columns, curves, record.unit)
    return RunView(
        title=f"{record.algorithm} · {record.env}",
        path=str(record.directory),
        status=Status(record.status, KINDS.get(record.status, "")),
        tiles=_tiles(record, columns, curves),
        warnings=[*_endings(record), *find_faults(curves, agent, record.unit)],
        chart_groups=groups,
        no_curves="The run has no metrics yet." if record.status == "training" else "The run has no metrics.",
        spent=_spent(record),
        evaluations=_evaluations(columns, record.unit),
        evaluations_note="Evaluations of the greedy policy during training.",
        video=_video(record, video_source, output),
        settings_note=_settings_note(record, changed),
        preset_name="preset",
        changed_settings=changed or [],
        settings=[(name, setting_text(value)) for name, value in flatten_settings(record.config).items() if name != "sha256"],
        command=_command(record.system),
        command_note=_command_note(record),
        machine=_machine(record.system),
        resumptions=_resumptions(record.system),
    )


def _curve(columns: Columns, tag: str) -> Curve:
    has_value = np.isfinite(columns[tag])
    return Curve(columns[ENV_STEPS][has_value], columns[tag][has_value])


def _chart_groups(columns: Columns, curves: Mapping[str, Curve], unit: str) -> list[ChartGroup]:
    steps, seconds = columns[ENV_STEPS], elapsed_seconds(columns)
    has_time = bool(np.isfinite(seconds).any())
    groups = []
    for group, tags in group_tags(curves):
        charts = []
        for tag in tags:
            lines = {STEPS: [_line(tag, steps, columns[tag])]}
            if has_time:
                lines[TIME] = [_line(tag, seconds, columns[tag])]
            charts.append(Chart(tag, tag, healthy_curve(tag), lines, unit=unit))
        groups.append(ChartGroup(group.name, charts))
    return groups


def _line(tag: str, x: Floats, y: Floats) -> Line:
    has_value = np.isfinite(x) & np.isfinite(y)
    return Line(tag, *thin(x[has_value], y[has_value], MAX_POINTS))


def _tiles(record: RunRecord, columns: Columns, curves: Mapping[str, Curve]) -> list[Tile]:
    summary = record.summary or {}
    tiles = []
    mean, std, episodes = (_number(summary, f"eval_{name}") for name in ("mean_return", "std_return", "episodes"))
    if mean is not None:
        spread = f"± {format_number(std)}, " if std is not None else ""
        tiles.append(Tile("Greedy return", format_number(mean), f"{spread}{episodes or 0:,.0f} episodes at the end"))
    if RETURN in curves:
        returns = curves[RETURN]
        last, best = (format_number(float(value)) for value in (returns.values[-1], returns.values.max()))
        tiles.append(Tile("Training return", last, f"best {best}"))
    done = float(columns[ENV_STEPS][-1]) if len(columns[ENV_STEPS]) else _number(summary, "env_steps") or 0.0
    wanted = record.config.get(ENV_STEPS)
    tiles.append(Tile("Steps", f"{done:,.0f}", f"of {wanted:,} {record.unit}" if type(wanted) is int else record.unit))
    seconds = elapsed_seconds(columns)
    trained = float(np.nanmax(seconds)) if np.isfinite(seconds).any() else _number(summary, "train_seconds")
    if trained is not None:
        tiles.append(Tile("Training time", format_seconds(trained), "without compilation and evaluation"))
    if "time/fps" in curves:
        tiles.append(Tile("Speed", f"{float(curves['time/fps'].values[-1]):,.0f}/s", f"{record.unit} per second"))
    seed = "none" if record.seed is None else str(record.seed)
    tiles.append(Tile("Seed", seed, f"{record.config.get('loop')} loop, {record.config.get('num_envs')} environments"))
    return tiles


def _endings(record: RunRecord) -> list[Finding]:
    """The reason why the training ended early, if it did, and the number of resumptions."""
    if record.failure is not None:
        return [Finding("Ended early", record.failure)]
    if record.status == "killed":
        text = "The process ended without a summary: it was killed, or the machine stopped."
        return [Finding("Killed", f"{text} polyak resume continues the run.")]
    return []


def _spent(record: RunRecord) -> list[TimePart]:
    """Parts of the wall time of the last process."""
    summary = record.summary or {}
    wall = _number(summary, "wall_seconds")
    if wall is None or wall <= 0:
        return []
    known = {"training": _number(summary, "train_seconds") or 0.0, "compilation": _number(summary, "compile_seconds") or 0.0}
    known["evaluation, checkpoints and start"] = max(wall - sum(known.values()), 0.0)
    total, start, parts = sum(known.values()), 0.0, []
    for name, seconds in known.items():
        share = 100 * seconds / total
        parts.append(TimePart(name, f"{format_seconds(seconds)} ({share:.0f} %)", round(start, 2), round(share, 2)))
        start += share
    return parts


def _evaluations(columns: Columns, unit: str) -> Table:
    tags = [tag for tag in columns if tag.startswith(EVALUATION)]
    rows = np.flatnonzero(has_evaluation(columns))
    if len(rows) > 200:
        rows = rows[np.linspace(0, len(rows) - 1, 200).astype(int)]
    names = {EVAL_RETURN: "mean return", "eval/mean_ep_length": "mean length", "eval/success_rate": "success rate"}
    heads = [Column(unit), *(Column(names.get(tag, tag), is_number=True) for tag in tags)]
    body = []
    for row in rows:
        steps = float(columns[ENV_STEPS][row])
        body.append(Row([Cell(f"{steps:,.0f}", steps), *(number_cell(float(columns[tag][row])) for tag in tags)]))
    return Table("Evaluations", heads, body, sorts=True)


def newest_video(directory: Path) -> Path | None:
    """Return the newest MP4 in the run's `videos`, None without one; links are no videos of the run."""
    folder = directory / "videos"
    found: list[tuple[float, Path]] = []
    try:
        for entry in os.scandir(folder) if not folder.is_symlink() else ():
            if entry.name.endswith(".mp4") and entry.is_file(follow_symlinks=False):
                found.append((entry.stat().st_mtime, Path(entry.path)))
    except OSError:
        return None
    return max(found)[1] if found else None


def _video(record: RunRecord, source: str | None, output: Path | None) -> Video | None:
    path = newest_video(record.directory)
    if path is None:
        return None
    if source is None:
        try:
            source = f"data:video/mp4;base64,{base64.b64encode(read_bytes(path, limit=MAX_VIDEO_BYTES)).decode()}"
        except (OSError, ValueError):
            beside = os.path.relpath(path, output.parent.resolve()) if output is not None else str(path)
            source = Path(beside).as_posix()
    return Video(path.name, source)


def _settings_note(record: RunRecord, changed: list[tuple[str, str, str]] | None) -> str:
    if changed is None:
        return "The agent is user-defined, so there is no preset to compare its settings with."
    preset = f"the preset of {algorithm_of(record.config)} for {record.env}"
    preset += " and the defaults of RND" if inside_rnd(record.config.get("agent")) is not None else ""
    if not changed:
        return f"All settings of the agent are as in {preset}."
    return f"These settings of the agent differ from {preset}."


def _command(system: Mapping[str, Any]) -> str:
    """Return the command line that started the run, quoted for a shell; "" if it is unknown."""
    words = system.get("command_line")
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        return ""
    program, arguments = Path(words[0]), words[1:]
    is_polyak = program.name in ("polyak", "__main__.py")
    return shlex.join([*(["polyak"] if is_polyak else ["python", words[0]]), *arguments])


def _command_note(record: RunRecord) -> str:
    if not _command(record.system):
        return "The command line of this run is unknown."
    text, version = "A run directory must be new: choose another --run-dir.", _packages(record.system).get("polyak")
    if not version:
        return text
    return f"{text} The run was made by polyak {version}, and repeats to the bit on the same machine and versions."


def _packages(system: Mapping[str, Any]) -> Mapping[str, Any]:
    packages = system.get("packages")
    return packages if isinstance(packages, Mapping) else {}


def _machine(system: Mapping[str, Any]) -> list[tuple[str, str]]:
    rows = {name: value for name, value in system.items() if name not in ("packages", "command_line", "resumed")}
    rows |= _packages(system)
    return [(str(name), setting_text(value)) for name, value in rows.items() if value is not None]


def _resumptions(system: Mapping[str, Any]) -> Table:
    entries = system.get("resumed")
    rows = []
    for number, entry in enumerate(entries if isinstance(entries, list) else [], start=1):
        if isinstance(entry, Mapping):
            details = [setting_text(x or NOTHING) for x in (_packages(entry).get("polyak"), entry.get("system"))]
            rows.append(Row([Cell(text) for text in (str(number), _command(entry) or NOTHING, *details)]))
    return Table("Resumptions", [Column("#"), Column("command"), Column("polyak"), Column("system")], rows)


def _number(values: Mapping[str, Any], name: str) -> float | None:
    value = values.get(name)
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def format_seconds(seconds: float) -> str:
    """Return a duration.

    >>> format_seconds(3.25), format_seconds(95), format_seconds(7_300)
    ('3.2 s', '1 min 35 s', '2 h 1 min')
    """
    if not seconds >= 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
