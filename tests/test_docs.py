"""The documentation: code blocks and commands run page by page, links and names exist, lines are short.

`run_page.py` runs the blocks of a page, each page in an empty directory.
"""

import hashlib
import html
import importlib
import inspect
import json
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import jax
import numpy as np
import pytest

import polyak
from tests.reports.axe import serious_findings
from tests.reports.browser import CHROMIUM, Browser
from tests.run_page import POLYAK_COMMANDS, blocks, run_command, run_page, shorten
from tests.selection import quick

ROOT = Path(__file__).parent.parent
DOCS = ROOT / "docs"
PAGES = {str(path.relative_to(ROOT)): path.read_text() for path in sorted([ROOT / "README.md", *DOCS.rglob("*.md")])}
ROOT_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")
OTHERS = (*ROOT_PAGES, "benchmarks/README.md")
PROSE = {**PAGES, **{name: (ROOT / name).read_text() for name in OTHERS}}
README = PAGES["README.md"]
RUNNABLE = [name for name, text in PAGES.items() if re.search(r"^```(python|sh)$", text, re.MULTILINE)]

LONGEST_LINE = 120


@pytest.fixture
def working_directory(tmp_path, monkeypatch):
    """An empty working directory that is on Python's path; modules that a page writes there are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    known = set(sys.modules)
    yield
    for name in {"rules", "numpy_reader"} - known:
        sys.modules.pop(name, None)


@pytest.mark.parametrize("name", quick("README.md", "docs/getting-started.md", of=RUNNABLE))
def test_code_blocks_of_a_page_run_in_order(name, working_directory, unchecked):
    # As users have it: the tests' stricter promotion rules are for the package.
    with jax.numpy_dtype_promotion("standard"), jax.numpy_rank_promotion("allow"):
        run_page(name, PAGES[name])


def test_every_command_of_polyak_is_documented_by_one_that_runs():
    lines = [line for text in PAGES.values() for _, _, block in blocks(text, "sh") for line in block.splitlines()]
    assert {line.split()[1] for line in lines if line.startswith("polyak ")} >= POLYAK_COMMANDS


@pytest.mark.parametrize("name", PROSE)
def test_lines_of_markdown_are_short(name):
    for number, line in enumerate(PROSE[name].splitlines(), 1):
        assert len(line) <= LONGEST_LINE or line.startswith("|"), f"{name}:{number}: {len(line)} characters"


@pytest.mark.parametrize("name", PROSE)
def test_links_lead_to_files(name):
    text = re.sub(r"^```.*?^```$", "", PROSE[name], flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", text):
        assert link.startswith("https://") or ((ROOT / name).parent / link).exists(), f"{name}: {link}"


@pytest.mark.parametrize("name", [name for name in PAGES if "\n::: " in PAGES[name]])
def test_objects_of_the_api_reference_exist(name):
    for identifier in re.findall(r"^::: ([\w.]+)$", PAGES[name], re.MULTILINE):
        assert find(identifier) is not None, identifier


def find(identifier):
    """The module or object with this dotted name."""
    parts = identifier.split(".")
    for length in range(len(parts), 0, -1):
        try:
            value = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            value = getattr(value, part)
        return value
    raise AssertionError(f"{identifier} is in no module")


def test_public_names_stand_in_the_api_reference():
    reference = "\n".join(text for name, text in PAGES.items() if name.startswith("docs/api/"))
    listed = set(re.findall(r"^(?:::: |        - )([\w.]+)$", reference, re.MULTILINE))
    listed = {name.rpartition(".")[2] for name in listed}
    rooms = {"data", "envs", "importers", "loops", "policies", "presets", "replay", "schedules", "train"}
    wanted = set(polyak.__all__) - rooms
    for room in (getattr(polyak, name) for name in rooms):
        wanted |= {name for name in room.__all__ if inspect.isroutine(value := getattr(room, name)) or inspect.isclass(value)}
    assert wanted <= listed, f"not in docs/api: {sorted(wanted - listed)}"


def test_the_index_of_the_api_reference_lists_the_names_of_polyak():
    rows = [line for line in PAGES["docs/api/index.md"].splitlines() if line.startswith("| `")]
    listed = [name for row in rows for name in re.findall(r"`(\w+)`", row)]
    assert sorted(listed) == sorted(polyak.__all__)


def test_every_example_is_named_on_a_page():
    text = "\n".join(PAGES.values())
    examples = [path for path in sorted((ROOT / "examples").iterdir()) if path.suffix in (".py", ".ipynb")]
    missing = [path.name for path in examples if f"`examples/{path.name}`" not in text]
    assert not missing


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text().split("\nnav:\n")[1]
    pages = set(re.findall(r": ([\w/-]+\.md)$", navigation, re.MULTILINE))
    assert pages == {name.removeprefix("docs/") for name in (*PAGES, *ROOT_PAGES)} - {"README.md"}


def test_the_readme_opens_with_its_purpose_and_two_commands_and_fits_on_three_screens():
    title, purpose, commands = README.split("\n\n")[:3]
    assert title == "# polyak"
    assert len(purpose.split()) < 120
    assert [line.split("#")[0].strip() for line in commands.splitlines()] == [
        "pip install . && polyak train ppo CartPole-v1",
        "pip install '.[dev]' && pytest",
    ]
    assert len(README.splitlines()) <= 120


def test_a_misspelt_setting_gets_the_documented_error():
    text = " ".join(PAGES["docs/getting-started.md"].split())
    call, message = re.search(r"`polyak\.(PPO\([^`]*)` raises \*(.*?)\*", text).groups()
    names = {"PPO": polyak.PPO, "env": polyak.envs.make("jax/CartPole-v1")}
    with pytest.raises(TypeError, match=re.escape(message)):
        eval(call, names)


@pytest.mark.slow
def test_every_file_of_a_run_directory_is_documented(tmp_path, unchecked):
    assert run_command(f"polyak train ppo CartPole-v1 --run-dir {tmp_path / 'run'}") == 0
    named = set(re.findall(r"^\| `([\w.]+)/?` \|", PAGES["docs/runs.md"], re.MULTILINE))
    on_request = {"videos", "tracking.json"}
    assert {path.name for path in (tmp_path / "run").iterdir()} | {"run.lock"} | on_request == named


def test_documented_environments_and_extras_exist():
    metadata = (ROOT / "pyproject.toml").read_text()
    known = [name for names in polyak.envs.names().values() for name in names]
    for name, text in PAGES.items():
        for extra in re.findall(r"\.\[(\w+)\]'", text):
            assert re.search(rf"^{extra} = ", metadata, re.MULTILINE), f"{name}: {extra}"
        for env in re.findall(r"`((?:jax/)?(?!\w*NoFrameskip)[A-Z][A-Za-z]+-v\d)`", text):
            assert env in known, f"{name}: {env}"


def test_every_extra_is_explained_and_installed_in_one_way():
    extras = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    rows = [line for line in PAGES["docs/getting-started.md"].splitlines() if line.startswith("| `pip install")]
    assert set(re.findall(r"'\.\[(\w+)\]'", "\n".join(rows))) == extras - {"dev", "docs"}
    assert not [name for name, text in PAGES.items() if "'polyak[" in text], "there is no package to install by its name yet"


def test_learning_curves_show_the_recorded_results():
    results = {path.stem: path for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))}
    assert {"cartpole", "pendulum"} <= set(results)
    for suite, path in results.items():
        picture = (DOCS / "pictures" / f"learning-{suite}.svg").read_text()
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert digest in picture, f"{suite}: the picture is out of date; run python benchmarks/plot_learning.py"
        assert f"(pictures/learning-{suite}.svg)" in PAGES["docs/results.md"], suite


def test_learning_curves_stand_under_the_heading_of_their_environment():
    headings = {"ALE/Pong-v5": "Atari", "gymnax/Breakout-MinAtar": "MinAtar", "gymnax/Asterix-MinAtar": "MinAtar"}
    page = PAGES["docs/results.md"].partition("## Learning curves")[2].partition("\n## ")[0]
    sections = dict(section.split("\n", 1) for section in page.split("\n### ")[1:])
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        env = json.loads(path.read_text())["env"]
        assert f"(pictures/learning-{path.stem}.svg)" in sections[headings.get(env, env.removeprefix("jax/"))], path.stem


def test_the_table_of_results_has_the_lines_of_the_recorded_results(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    learning = importlib.import_module("learning")
    page = PAGES["docs/results.md"].splitlines()
    assert f"| {' | '.join(learning.HEADER)} |" in page
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json")):
        result = json.loads(path.read_text())
        speeds = [summary["fps"] for summary in result["summaries"]]
        row = learning.table_row(result["suite"], result["returns"], result["env_steps"], speeds)
        assert f"| {' | '.join(row)} |" in page, path.name


def test_a_target_for_more_seeds_than_were_trained_is_open(monkeypatch):
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    table_row = importlib.import_module("learning").table_row
    target, reached, seeds = table_row("td3-walker2d", [4800.0, 4900.0], 1_000_000, [400.0, 500.0])[4:7]
    assert (target, reached, seeds) == ("4700", "open", "2 of 3")
    assert table_row("td3-walker2d", [4800.0, 4900.0, 4500.0], 1_000_000, [400.0] * 3)[4:7] == ["4700", "yes", "3"]


def test_the_comparison_shows_the_newest_episodes(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    recent_returns = importlib.import_module("plot_learning").recent_returns
    returns = np.random.default_rng(0).normal(size=120)
    means = [returns[max(0, n - 100) : n].mean() for n in range(1, 121)]
    found = recent_returns({"env_steps": [200 * n for n in range(1, 121)], "ep_rew_mean": means}, 1)
    wanted = [returns[max(0, n - 10) : n].mean() for n in range(1, 101)] + means[100:]
    np.testing.assert_allclose(found, wanted, atol=1e-9)
    # Four environments: reports in the middle of episodes, of 20 episodes each.
    found = recent_returns({"env_steps": [4076, 8152], "ep_rew_mean": [returns[:20].mean(), returns[:40].mean()]}, 4)
    np.testing.assert_allclose(found, [returns[:20].mean(), returns[20:40].mean()], atol=1e-9)


def test_the_comparison_counts_on_where_a_run_was_resumed(monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    plot_learning = importlib.import_module("plot_learning")
    returns = np.random.default_rng(0).normal(size=60)
    # Stopped after 28.5 episodes; the run counts episodes and seconds anew from there.
    stopped = {"env_steps": [200 * n for n in range(1, 29)] + [5700], "seconds": [float(n) for n in range(1, 29)] + [28.5]}
    means = [returns[:n].mean() for n in range(1, 29)] + [returns[:28].mean()]
    means += [returns[28:n].mean() for n in range(29, 61)]
    steps = stopped["env_steps"] + [200 * n for n in range(29, 61)]
    curve = {"env_steps": steps, "ep_rew_mean": means, "seconds": stopped["seconds"] + [n - 28.5 for n in range(29, 61)]}
    wanted = [returns[max(0, n - 10) : n].mean() for n in (*range(1, 29), 28, *range(29, 61))]
    np.testing.assert_allclose(plot_learning.recent_returns(curve, 1), wanted, atol=1e-9)
    np.testing.assert_allclose(plot_learning.training_seconds(curve), np.array(steps) / 200)


def drawn_lines(monkeypatch, result):
    """The lines of the picture of a result: those of the seeds, the mean, and the labels of all."""
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    axes = importlib.import_module("matplotlib.figure").Figure().add_subplot()
    importlib.import_module("plot_learning").draw(axes, result)
    mean = next(line for line in axes.lines if line.get_label().startswith("mean of"))
    seeds = [line for line in axes.lines if line.get_linewidth() < 1]
    return [line.get_ydata() for line in seeds], mean.get_ydata(), {line.get_label() for line in axes.lines}


def test_learning_curves_of_pendulum_end_at_the_newest_episodes(monkeypatch):
    result = json.loads((ROOT / "benchmarks" / "results" / "td3-pendulum.json").read_text())
    seeds, mean, labels = drawn_lines(monkeypatch, result)
    assert np.abs([returns[-1] for returns in seeds] - np.array(result["returns"])).max() < 60
    assert abs(mean[-1] - result["mean"]) < 30
    # Seed 7 was resumed, and its mean over all episodes so far rose by 900 within one report.
    assert np.abs(np.diff(mean[20:])).max() < 120
    assert {"target of the greedy policy: -160", "stopped and resumed"} <= labels


def test_learning_curves_are_interrupted_where_a_run_was_resumed(monkeypatch):
    steps = [5000 * n for n in range(1, 61)]
    rising = [-200.0 + 7 * n for n in range(60)]
    whole = {"env_steps": steps, "ep_rew_mean": rising, "seconds": [float(n) for n in range(60)]}
    # The first report after the resume is the mean of one episode.
    restarted = {**whole, "ep_rew_mean": [*rising[:20], 300.0, *rising[21:]], "seconds": [float(n % 20) for n in range(60)]}
    restarted["seconds"][40:] = [float(n) for n in range(20, 40)]
    result = {"suite": "sac-lunarlandercontinuous", "env": "LunarLanderContinuous-v3", "env_steps": 300_000, "wanted": 250.0}
    result |= {"source": "this project's", "summaries": [{"curve": whole}, {"curve": restarted}]}
    seeds, mean, labels = drawn_lines(monkeypatch, result)
    assert [int(np.isnan(returns).sum()) for returns in seeds] == [0, 1]
    assert np.isnan(mean).any() and np.nanmax(np.abs(np.diff(mean))) < 10
    assert "stopped and resumed" in labels


@pytest.mark.slow
def test_plotting_draws_the_picture_of_each_result(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.syspath_prepend(ROOT / "benchmarks")
    plot_learning = importlib.import_module("plot_learning")
    monkeypatch.setattr("sys.argv", ["plot_learning.py", "--pictures", str(tmp_path)])
    plot_learning.main()
    drawn = {path.name for path in tmp_path.iterdir()}
    assert drawn == {path.name for path in (DOCS / "pictures").glob("learning-*.svg")}


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    """The documentation site, built without warnings."""
    pytest.importorskip("zensical")
    directory = tmp_path_factory.mktemp("site")
    for name in ("docs", "src", "examples"):
        shutil.copytree(ROOT / name, directory / name)
    for name in ("mkdocs.yml", *ROOT_PAGES):
        shutil.copy(ROOT / name, directory)
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    process = subprocess.run(command, cwd=directory, capture_output=True, text=True)
    # Warnings of griffe are written, but do not fail the build.
    assert process.returncode == 0 and process.stderr == "No issues found\n", process.stdout + process.stderr
    return directory / "build" / "site"


@pytest.mark.slow
def test_the_site_loads_nothing_from_elsewhere(site):
    assert (site / "index.html").exists()
    for page in site.rglob("*.html"):
        loaded = re.findall(r'<(?:script|link|img)[^>]+(?:src|href)="(https?://[^"]+)"', page.read_text())
        assert not [url for url in loaded if "polyak" not in url], f"{page}: {loaded} are loaded from elsewhere"


@pytest.mark.slow
def test_the_api_reference_states_the_defaults_of_settings(site):
    page = (site / "api" / "agents" / "index.html").read_text()
    assert 'id="polyak.PPO"' in page
    text = " ".join(re.sub("<[^>]+>", "", page).split())
    assert "1 the return up to the end of the rollout. Default: 0.95." in text
    settings = [name for name in ("PPO", "DQN", "SAC") for name in inspect.signature(getattr(polyak, name)).parameters]
    assert text.count(" Default: ") >= len(settings) - 3, "all but spec have a default"


@pytest.mark.slow
def test_the_api_reference_keeps_shapes_as_they_are_written(site):
    for page in (site / "api").rglob("*.html"):
        text = html.unescape(re.sub("<[^>]+>", "", page.read_text()))
        assert not re.findall(r"\w+\[Array, '[^]]*\]", text), page


@pytest.mark.slow
def test_flags_stay_in_one_line(site):
    for page in site.rglob("*.html"):
        text = re.sub(r"<pre\b.*?</pre>", "", page.read_text(), flags=re.DOTALL)
        codes = re.findall(r"<code>(.*?)</code>", text)
        assert not [code for code in codes if re.search(r"(?<![\w>-])--[a-z]", code)], page
    assert '<span class="flag">--updates-per-step</span>' in (site / "actor-critics" / "index.html").read_text()


@pytest.mark.slow
def test_links_of_the_site_lead_to_files_and_anchors(site):
    pages = {page: page.read_text() for page in site.rglob("*.html")}
    anchors = {page: set(re.findall(r' (?:id|name)="([^"]+)"', text)) for page, text in pages.items()}
    for page, text in pages.items():
        for link in re.findall(r'<(?:a|img) [^>]*(?:href|src)="((?![a-z]+:)[^"]+)"', text):
            path, _, anchor = link.partition("#")
            # The page for addresses that do not exist has links from the root.
            target = (site / path.lstrip("/") if path.startswith("/") else page.parent / path) if path else page
            target = (target / "index.html" if target.is_dir() else target).resolve()
            assert target.exists(), f"{page}: {link}"
            assert not anchor or anchor in anchors[target], f"{page}: {link}"


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_axe_finds_nothing_serious_on_the_site_which_fits_its_window(site, tmp_path):
    for width, scheme, found in ((360, "dark", "slate"), (1280, "light", "default")):
        # A browser each, as the site keeps the scheme of the first visit.
        with Browser(tmp_path / scheme) as browser:
            for name in ("", "gallery", "results", "tutorials/train-and-look"):
                browser.open((site / name / "index.html").as_uri(), width=width, scheme=scheme)
                assert browser.evaluate("document.body.dataset.mdColorScheme") == found
                assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), name
                code = "[...document.querySelectorAll('pre > code')].find((one) => one.scrollWidth > one.clientWidth)"
                browser.wait_until(f"({code}?.tabIndex ?? 0) === 0")
                assert serious_findings(browser) == [], name


def test_the_site_states_the_version_of_the_package():
    assert f"\ncopyright: polyak {polyak.__version__}, " in (ROOT / "mkdocs.yml").read_text()


def test_pictures_of_agents_are_small():
    sizes = {path.name: path.stat().st_size for path in (DOCS / "pictures").glob("agent-*.gif")}
    assert sizes["agent-lander.gif"] <= 300_000 and sum(sizes.values()) <= 2_000_000
    assert all(f"(pictures/{name})" in PAGES["docs/gallery.md"] for name in sizes)


def test_the_block_finder_keeps_the_order_of_the_page():
    page = "```sh\npolyak list\n```\ntext\n```python\nx = 1\n```\n```py\nnot run\n```\n"
    assert [(language, text) for language, _, text in blocks(page)] == [("sh", "polyak list\n"), ("python", "x = 1\n")]
    assert shorten("run(env_steps=1_000_000, num_envs=64, episodes=2)") == "run(env_steps=320, num_envs=16, episodes=2)"
