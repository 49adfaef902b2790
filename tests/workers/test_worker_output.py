import warnings

import pytest

from polyak.workers.worker_output import MAX_WARNINGS, RecordedWarnings, WarningsOfWorkers, WithOutputFile


def test_warnings_are_recorded_and_still_shown(monkeypatch):
    shown = []
    monkeypatch.setattr(warnings, "showwarning", lambda *arguments: shown.append(str(arguments[0])))
    recorded = RecordedWarnings()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("first", RuntimeWarning, stacklevel=1)
        ((category, text, filename, _),) = recorded.take()
        assert (category, text, filename, shown) == ("RuntimeWarning", "first", __file__, ["first"])
        for number in range(MAX_WARNINGS + 5):
            warnings.warn(f"warning {number}", stacklevel=1)
    assert len(recorded.take()) == MAX_WARNINGS and recorded.take() == [] and len(shown) == MAX_WARNINGS + 6


def test_equal_warnings_of_several_workers_are_issued_once():
    issue = WarningsOfWorkers().issue
    with pytest.warns(RuntimeWarning, match="env 0 is slow") as caught:
        issue([("RuntimeWarning", "env 0 is slow", "a.py", 1)])
        issue([("RuntimeWarning", "env 2 is slow", "a.py", 1)])
    assert len(caught) == 1 and (caught[0].filename, caught[0].lineno) == ("a.py", 1)


def test_a_worker_creates_no_run_directory(tmp_path):
    with pytest.raises(FileNotFoundError):
        WithOutputFile(dict, str(tmp_path / "run" / "workers" / "0.log"))()
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("name", ["OfAPackage", "print", "ValueError"])
def test_a_warning_of_an_unknown_category_is_a_user_warning(name):
    with pytest.warns(UserWarning, match="of a test"):
        WarningsOfWorkers().issue([(name, "of a test", "a.py", 1)])
