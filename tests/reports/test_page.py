"""Reports in a browser: drawn without an error or a request, at every width, in light and dark, by keyboard, and with axe."""

import json

import pytest

import polyak
from polyak.studies.journal import Trial
from polyak.studies.page import write_page
from tests.reports.axe import serious_findings
from tests.reports.browser import CHROMIUM, Browser
from tests.reports.written_runs import linear_rows, write_run

pytest.importorskip("bokeh")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium"),
]

ATTACK = "</script><script>window.attacked = 1</script><img src=x onerror='window.attacked = 1'>"
DRAWN = "document.querySelectorAll('.plot > *').length > 0"


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    with Browser(tmp_path_factory.mktemp("browser")) as started:
        yield started


@pytest.fixture(scope="module")
def pages(tmp_path_factory, trained):
    """A report of one run, and one of several runs, each with hostile texts."""
    root = tmp_path_factory.mktemp("pages")
    run = trained.save(root / "run")
    system = json.loads((run / "system.json").read_text())
    (run / "system.json").write_text(json.dumps(system | {ATTACK: ATTACK, "command_line": ["polyak", "train", ATTACK]}))
    for rate in (0.1, 0.01):
        for seed in range(3):
            rows = [row | {f"train/{ATTACK}": 1.0} for row in linear_rows(20, start=seed, slope=rate * 10, every=5)]
            path = root / "runs" / f"{ATTACK.replace('/', '')}{rate}-{seed}"
            write_run(path, rows, seed=seed, env=ATTACK, agent={"learning_rate": rate}, stopped=f"Error: {ATTACK}")
    scores = {"score": 9.0, "scores": (9.0,), "fresh_scores": (7.0, 8.0)}
    preset, best = Trial(0, "complete", {}, **scores), Trial(2, "complete", {"gamma": 0.9, "kind": ATTACK}, **scores)
    failed = Trial(1, "failed", {"gamma": 0.5, "kind": ATTACK}, None, error=ATTACK)
    write_page(root / "study.html", f"ppo {ATTACK}", [preset, failed, best], best, {"gamma": 0.7, ATTACK: 0.3})
    made = {
        "study": root / "study.html",
        "run": polyak.report(run, output=root / "run.html"),
        "runs": polyak.report(root / "runs", output=root / "runs.html"),
    }
    return {name: path.as_uri() for name, path in made.items()}


def focus(browser):
    return browser.evaluate("document.activeElement.tagName + '.' + document.activeElement.className")


@pytest.mark.parametrize("page", ["run", "runs", "study"])
@pytest.mark.parametrize(("width", "scheme"), [(360, "light"), (768, "dark"), (1440, "light"), (1920, "dark")])
def test_a_page_opens_without_an_error_or_a_request_and_fits_its_window(browser, pages, page, width, scheme):
    browser.open(pages[page], width=width, scheme=scheme)
    browser.evaluate("document.querySelector('.plot').scrollIntoView()")
    browser.wait_until(DRAWN)
    assert browser.errors() == []
    assert browser.requests() == [pages[page]]
    assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert browser.evaluate("window.attacked === undefined && document.images.length === 0")
    paper = browser.evaluate("getComputedStyle(document.body).backgroundColor")
    assert paper == ("rgb(255, 255, 255)" if scheme == "light" else "rgb(20, 22, 27)")
    word = {"run": "Settings", "runs": "Runs", "study": "Importances"}[page]
    assert word in browser.evaluate("document.body.innerText")


def test_curves_have_ink(browser, pages):
    browser.open(pages["runs"])
    browser.wait_until(DRAWN)
    blue = """(() => {
        const find = (node) => [...(node.shadowRoot ?? node).querySelectorAll('*')].flatMap(
            (inner) => (inner.tagName === 'CANVAS' ? [inner] : inner.shadowRoot ? find(inner) : []));
        return find(document.querySelector('.plot')).some((canvas) => {
            const data = canvas.width ? canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height).data : [];
            for (let i = 0; i < data.length; i += 4) if ([47, 98, 196].every((part, n) => data[i + n] === part)) return true;
            return false;
        });
    })()"""
    browser.wait_until(blue)


def test_the_keyboard_reads_curves_switches_axes_hides_groups_and_sorts(browser, pages):
    browser.open(pages["runs"])
    browser.wait_until(DRAWN)
    browser.press("Tab")
    assert focus(browser) == "A.skip"
    browser.evaluate("document.querySelector('.plot').focus()")
    browser.press("Home")
    text = browser.evaluate("document.querySelector('.reading').textContent")
    assert text.startswith("100 env_steps: learning_rate=0.01 1.1 [0.1, 2.1], learning_rate=0.1 2 [1, 3]")
    assert browser.evaluate("document.querySelector('.plot').getAttribute('aria-valuetext')") == text
    browser.press("ArrowRight")
    assert browser.evaluate("document.querySelector('.reading').textContent").startswith("200 env_steps")
    browser.evaluate("document.querySelector('#axis input').focus()")
    browser.press("ArrowRight")
    browser.evaluate("document.querySelector('.plot').focus()")
    browser.press("End")
    assert browser.evaluate("document.querySelector('.reading').textContent").startswith("10 seconds: ")
    browser.evaluate("document.querySelector('.legend button').focus()")
    browser.press("Enter")
    assert browser.evaluate("document.activeElement.getAttribute('aria-pressed')") == "false"
    assert browser.evaluate("document.querySelector('.legend button').textContent") == "learning_rate=0.01"
    browser.evaluate("[...document.querySelectorAll('#runs th button')].find((b) => b.textContent === 'return').focus()")
    names = "[...document.querySelectorAll('#runs tbody td:nth-child(7)')].map((cell) => Number(cell.textContent))"
    browser.press("Enter")
    assert (ascending := browser.evaluate(names)) == sorted(ascending)
    browser.press("Enter")
    assert browser.evaluate(names) == ascending[::-1]
    assert browser.evaluate("document.activeElement.closest('th').getAttribute('aria-sort')") == "descending"
    assert browser.errors() == []


def test_the_filter_hides_other_runs(browser, pages):
    browser.open(pages["runs"])
    browser.evaluate("document.getElementById('filter').focus()")
    browser.call("Input.insertText", text="0.01-2")
    assert browser.evaluate("[...document.querySelectorAll('#runs tbody tr')].filter((row) => !row.hidden).length") == 1
    assert browser.evaluate("document.getElementById('shown').textContent") == "1 of 6 runs"


@pytest.mark.parametrize("page", ["run", "runs", "study"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing_serious(browser, pages, page, scheme):
    browser.open(pages[page], scheme=scheme)
    browser.wait_until(DRAWN)
    assert serious_findings(browser) == []
