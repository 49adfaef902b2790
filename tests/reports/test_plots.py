import dataclasses
import sys

import numpy as np
import pytest

import polyak
from polyak.reports.plots import _collect_records, parse_length
from polyak.storage.run_directory import RunError
from tests.reports.written_runs import linear_rows, write_run

pytest.importorskip("matplotlib")


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    for env in ("jax/CartPole-v1", "jax/Acrobot-v1"):
        for gamma in (0.9, 0.99):
            for seed in range(3):
                rows = linear_rows(20, slope=gamma, start=seed, every=4)
                directory = root / f"{env[4:8]}-{gamma}/seed-{seed}"
                write_run(directory, rows, env=env, seed=seed, agent={"gamma": gamma}, eval_every=400)
    return root


def test_each_environment_and_tag_has_a_panel_with_a_curve_and_a_band_for_each_group(runs):
    figure = polyak.plot(runs, y=["rollout/ep_rew_mean", "eval/mean_reward"], width=100)
    panels = figure.axes
    assert [axes.get_title() for axes in panels] == ["jax/Acrobot-v1", "jax/CartPole-v1"] * 2
    # Labels that a neighbor has are left out.
    assert [axes.get_ylabel() for axes in panels] == ["episode return", "", "evaluation return", ""]
    assert [axes.get_xlabel() for axes in panels] == ["", "", "environment steps", "environment steps"]
    for axes in panels:
        assert [line.get_label() for line in axes.lines] == ["gamma=0.9", "gamma=0.99"] and len(axes.collections) == 2
    x, y = panels[0].lines[1].get_data()
    np.testing.assert_allclose(y, 0.99 * np.arange(1, 21) + 1)
    assert x.tolist() == [100 * n for n in range(1, 21)]
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["gamma=0.9", "gamma=0.99"]
    assert figure.get_figwidth() == pytest.approx(100 / 25.4)


def test_markers_at_the_ends_of_a_narrow_panel_are_not_cut(runs):
    figure = polyak.plot(runs, width=90)
    figure.draw_without_rendering()
    for axes in figure.axes:
        line = axes.lines[0]
        radius = (line.get_markersize() + line.get_markeredgewidth()) / 2 * figure.dpi / 72
        first, last = axes.transData.transform(line.get_xydata()[[0, -1]])[:, 0]
        assert axes.bbox.x0 + radius < first and last < axes.bbox.x1 - radius


def test_curves_differ_without_their_colors(tmp_path):
    for number in range(24):
        write_run(tmp_path / str(number), linear_rows(3), agent={"gamma": number / 100})
    lines = polyak.plot(tmp_path).axes[0].lines
    assert len({(str(line._unscaled_dash_pattern), line.get_marker()) for line in lines}) == 24
    assert len({(line.get_color(), line.get_marker()) for line in lines}) == 24
    write_run(tmp_path / "one", linear_rows(3), agent={"gamma": 0.5})
    with pytest.raises(ValueError, match=r"25 curves cannot be told apart, at most 24 are drawn; pass fewer runs, or group"):
        polyak.plot(tmp_path)


@pytest.mark.parametrize("suffix", ["svg", "pdf", "png"])
def test_equal_runs_give_equal_files_whatever_the_settings_of_matplotlib(runs, tmp_path, suffix, monkeypatch):
    import matplotlib

    first, second = tmp_path / f"a.{suffix}", tmp_path / f"b.{suffix}"
    polyak.plot(runs, output=first)
    with matplotlib.rc_context({"font.size": 30, "axes.grid": False, "svg.hashsalt": "x"}):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
        polyak.plot(runs, output=second)
        assert matplotlib.rcParams["font.size"] == 30
    assert first.read_bytes() == second.read_bytes()
    start = {"svg": b"<?xml", "pdf": b"%PDF", "png": b"\x89PNG"}
    assert first.read_bytes().startswith(start[suffix])


def test_a_name_from_a_file_is_text_in_the_picture(tmp_path):
    for number, name in enumerate(("<script>alert(1)</script>", "$\\bad{")):
        write_run(tmp_path / str(number), linear_rows(3), agent={"name": name})
    polyak.plot(tmp_path, output=tmp_path / "a.svg")
    assert b"<script" not in (tmp_path / "a.svg").read_bytes()


