"""The report of a study: its history, its best settings, their importances, and a table of all trials."""

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from jax.scipy.special import betainc

from polyak.core.printing import format_number
from polyak.core.text_table import NOTHING
from polyak.reports.charts import Chart, Line
from polyak.reports.page import render_page
from polyak.reports.views import Cell, Column, Row, StudyView, Table, Tile, number_cell
from polyak.storage.files import write_file
from polyak.studies.journal import BEST, STATES, Trial

MIN_COMPARED, LEVEL = 3, 0.05
"""Least number of fresh seeds that are compared, and the probability of a difference by chance."""


def write_page(path: Path, title: str, trials: Sequence[Trial], best: Trial, importances: Mapping[str, float]) -> bool:
    """Write the report of a study, if the extra `report` is there; returns False if it is not.

    Args:
        path: the file, replaced if it exists.
        title: algorithm and environment.
        trials: all trials by number.
        best: the best one.
        importances: importances by setting.

    Raises:
        OSError: the file cannot be written.
    """
    view = make_view(path.parent, title, trials, best, importances)
    try:
        page = render_page(view)
    except ImportError:
        return False
    write_file(path, page)
    return True


def make_view(directory: Path, title: str, trials: Sequence[Trial], best: Trial, importances: Mapping[str, float]) -> StudyView:
    """Return the content of the report."""
    counts = [(state, sum(trial.state == state for trial in trials)) for state in STATES]
    baseline = trials[0]
    tiles = [
        Tile("trials", str(len(trials)), ", ".join(f"{count} {state}" for state, count in counts if count)),
        Tile("best score", _score(best), f"trial {best.number}"),
        Tile("preset's score", _score(baseline), "trial 0"),
    ]
    if best.fresh_scores and best.number != baseline.number:
        tiles.append(Tile("best, fresh seeds", *_mean_and_range(best.fresh_scores)))
    if baseline.fresh_scores:
        tiles.append(Tile("preset, fresh seeds", *_mean_and_range(baseline.fresh_scores)))
    return StudyView(
        title=title,
        path=str(directory.resolve()),
        tiles=tiles,
        notes=[describe_worth(best, baseline)],
        history=_history(trials),
        importances=Table(
            "Importances",
            [Column("setting"), Column("importance", is_number=True)],
            [Row([Cell(name), number_cell(share, f"{share:.2f}")]) for name, share in importances.items()],
        ),
        best=[(name, setting_text(value)) for name, value in best.settings.items()],
        command=f"polyak train {title} --preset {directory / BEST}",
        trials=_trial_table(trials),
        errors=[f"trial {trial.number}: {trial.error}" for trial in trials if trial.error],
    )


def describe_worth(best: Trial, baseline: Trial) -> str:
    """Say how much of the best score remains with fresh seeds, compared with the baseline."""
    selected = f"The score of trial {best.number}, {_score(best)}, is the highest of several noisy scores, so it is too high."
    if best.number == baseline.number:
        return "No trial has a higher score than the preset's settings, trial 0."
    if best.fresh_error is not None:
        return f"{selected} With fresh seeds a training failed: {best.fresh_error}."
    if not best.fresh_scores:
        return f"{selected} No fresh seeds were trained to measure it again."
    count, own = len(best.fresh_scores), _mean_and_range(best.fresh_scores)
    measured = f"With {count} fresh seeds its mean is {own[0]} ({own[1]})"
    if not baseline.fresh_scores:
        failed = f"failed: {baseline.fresh_error}" if baseline.fresh_error is not None else "has none"
        return f"{selected} {measured}; the preset {failed}."
    other = _mean_and_range(baseline.fresh_scores)
    verdict = _compare(best.fresh_scores, baseline.fresh_scores)
    return f"{selected} {measured}, the preset's {other[0]} ({other[1]}): {verdict}."


def _compare(scores: Sequence[float], others: Sequence[float]) -> str:
    """Say whether the mean of some scores differs from the mean of others, by Welch's test with a level of 5 %."""
    if min(len(scores), len(others)) < MIN_COMPARED:
        return f"too few seeds for a comparison, at least {MIN_COMPARED} are needed"
    difference = float(np.mean(scores) - np.mean(others))
    squares = [float(np.var(x, ddof=1)) / len(x) for x in (scores, others)]
    if sum(squares) == 0.0:
        return "better" if difference > 0 else "worse" if difference < 0 else "no different"
    freedom = sum(squares) ** 2 / sum(x**2 / (len(y) - 1) for x, y in zip(squares, (scores, others), strict=True))
    chance = betainc(freedom / 2, 0.5, freedom / (freedom + difference**2 / sum(squares)))
    return "no different within the noise" if chance > LEVEL else "better" if difference > 0 else "worse"


def setting_text(value: Any) -> str:
    """Return the value of a setting as in a TOML file, with few digits."""
    if value is None or isinstance(value, str):
        return str(value)
    return f"{value:.4g}" if isinstance(value, float) else json.dumps(value)


def _score(trial: Trial) -> str:
    return NOTHING if trial.score is None else format_number(trial.score)


def _mean_and_range(scores: Sequence[float]) -> tuple[str, str]:
    return format_number(float(np.mean(scores))), f"{format_number(min(scores))} to {format_number(max(scores))}"


def _history(trials: Sequence[Trial]) -> Chart:
    ended = [trial for trial in trials if trial.score is not None]
    complete = [(trial.number, trial.score) for trial in ended if trial.state == "complete"]
    best = list(itertools.accumulate((score for _, score in complete if score is not None), max))
    x = np.array([number for number, _ in complete], np.float64)
    lines = [
        Line("best so far", x, np.array(best, np.float64), 0),
        Line("complete trials", x, np.array([score for _, score in complete], np.float64), 1),
    ]
    note = "Score of each complete trial, and the best score so far; trial 0 has the preset's settings."
    return Chart("history", "Score", note, {"": lines}, x_label="trial")


def _trial_table(trials: Sequence[Trial]) -> Table:
    names = list(dict.fromkeys(name for trial in trials for name in trial.settings))
    columns = [Column("trial"), Column("state"), Column("score", is_number=True)]
    columns += [Column("fresh seeds", is_number=True), *map(Column, names)]
    rows = []
    for trial in trials:
        fresh = float(np.mean(trial.fresh_scores)) if trial.fresh_scores else None
        cells = [Cell(str(trial.number), trial.number), Cell(trial.state), number_cell(trial.score), number_cell(fresh)]
        rows.append(Row([*cells, *(_setting_cell(trial.settings, name) for name in names)]))
    return Table("All trials", columns, rows, sorts=True)


def _setting_cell(settings: Mapping[str, Any], name: str) -> Cell:
    if name not in settings:
        return Cell("preset")
    value = settings[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return Cell(setting_text(value), float(value) if is_number else None)
