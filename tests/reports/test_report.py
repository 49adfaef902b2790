"""Reports as files: what is in them, that no text of a run becomes markup, and what bad input says."""

import base64
import html
import json
import os
import re
import time
from pathlib import Path

import numpy as np
import pytest

import polyak
from polyak.reports.model_card import make_card
from polyak.runs import algorithm_name
from polyak.storage.config import to_json
from polyak.storage.run_directory import RunError, create
from polyak.train.new_training import make_agent
from tests.reports.written_runs import linear_rows, write_run

pytest.importorskip("bokeh")

ATTACK = "</script><script>alert(1)</script><img src=x onerror=alert(1)>"


def text_of(page):
    """The page without scripts and styles, as a reader sees it."""
    without = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", without)).split())


def data_of(page):
    """The data of the charts."""
    return json.loads(re.search(r'<script type="application/json" id="charts">(.*?)</script>', page, re.DOTALL)[1])


def charts_of(page):
    """The charts by name; each line's arrays decoded."""
    data = data_of(page)
    arrays = [np.frombuffer(base64.b64decode(text), "<f4") for text in data["arrays"]]
    keys = ("x", "y", "low", "high")
    return {
        chart["name"]: {
            axis: [line | {key: arrays[line[key]] for key in keys if key in line} for line in lines]
            for axis, lines in chart["lines"].items()
        }
        for chart in data["charts"]
    }