def test_the_time_has_the_unit_that_is_easy_to_read(tmp_path):
    write_run(tmp_path / "run", linear_rows(10, seconds=60.0))
    (axes,) = polyak.plot(tmp_path, x="time").axes
    assert axes.get_xlabel() == "training time (min)" and axes.lines[0].get_xdata().tolist() == list(range(1, 11))


def test_steps_of_trainings_on_data_are_gradient_steps(tmp_path):
    for loop, env in (("compiled", "A"), ("offline", "B"), ("offline", "C"), ("compiled", "C")):
        write_run(tmp_path / f"{loop}-{env}", linear_rows(3), loop=loop, env=env)
    labels = [axes.get_xlabel() for axes in polyak.plot(tmp_path, width=50).axes]
    assert labels == ["environment steps", "environment steps or gradient steps", "gradient steps"]
    assert [axes.get_xlabel() for axes in polyak.plot(tmp_path / "compiled-A", tmp_path / "compiled-C", width=50).axes] == [
        "",
        "environment steps",
    ]


def test_records_and_directories_can_be_mixed(runs, tmp_path):
    record = polyak.load_run(write_run(tmp_path / "seed-0", linear_rows(5), algorithm="dqn"))
    figure = polyak.plot(record, polyak.load_runs(runs / "Cart-0.9"), runs / "Cart-0.99")
    assert {line.get_label() for line in figure.axes[0].lines} == {"dqn", "ppo, gamma=0.9", "ppo, gamma=0.99"}
    with pytest.raises(TypeError, match=r"plot: runs must be directories or what polyak.load_runs returns, got 3"):
        polyak.plot(runs, 3)


def test_a_run_that_cannot_be_shown_is_left_out_with_a_warning(tmp_path):
    write_run(tmp_path / "good", linear_rows(5, every=1))
    write_run(tmp_path / "young", seed=1)
    (write_run(tmp_path / "damaged", linear_rows(5), seed=2) / "metrics.jsonl").write_text("{\n")
    (write_run(tmp_path / "edited", seed=3) / "config.json").write_text("{}")
    with pytest.warns(UserWarning) as warned:
        (axes,) = polyak.plot(tmp_path).axes
    messages = [str(warning.message) for warning in warned]
    assert [message.split(" is left")[0].split(" has no")[0] for message in messages] == [
        "plot: edited",
        "plot: damaged",
        "plot: young",
    ]
    assert len(axes.lines) == 1


def test_runs_without_metrics_are_an_error(tmp_path):
    write_run(tmp_path / "young")
    with pytest.raises(ValueError, match="plot: there are no metrics yet; wait for the first report of a run"):
        polyak.plot(tmp_path / "young")
    (write_run(tmp_path / "damaged") / "metrics.jsonl").write_text("{\n")
    with pytest.warns(UserWarning, match="damaged is left out"), pytest.raises(RunError, match=r"line 1: not valid JSON"):
        polyak.plot(tmp_path / "damaged")


def test_bad_arguments_are_errors_before_anything_is_read(runs, tmp_path):
    for options, message in (
        ({"output": "a.gif"}, r"plot: output must end with .svg, .pdf, .png, got a.gif"),
        ({"output": tmp_path / "no/a.svg"}, r"plot: output must be a file, got .*; there is no directory"),
        ({"output": runs / "Cart-0.9/seed-0/tb/a.svg"}, r"there is no directory|belongs to a run"),
        ({"x": "steps"}, r"plot: x must be one of 'env_steps', 'time', got 'steps'"),
        ({"y": []}, r"plot: y must be one name or more, got \[\]"),
        ({"y": 3}, r"plot: y must be one name or more, got 3"),
        ({"group_by": ()}, r"plot: group_by must be one name or more, got \(\)"),
        ({"y": "train/los"}, r"plot: unknown tag 'train/los'; did you mean 'train/loss'\? \(tags: time/time_elapsed, rollout/"),
        ({"group_by": "gama"}, r"group_by: unknown setting 'gama'; did you mean 'gamma'"),
        ({"width": "wide"}, r"plot: width must be column, text, page, or from 30 to 1000 mm, such as 90mm or 3.5in, got wide"),
        ({"height": "-1mm"}, r"plot: height must be from 30 to 1000 mm"),
        ({"width": float("nan")}, r"plot: width must be"),
    ):
        with pytest.raises(ValueError, match=message):
            polyak.plot(runs, **options)
    with pytest.raises(RunError, match="nothing: there is no such directory"):
        polyak.plot(tmp_path / "nothing")
    (tmp_path / "file.svg").mkdir()
    with pytest.raises(ValueError, match="it is a directory"):
        polyak.plot(runs, output=tmp_path / "file.svg")


