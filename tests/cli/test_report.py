"""polyak report: reports from the command line."""

import pytest

from tests.reports.written_runs import linear_rows, write_run

pytest.importorskip("bokeh")


@pytest.fixture
def runs(workdir):
    for seed in range(2):
        write_run(workdir / f"runs/seed-{seed}", linear_rows(10, start=seed), seed=seed)
    return workdir / "runs"


def test_a_report_is_written_into_the_directory_or_the_given_file(runs, command, workdir, monkeypatch):
    opened = []
    monkeypatch.setattr("webbrowser.open", opened.append)
    code, out, err = command("report runs")
    assert (code, err, opened) == (0, "", []) and out.startswith("wrote runs/report.html (")
    code, out, err = command("report runs/seed-0 runs/seed-1 -o a.html --group-by seed num_envs --open")
    assert (code, err) == (0, "") and out.startswith("wrote a.html (")
    assert opened == [(workdir / "a.html").as_uri()]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "error: a run directory is missing: polyak report RUN... [flags]"),
        ("nothing", "error: nothing: there is no such directory; a run was expected"),
        ("runs -o no/a.html", "error: no/a.html: cannot be written: there is no directory no"),
        ("runs -o runs/seed-0/config.json", "error: report: output must be a separate file"),
        ("runs -o a.html --output b.html", "error: --output is set more than once"),
        ("runs --group-by", "error: report: group_by must be one name or more, got ()"),
        ("runs --group-by seeds", "error: group_by: unknown setting 'seeds'; did you mean 'seed'?"),
        ("runs --port 1", "error: --port 1 needs --live DIR"),
        ("--live nothing", "error: nothing: there is no such directory; the live page needs a directory of runs"),
        ("--live runs --port 65536", "error: --port must be between 0 and 65535, got 65536"),
        ("--live runs --port -1", "error: --port must be between 0 and 65535, got -1"),
        ("--live runs -o a.html", "error: --output has no effect with --live"),
        ("--live runs --group-by seed", "error: --group-by has no effect with --live"),
        ("runs --live runs", "error: --live takes no RUN beside its directory; got runs"),
        ("runs --open yes", "error: unexpected yes, as no flag takes it"),
        ("runs --port many", "error: --port: must be an integer, got 'many'"),
        ("runs --outptu a", "error: unknown flag --outptu; did you mean --output?"),
        ("--live", "error: --live needs a value"),
    ],
)
def test_bad_arguments_are_one_sentence_and_write_nothing(runs, command, workdir, words, says):
    code, out, err = command("report", words)
    assert (code, out) == (2, "") and err.startswith(says) and len(err.splitlines()) == 1
    assert not list(workdir.rglob("*.html"))


def test_the_missing_extra_is_named(runs, command, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bokeh.resources", None)
    for words in ("runs", "--live runs"):
        code, out, err = command("report", words)
        assert (code, out, err) == (2, "", "error: a report needs Bokeh: pip install 'polyak[report]'\n")
