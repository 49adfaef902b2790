"""`polyak.pack`: a trained policy with its settings, scores, curve, video and model card as one file."""

import dataclasses
import io
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from polyak.core.struct import struct
from polyak.core.tags import RETURN
from polyak.core.types import Agent, PyTree
from polyak.reports.curves import group_runs, read_samples
from polyak.reports.model_card import make_card, public_command
from polyak.reports.records import RunRecord, load_run
from polyak.runs import open_checkpoints, read_config
from polyak.storage.checkpoint import restore, save
from polyak.storage.directory import directory_name
from polyak.storage.pack import CARD, write_pack
from polyak.storage.progress import replay_path
from polyak.storage.run_directory import BEST, CONFIG, METRICS, SUMMARY, SYSTEM, RunError, is_run_file, package_version

MAX_VIDEO_BYTES = 64 * 2**20
"""Maximum number of bytes of the video; a larger video is left out."""


@struct
class _PackedState:
    """The state of a training loop without environments, keys and counters: the agent's state has the same path in it."""

    agent: PyTree


def pack(
    run: str | os.PathLike[str], output: str | os.PathLike[str], *, best: bool = False, agent: Agent | None = None
) -> Path:
    """Write one file with the policy of a run, its settings, scores, metrics, curve, newest video and a model card.

    The file is a zip archive; `polyak.load_policy` and `polyak evaluate` take it, and nothing in it runs code. The card,
    `README.md`, is in Markdown with the header that model hubs read. The file has no replay and no state of environments. All
    settings are in it, with `env_kwargs`, and the command line of `polyak train` without its `--run-dir`.

    Args:
        run: the run directory.
        output: the file, replaced if it exists; its suffix is .zip.
        best: pack the policy with the best evaluation (`eval_every`) in place of the newest; the video is the newest.
        agent: an agent with the run's settings, if its network is user-defined; then `load_policy` needs it too.

    Returns:
        The file.

    Raises:
        RunError, ConfigError, CheckpointError: the run is missing, damaged or has no valid checkpoint, or the file cannot be
            written.
        ValueError: `output` has another suffix, or is a file of a run.
    """
    path = Path(output)
    if path.suffix != ".zip":
        raise ValueError(f"pack: output must end in .zip, got {str(path)!r}")
    if is_run_file(path):
        raise ValueError(f"pack: output must be a separate file, got {path}, a file of a run")
    record = load_run(run)
    opened, checkpoints = open_checkpoints(record.directory / BEST if best else record.directory)
    trained = read_config(opened, agent).agent
    with tempfile.TemporaryDirectory() as temporary:
        env_steps, files = _copy_policy(checkpoints, trained, Path(temporary))
    try:
        members = _read_members(record)
    except OSError as error:
        raise RunError(f"{record.directory}: a file cannot be read: {error}") from error
    card = make_card(record, env_steps, path.name, [*members], is_best=best, needs_agent=agent is not None)
    write_pack(path, {CARD: card.encode(), **members, **files})
    return path


def _read_members(record: RunRecord) -> dict[str, bytes]:
    """Return the files of a pack but the card and the policy."""
    members = {CONFIG: (record.directory / CONFIG).read_bytes(), SYSTEM: _to_json(_public_system(record.system))}
    if record.summary is not None:
        stopped = record.summary.get("stopped")
        # The kind of an error: its text may name files.
        public = {"stopped": stopped.partition(":")[0] if isinstance(stopped, str) else None}
        members[SUMMARY] = _to_json({**record.summary, **public})
    if (record.directory / METRICS).exists():
        members[METRICS] = (record.directory / METRICS).read_bytes()
    if (curve := _draw_curve(record)) is not None:
        members["curve.svg"] = curve
    if (video := _newest_video(record.directory)) is not None:
        members[f"video{video.suffix}"] = video.read_bytes()
    return members


def _copy_policy(checkpoints: Path, agent: Agent, directory: Path) -> tuple[int, dict[str, bytes]]:
    """Save the agent's state without replay again; returns its env_steps, and the files by name."""
    replay = replay_path(agent)
    template = jax.eval_shape(agent.init, jax.random.key(0))
    restored = restore(checkpoints, template, prefix=".agent", skip=replay)
    field = {} if replay is None else {replay.removeprefix(".agent."): None}
    state = _PackedState(dataclasses.replace(restored.tree, **field))
    path = save(directory / "checkpoints", state, step=restored.step, meta={}, allow_nonfinite=True)
    name = f"checkpoints/{directory_name(restored.step)}"
    return restored.step, {f"{name}/{file.name}": file.read_bytes() for file in sorted(path.iterdir())}


def _newest_video(directory: Path) -> Path | None:
    videos = [path for path in (directory / "videos").glob("*") if path.suffix in (".mp4", ".gif") and path.is_file()]
    small = [path for path in videos if path.stat().st_size <= MAX_VIDEO_BYTES and not path.is_symlink()]
    return max(small, key=lambda path: path.name, default=None)


def _draw_curve(record: RunRecord) -> bytes | None:
    """Draw returns by env_steps as SVG; None without matplotlib or without returns."""
    if package_version("matplotlib") is None:
        return None
    samples = read_samples([record], (RETURN,))
    returns = [columns[RETURN] for columns in samples.columns.values() if RETURN in columns]
    if not any(np.isfinite(values).any() for values in returns):
        return None
    from polyak.reports.figures import save_figure
    from polyak.reports.plots import draw

    buffer = io.BytesIO()
    save_figure(draw(group_runs([record]), samples, [RETURN], "env_steps", (140.0, None), None), buffer, "svg")
    return buffer.getvalue()


def _public_system(system: Mapping[str, Any]) -> dict[str, Any]:
    """Return versions and kind of the machine, and the command line without directories."""
    public = {name: value for name, value in system.items() if name not in ("command_line", "resumed")}
    return public | {"command_line": public_command(system)}


def _to_json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, indent=2).encode()