def test_a_curve_of_one_point_has_a_marker(tmp_path):
    write_run(tmp_path / "0", linear_rows(1))
    (line,) = polyak.plot(tmp_path).axes[0].get_lines()
    assert line.get_marker() == "o" and len(line.get_xdata()) == 1


def test_an_output_that_cannot_be_written_is_an_error_and_the_old_one_remains(runs, monkeypatch, tmp_path):
    def full(descriptor):
        raise OSError(28, "No space left on device")

    polyak.plot(runs, output=tmp_path / "a.svg")
    before = (tmp_path / "a.svg").read_bytes()
    (tmp_path / "text").touch()
    assert (tmp_path / "a.svg").stat().st_mode == (tmp_path / "text").stat().st_mode
    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"plot: .*a.svg cannot be written: No space left on device"):
        polyak.plot(runs, y="eval/mean_reward", output=tmp_path / "a.svg")
    assert (tmp_path / "a.svg").read_bytes() == before and len(list(tmp_path.iterdir())) == 2


def test_without_matplotlib_the_error_is_the_command_that_installs_it(runs, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"plot needs matplotlib: pip install 'polyak\[plots\]'"):
        polyak.plot(runs)


@pytest.mark.parametrize(("text", "mm"), [("column", 83), ("90", 90), ("9cm", 90), ("2 in", 50.8), (100.5, 100.5)])
def test_lengths(text, mm):
    assert parse_length("width", text) == pytest.approx(mm)


def test_the_legend_is_inside_the_picture(tmp_path):
    for number in range(6):
        agent = {"a_setting_with_a_long_name": f"and a long value {number}" * 2}
        write_run(tmp_path / str(number), linear_rows(3), agent=agent)
    figure = polyak.plot(tmp_path, width="column")
    figure.savefig(tmp_path / "a.png")
    box = figure.legends[0].get_window_extent()
    assert box.x0 >= 0 and box.x1 <= figure.bbox.width


def test_a_result_draws_its_history_in_memory_or_its_run(trained, tmp_path):
    (axes,) = trained.plot("train/loss", output=tmp_path / "a.svg").axes
    expected = [row["train/loss"] for row in trained.history]
    assert axes.lines[0].get_ydata().tolist() == expected and len(expected) > 5
    assert axes.lines[0].get_xdata()[-1] == trained.progress.env_steps
    assert trained.plot()._repr_png_().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="plot: unknown tag 'train/los'; did you mean 'train/loss'"):
        trained.plot("train/los")
    with pytest.raises(ValueError, match=r"Result.plot: there are no metrics of this training; pass run_dir="):
        dataclasses.replace(trained, history=()).plot()
    with pytest.raises(TypeError, match=r"Result.plot: unknown argument 'outptu'; did you mean 'output'"):
        trained.plot(outptu="a.svg")


def test_a_run_that_is_passed_twice_is_one_seed(tmp_path):
    for seed in range(2):
        write_run(tmp_path / f"study/{seed}", linear_rows(5), seed=seed)
    records = _collect_records([tmp_path / "study", polyak.load_runs(tmp_path), polyak.load_run(tmp_path / "study/0")])
    assert sorted(record.seed for record in records) == [0, 1]


def test_a_tag_without_a_finite_value_is_an_error(tmp_path):
    write_run(tmp_path / "0", [{"env_steps": 100, "rollout/ep_rew_mean": None}])
    with pytest.raises(ValueError, match="no run has a finite value of rollout/ep_rew_mean"):
        polyak.plot(tmp_path)


def test_a_name_of_a_width_is_no_height(tmp_path):
    with pytest.raises(ValueError, match="height must be from"):
        parse_length("height", "page")
