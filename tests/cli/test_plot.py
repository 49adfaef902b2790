"""polyak plot: curves of runs from the command line."""

import pytest

import polyak
from tests.reports.written_runs import linear_rows, write_run

pytest.importorskip("matplotlib")


@pytest.fixture
def runs(workdir):
    for seed in range(2):
        write_run(workdir / f"runs/ppo/seed-{seed}", linear_rows(10, start=seed, every=5), seed=seed, eval_every=500)
    write_run(workdir / "runs/dqn", linear_rows(10), algorithm="dqn")
    return workdir / "runs"


def test_the_picture_is_that_of_python(runs, command, workdir):
    words = "runs/ppo runs/dqn -o curve.svg --y rollout/ep_rew_mean train/loss --x time --group-by algorithm --width page"
    code, out, err = command("plot", words)
    assert (code, err) == (0, "") and out.startswith("wrote curve.svg (")
    options = {"y": ["rollout/ep_rew_mean", "train/loss"], "x": "time", "group_by": "algorithm", "width": "page"}
    polyak.plot(runs / "ppo", runs / "dqn", output="python.svg", **options)
    assert (workdir / "curve.svg").read_bytes() == (workdir / "python.svg").read_bytes()


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("", "error: a run directory is missing: polyak plot RUN... [flags]"),
        ("nothing -o a.svg", "error: nothing: there is no such directory; a run was expected"),
        ("runs -o a.gif", "error: plot: output must end with .svg, .pdf, .png, got a.gif"),
        ("runs -o no/a.svg", "error: plot: output must be a file, got no/a.svg; there is no directory no"),
        ("runs -o /proc/a.svg", "error: plot: /proc/a.svg cannot be written: No such file or directory"),
        ("runs -o runs/dqn/checkpoints/a.svg", "error: plot: output must not be a file that belongs to a run"),
        ("runs -o a.svg --output b.svg", "error: --output is set more than once"),
        ("runs -oa.svg --output b.svg", "error: --output is set more than once"),
        ("runs -o=a.svg -o b.svg", "error: --output is set more than once"),
        ("runs -o a.svg --y train/loss=", "error: plot: unknown tag 'train/loss='"),
        ("runs -o a.svg --y", "error: plot: y must be one name or more, got ()"),
        ("runs -o a.svg --y train/los", "error: plot: unknown tag 'train/los'; did you mean 'train/loss'?"),
        ("runs -o a.svg --group-by seeds", "error: group_by: unknown setting 'seeds'; did you mean 'seed'?"),
        ("runs -o a.svg --width 5in --height 1mm", "error: plot: height must be from 30 to 1000 mm"),
        ("runs", "error: --output is missing"),
        ("runs -o a.svg --x steps", "error: --x must be one of 'env_steps', 'time', got 'steps'"),
        ("runs -o a.svg --widht 3", "error: unknown flag --widht; did you mean --width?"),
    ],
)
def test_bad_arguments_are_one_sentence_and_write_nothing(runs, command, workdir, words, says):
    code, out, err = command("plot", words)
    assert (code, out) == (2, "") and err.startswith(says) and len(err.splitlines()) == 1
    assert [path.name for path in workdir.iterdir()] == ["runs"]


def test_a_run_without_the_tag_is_named_in_a_warning(runs, command, workdir):
    with pytest.warns(UserWarning, match="plot: dqn has no value of eval/mean_reward and is left out"):
        code, out, _ = command("plot", "runs -o a.png --y eval/mean_reward")
    assert code == 0 and "wrote a.png" in out
    write_run(workdir / "runs/c51", linear_rows(10), algorithm="c51")
    with pytest.warns(UserWarning, match="plot: c51, dqn have no value of eval/mean_reward and are left out"):
        command("plot", "runs -o a.png --y eval/mean_reward")