def write(*paths, **options):
    return polyak.report(*paths, **options).read_text()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Two learning rates with three seeds each."""
    root = tmp_path_factory.mktemp("report") / "runs"
    for rate, slope in ((0.1, 1.0), (0.01, 2.0)):
        for seed in range(3):
            rows = linear_rows(20, slope=slope, start=seed, every=5)
            write_run(root / f"lr{rate}-{seed}", rows, seed=seed, agent={"learning_rate": rate}, eval_every=500)
    return root


@pytest.fixture(scope="module")
def real_run(trained, tmp_path_factory):
    return trained.save(tmp_path_factory.mktemp("real") / "run")


def test_a_report_of_one_run_shows_its_summary_curves_settings_and_machine(real_run):
    system = json.loads((real_run / "system.json").read_text())
    system |= {
        "command_line": ["/usr/bin/polyak", "train", "ppo", "a b"],
        "resumed": [{"command_line": ["polyak", "resume", "x"]}],
    }
    (real_run / "system.json").write_text(json.dumps(system))
    path = polyak.report(real_run)
    assert path == real_run / "report.html"
    page = path.read_text()
    text = text_of(page)
    for part in (
        "ppo · jax/CartPole-v1",
        "of 640 env_steps",
        "polyak train ppo 'a b'",
        "Resumptions",
        "polyak resume x",
        "jaxlib",
    ):
        assert part in text, part
    # The preset of CartPole has others.
    changed = re.search(r"differ from the preset of ppo for jax/CartPole-v1\.(.*?)All settings", text)[1]
    assert "num_steps 8 32" in changed and "network.hidden [4] [64, 64]" in changed and "gamma" not in changed
    charts = charts_of(page)
    rows = polyak.load_run(real_run).metrics
    (line,) = charts["train/loss"]["steps"]
    np.testing.assert_allclose(line["x"], rows["env_steps"])
    np.testing.assert_allclose(line["y"], rows["train/loss"], rtol=1e-6)
    assert "Healthy: between 0.001 and 0.02" in text and "time" in charts["train/loss"]


def test_a_report_compares_the_agent_inside_rnd_with_its_preset(tmp_path):
    spec, name = polyak.envs.make("jax/CartPole-v1").spec, "jax/CartPole-v1"
    agent = polyak.RND(make_agent("ppo", spec, None, 640, {"gamma": 0.5}), coefficient=0.25)
    config = {"algorithm": algorithm_name(agent), "env": name, "seed": 0, "env_steps": 640, "num_envs": 8}
    config["agent"] = to_json(agent)
    with create(tmp_path / "run", config) as run:
        run.append_metrics({"env_steps": 640})
    text = text_of(write(tmp_path / "run"))
    changed = re.search(rf"differ from the preset of ppo for {name} and the defaults of RND\.(.*?)All settings", text)[1]
    assert "coefficient 0.25 0.5" in changed and "agent.gamma 0.5 0.98" in changed and "num_epochs" not in changed


def test_several_runs_are_compared_by_the_interquartile_mean_of_their_groups(runs, tmp_path):
    page = write(runs, output=tmp_path / "a.html")
    charts = charts_of(page)
    lines = charts["1:rollout/ep_rew_mean"]["steps"]
    assert [line["name"] for line in lines] == ["learning_rate=0.01", "learning_rate=0.1"]
    np.testing.assert_allclose(lines[0]["y"], 2.0 * np.arange(1, 21) + 1.0, rtol=1e-6)
    np.testing.assert_allclose(lines[0]["low"], lines[0]["y"] - 1.0, rtol=1e-6)
    np.testing.assert_allclose(charts["1:rollout/ep_rew_mean"]["time"][0]["x"], 0.5 * np.arange(1, 21))
    text = text_of(page)
    assert "6 runs in 2 groups" in text and "learning_rate=0.01 learning_rate=0.1 1.00 [1.00, 1.00] 1.00 [1.00, 1.00]" in text
    profile = charts["1:profile"]["steps"]
    assert profile[0]["y"][0] == 1.0 and profile[0]["y"][-1] == 0.0
    assert "lr0.1-2 ppo jax/CartPole-v1 done 2 2,000 22 1.5" in text


def test_a_run_that_failed_early_keeps_its_last_value_and_holds_no_other_back(tmp_path):
    write_run(tmp_path / "runs/good", linear_rows(10, slope=10), agent={"gamma": 0.9})
    write_run(tmp_path / "runs/bad", linear_rows(2), agent={"gamma": 0.5}, stopped="TrainingDiverged: NaN")
    text = text_of(write(tmp_path / "runs"))
    assert "gamma=0.9 1 100.0 —" in text and "gamma=0.5 1 2.0 —" in text and "at 1,000 env_steps" in text


def test_runs_are_grouped_by_any_setting(runs, tmp_path):
    charts = charts_of(write(runs, output=tmp_path / "a.html", group_by="seed"))
    assert [line["name"] for line in charts["1:rollout/ep_rew_mean"]["steps"]] == ["seed=0", "seed=1", "seed=2"]
    with pytest.raises(ValueError, match="unknown setting 'sed'; did you mean 'seed'"):
        polyak.report(runs, output=tmp_path / "b.html", group_by="sed")
    assert not (tmp_path / "b.html").exists()


def test_each_environment_has_a_section(tmp_path):
    for env in ("CartPole-v1", "Acrobot-v1"):
        write_run(tmp_path / f"runs/{env}", linear_rows(5), env=env)
    write_run(tmp_path / "runs/silent", [{"env_steps": 1, "train/loss": 1.0}], env="Silent-v0")
    page = write(tmp_path / "runs")
    assert re.findall(r'data-title="([^"]*-v\d)"', page) == ["Acrobot-v1", "CartPole-v1", "Silent-v0"]
    assert "None of these runs has a return yet." in page and "2:rollout/ep_rew_mean" in charts_of(page)


def test_the_table_has_the_last_evaluation_of_a_run_without_a_summary(tmp_path):
    for seed in (0, 1):
        write_run(tmp_path / f"seed-{seed}", linear_rows(10, every=4), summary=False, seed=seed)
    assert text_of(write(tmp_path)).count("1,008") == 2


def test_the_others_of_many_groups_are_gray(tmp_path):
    for n in range(12):
        write_run(tmp_path / f"runs/{n}", linear_rows(5, slope=n), agent={"gamma": 0.9 + n / 1000})
    lines = charts_of(write(tmp_path / "runs"))["1:rollout/ep_rew_mean"]["steps"]
    assert [line["color"] for line in lines] == [None] * 4 + list(range(8))


def test_no_text_of_a_run_becomes_markup(tmp_path):
    root = tmp_path / "<script>alert(1)<" / "script>"
    for seed in range(2):
        rows = [{"env_steps": n, "rollout/ep_rew_mean": 1.0, f"train/{ATTACK}": n} for n in range(1, 4)]
        agent = {"gamma": ATTACK, ATTACK: ATTACK}
        write_run(
            root / f"{seed}<img src=x onerror=alert(1)>", rows, seed=seed, env=ATTACK, agent=agent, stopped=f"E: {ATTACK}"
        )
        system = {
            "python": ATTACK,
            ATTACK: [ATTACK],
            "command_line": ["polyak", ATTACK],
            "resumed": [{"command_line": [ATTACK]}],
        }
        next(root.glob(f"{seed}*/system.json")).write_text(json.dumps(system))
    (root / "broken").mkdir()
    (root / "broken/config.json").write_text(ATTACK)
    for paths in ((root,), (next(root.glob("0*")),)):
        page = write(*paths, output=tmp_path / "a.html", group_by="gamma" if paths == (root,) else None)
        outside = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
        assert "<img" not in outside and "alert(1)" in outside and "<script" not in outside
        # Bokeh, the page's own script and the data: nothing else.
        assert len(re.findall(r"<script\b", page)) == 3 and ATTACK in str(data_of(page))


def test_a_page_allows_its_own_scripts_alone(real_run, tmp_path):
    page = write(real_run, output=tmp_path / "a.html")
    policy = html.unescape(re.search(r'Content-Security-Policy" content="(.*?)"', page)[1])
    assert "default-src 'none'" in policy and "connect-src 'none'" in policy
    assert re.search(r"script-src ('sha256-[\w+/=]{44}' ?){2};", policy) and "unsafe-eval" not in policy
    outside = re.sub(r"<(script|style)\b.*?</\1>", "", page, flags=re.DOTALL)
    assert not re.search(r'(src|href)="(https?:)?//', outside)


def test_a_small_video_is_part_of_the_page_and_a_large_one_a_link(real_run, tmp_path):
    videos = real_run / "videos"
    videos.mkdir(exist_ok=True)
    (videos / "new.mp4").write_bytes(b"frames")
    (videos / "old.mp4").write_bytes(b"old")
    os.utime(videos / "old.mp4", (1, 1))
    (videos / "link.mp4").symlink_to("/etc/passwd")
    page = write(real_run, output=tmp_path / "a.html")
    assert f"data:video/mp4;base64,{base64.b64encode(b'frames').decode()}" in page and "new.mp4" in page
    with (videos / "new.mp4").open("r+b") as file:
        file.truncate(3 * 2**20)
    assert 'src="videos/new.mp4"' in write(real_run)


def test_the_report_replaces_the_one_before_and_leaves_nothing_else(runs, tmp_path):
    path = tmp_path / "a.html"
    path.write_text("old")
    assert polyak.report(runs, output=path) == path and path.read_text().startswith("<!doctype html>")
    assert [one.name for one in tmp_path.iterdir()] == ["a.html"]


def test_damaged_runs_are_named_and_hide_no_other(runs, tmp_path):
    for name in ("damaged", "unreadable"):
        write_run(tmp_path / f"runs/{name}", linear_rows(5))
    write_run(tmp_path / "runs/good", linear_rows(5))
    with (tmp_path / "runs/damaged/metrics.jsonl").open("a") as file:
        file.write("{]\n")
    (tmp_path / "runs/unreadable/config.json").write_text("{")
    text = text_of(write(tmp_path / "runs"))
    assert "damaged/metrics.jsonl, line 6: not valid JSON" in text and "unreadable/config.json: not valid JSON" in text
    assert "1 run of one group" in text
    with pytest.raises(RunError, match=r"metrics.jsonl, line 6: not valid JSON"):
        polyak.report(tmp_path / "runs/damaged")


@pytest.mark.parametrize(
    ("paths", "options", "error", "says"),
    [
        ((), {}, TypeError, "report: needs a run"),
        (("nothing",), {}, RunError, "nothing: there is no such directory"),
        (("empty",), {}, RunError, "empty: holds no run"),
        (("run",), {"output": "no/a.html"}, RunError, "there is no directory no"),
        (("run",), {"output": "run/config.json"}, ValueError, "output must be a separate file"),
        (("run",), {"output": "run"}, ValueError, "output must be a separate file"),
        (("run",), {"output": "a.pdf"}, ValueError, "report: output must end in .html, got a.pdf"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, monkeypatch, paths, options, error, says):
    monkeypatch.chdir(tmp_path)
    write_run(Path("run"), linear_rows(3))
    Path("empty").mkdir()
    with pytest.raises(error, match=says) as raised:
        polyak.report(*paths, **options)
    assert "\n" not in str(raised.value) and not list(tmp_path.rglob("*.html"))


def test_a_missing_extra_is_the_command_that_installs_it(runs, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "bokeh.resources", None)
    with pytest.raises(ImportError, match=r"a report needs Bokeh: pip install 'polyak\[report\]'"):
        polyak.report(runs)


def test_steps_of_a_training_on_data_are_gradient_steps(tmp_path):
    rows = [row | {"time/fps": 100.0, "rollout/ep_rew_mean": None} for row in linear_rows(4, every=2)]
    write_run(tmp_path / "run", rows, loop="offline")
    page = write(tmp_path / "run")
    text = text_of(page)
    assert "of 400 gradient steps" in text and "gradient steps per second" in text and "No episode" not in text
    assert "env_steps" not in text.partition("Settings")[0]
    assert {chart["unit"] for chart in data_of(page)["charts"]} == {"gradient steps"}
    card = make_card(polyak.load_run(tmp_path / "run"), 400, "run.zip", ["curve.svg"], is_best=False, needs_agent=False)
    assert "A policy of 400 gradient steps" in card and "Returns by gradient steps" in card


def test_a_comparison_with_a_training_on_data_names_both_units(tmp_path):
    for seed, loop in enumerate(("offline", "offline", "compiled")):
        write_run(tmp_path / "runs" / f"{loop}{seed}", linear_rows(4, every=2), seed=seed, loop=loop)
    both = "env_steps or gradient steps"
    page = write(tmp_path / "runs")
    assert f"at 400 {both}" in text_of(page) and {chart["unit"] for chart in data_of(page)["charts"]} >= {both}
    page = write(*(tmp_path / "runs" / f"offline{seed}" for seed in range(2)))
    assert "at 400 gradient steps" in text_of(page) and "env_steps" not in text_of(page)


def test_a_run_without_metrics_or_summary_has_a_report(tmp_path):
    write_run(tmp_path / "run", (), summary=False)
    text = text_of(write(tmp_path / "run"))
    assert "The run has no metrics." in text and "The process ended without a summary" in text


@pytest.mark.slow
def test_forty_runs_of_long_metrics_take_little_time_and_space(tmp_path):
    text = "".join(json.dumps(row) + "\n" for row in linear_rows(10_000))
    for n in range(40):
        write_run(tmp_path / f"runs/{n // 4}/{n}", (), seed=n % 4, agent={"gamma": 0.9 + n // 4 / 1000})
        (tmp_path / f"runs/{n // 4}/{n}/metrics.jsonl").write_text(text)
    start = time.perf_counter()
    page = polyak.report(tmp_path / "runs")
    assert time.perf_counter() - start < 10 and page.stat().st_size < 3e6
