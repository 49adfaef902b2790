import json
import os

import pytest

from polyak.storage.run_files import RunError
from polyak.studies.journal import LOCK, OPTIONS, TRIALS, Trial, open_study
from polyak.studies.space import Choices, Range

SPACE = {"gamma": Range(0.5, 1.0), "hidden": Choices(([64], [64, 64]))}
TASK = {"env": "a", "seeds": 2, "space": {"gamma": {"low": 0.5}}}
BASELINE = Trial(0, "complete", {}, 3.0, (2.0, 4.0), None, {1: 1.0, 2: 3.0}, {"completed_rung_0": 1.0})
TRIAL = Trial(1, "failed", {"gamma": 0.75, "hidden": [64, 64]}, None, (), "NaN")


@pytest.fixture
def path(tmp_path):
    with open_study(tmp_path / "s", TASK, SPACE) as journal:
        journal.add(BASELINE)
        journal.add(TRIAL)
    return tmp_path / "s"


def test_trials_are_read_back_and_half_a_line_is_dropped(path):
    with (path / TRIALS).open("a") as file:
        file.write('{"number": 2, "sta')
    with open_study(path, TASK, SPACE) as journal:
        assert journal.trials == {0: BASELINE, 1: TRIAL}
        journal.add(Trial(2, "pruned", {"gamma": 1.0, "hidden": [64]}, 0.5, evaluations={1: 0.5}))
    with open_study(path, TASK, SPACE) as journal:
        assert list(journal.trials) == [0, 1, 2]


def test_another_study_is_rejected_and_nothing_changes(path):
    before = (path / OPTIONS).read_bytes()
    with (
        pytest.raises(RunError, match="is another study, whose seeds is 2, got 3; pass a new directory"),
        open_study(path, TASK | {"seeds": 3}, SPACE),
    ):
        pass
    with pytest.raises(RunError, match="is another study, whose space differs"), open_study(path, TASK | {"space": {}}, SPACE):
        pass
    assert (path / OPTIONS).read_bytes() == before


def test_a_study_runs_once_at_a_time(path):
    says = pytest.raises(RunError, match=f"already running, by process '?{os.getpid()}")
    with open_study(path, TASK, SPACE), says, open_study(path, TASK, SPACE):
        pass


def test_other_directories_are_rejected_as_they_are(tmp_path):
    (tmp_path / "notes").write_text("mine")
    (tmp_path / "file").write_text("mine")
    for path in (tmp_path, tmp_path / "file"):
        with pytest.raises(RunError, match="exists and is no study; pass a new directory"), open_study(path, TASK, SPACE):
            pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "notes"]
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / LOCK).touch()  # of a kill at the start
    with open_study(tmp_path / "new", TASK, SPACE) as journal:
        assert journal.trials == {}


ROW = {
    **{"number": 1, "state": "complete", "settings": {"gamma": 0.75, "hidden": [64]}, "score": 1.0, "scores": [1.0]},
    **{"error": None, "evaluations": {"1": 1.0}, "rungs": {}, "fresh_scores": [], "fresh_error": None},
}


@pytest.mark.parametrize(
    "change",
    [
        *({"number": -1}, {"number": "1"}, {"number": 10**9}, {"state": "running"}, {"scores": []}, {"score": None}),
        *({"settings": {}}, {"settings": {"gamma": 2.0, "hidden": [64]}}, {"settings": {"gamma": 0.75, "hidden": [1]}}),
        *({"settings": []}, {"score": "1"}, {"evaluations": {"x": 1.0}}, {"evaluations": []}, {"rungs": {"a": {"b": 1}}}),
    ],
)
def test_a_damaged_line_is_named(path, change):
    with (path / TRIALS).open("a") as file:
        file.write(json.dumps(ROW | change) + "\n")
    with pytest.raises(RunError, match=r"trials.jsonl, line 3: is no trial of this study"), open_study(path, TASK, SPACE):
        pass


def test_a_line_that_is_no_json_is_named(path):
    with (path / TRIALS).open("a") as file:
        file.write("nothing\n")
    with pytest.raises(RunError, match=r"trials.jsonl, line 3: not valid JSON"), open_study(path, TASK, SPACE):
        pass
