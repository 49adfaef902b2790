"""The live page in a browser: runs are picked, compared and followed without a reload; a server that ends is noticed."""

import re
import shutil
import signal
import subprocess
import sys

import pytest

from tests.reports.browser import CHROMIUM, Browser
from tests.reports.written_runs import linear_rows, write_run

pytest.importorskip("bokeh")
pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")]


@pytest.fixture
def runs(tmp_path):
    for seed in range(3):
        write_run(tmp_path / f"runs/ppo-{seed}", linear_rows(10, start=seed), seed=seed)
    return tmp_path / "runs"


@pytest.fixture
def server(runs):
    command = [sys.executable, "-m", "polyak", "report", "--live", str(runs), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as started:
        yield started, re.match(r"\S+", started.stdout.readline())[0]
        started.terminate()


def rows(browser):
    return browser.evaluate(
        "[...document.querySelectorAll('#runs tbody tr')].map((row) => row.innerText.replace(/\\s+/g, ' '))"
    )


def test_runs_are_picked_and_followed_without_a_reload(runs, server, tmp_path):
    process, address = server
    with Browser(tmp_path / "browser") as browser:
        browser.open(address)
        assert len(rows(browser)) == 3
        browser.evaluate("window.isSamePage = true; document.querySelector('#runs [name=pick]').focus()")
        browser.press(" ")
        browser.wait_until("document.querySelectorAll('.plot > *').length > 0")
        assert browser.evaluate("document.activeElement.value") == "ppo-0"
        assert browser.evaluate("location.search") == "?run=ppo-0"
        browser.evaluate("document.getElementById('pick-shown').click()")
        browser.wait_until("document.body.innerText.includes('3 runs of one group')")
        # Zoomed and sorted, as a person leaves it.
        browser.evaluate("[...document.querySelectorAll('#runs th button')].find((b) => b.textContent === 'return').click()")
        browser.evaluate("document.querySelector('.plot').focus()")
        browser.press("Home")
        with (runs / "ppo-0/metrics.jsonl").open("a") as file:
            file.write('{"env_steps": 1100, "time/time_elapsed": 6.0, "rollout/ep_rew_mean": 9876.0}\n')
        write_run(runs / "new", linear_rows(4), env="Acrobot-v1")
        shutil.rmtree(runs / "ppo-2")
        browser.wait_until("document.querySelector('#runs').innerText.includes('9,876')")
        browser.wait_until("document.querySelector('#runs').innerText.includes('Acrobot-v1')")
        assert [row.split()[0] for row in rows(browser)] == ["new", "ppo-1", "ppo-0"]
        assert browser.evaluate("document.activeElement.className") == "plot"
        assert browser.evaluate("document.querySelector('.reading').textContent").startswith("100 env_steps")
        browser.evaluate("document.querySelector('#runs a[href*=\"ppo-0\"]').click()")
        browser.wait_until("window.isSamePage === undefined && document.querySelector('h1')?.innerText.includes('ppo')")
        browser.wait_until("document.getElementById('connection').textContent === 'up to date'")
        assert browser.errors() == []
        assert {request.split("/")[2] for request in browser.requests()} == {address.split("/")[2]}
        process.send_signal(signal.SIGINT)
        browser.wait_until("document.getElementById('connection').textContent === 'server stopped'")
