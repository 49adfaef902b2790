"""The live page: for this machine's browsers only, and up to date while runs appear, grow, fail and vanish."""

import contextlib
import http.client
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.parse

import pytest

from polyak.cli import main
from polyak.reports.live import LivePages, Query, serve_reports
from polyak.reports.live_runs import LiveRuns
from polyak.reports.page import Live, render_page
from polyak.storage.run_directory import RunError, open_run
from tests.reports.written_runs import linear_rows, write_run

pytest.importorskip("bokeh")


class Client:
    def __init__(self, port):
        self.port = port

    def ask(self, path, method="GET", **headers):
        """The answer to a request: (status, headers, body)."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=20)
        with contextlib.closing(connection):
            named = {name.replace("_", "-"): value for name, value in headers.items()}
            connection.request(method, path, headers={"Host": f"127.0.0.1:{self.port}"} | named)
            answer = connection.getresponse()
            return answer.status, answer.headers, answer.read()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    root = tmp_path_factory.mktemp("live") / "runs"
    for seed in range(2):
        write_run(root / f"ppo/seed-{seed}", linear_rows(10, start=seed), seed=seed)
    (root / "ppo/seed-0/videos").mkdir()
    (root / "ppo/seed-0/videos/one.mp4").write_bytes(bytes(range(100)))
    (root / "ppo/seed-1/videos").symlink_to("/etc")
    (root / "secret.txt").write_text("secret")
    return root


@pytest.fixture(scope="module")
def client(directory):
    """A client of a server in a process of its own, which Ctrl-C ends."""
    command = [sys.executable, "-m", "polyak", "report", "--live", str(directory), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as server:
        line = server.stdout.readline()
        yield Client(int(re.match(r"http://127\.0\.0\.1:(\d+)/ shows the runs in ", line)[1]))
        server.send_signal(signal.SIGINT)
        _, err = server.communicate(timeout=20)
        assert (server.returncode, err) == (130, "stopped by Ctrl-C\n")


def test_the_page_lists_all_runs_with_boxes_and_says_so_in_safe_headers(client):
    status, headers, body = client.ask("/")
    page = body.decode()
    assert status == 200 and 'value="ppo/seed-0"' in page and 'href="/?show=ppo%2Fseed-1"' in page
    policy = headers["Content-Security-Policy"]
    assert "default-src 'none'" in policy and "frame-ancestors 'none'" in policy and "connect-src 'self'" in policy
    assert headers["X-Content-Type-Options"] == "nosniff" and headers["X-Frame-Options"] == "DENY"
    assert headers["Cache-Control"] == "no-store" and headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Access-Control-Allow-Origin"] is None


@pytest.mark.parametrize("host", ["evil.com", "127.0.0.1", "127.0.0.1:1", "evil.com:{port}", "127.0.0.1.evil.com:{port}", ""])
@pytest.mark.parametrize("path", ["/", "/update", "/video?show=ppo%2Fseed-0"])
def test_a_foreign_host_is_rejected(client, host, path):
    status, _, body = client.ask(path, Host=host.format(port=client.port))
    assert status == 403 and b"ppo" not in body
    assert client.ask("/update", Host=f"localhost:{client.port}")[0] == 200


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE"])
def test_only_get_and_head_are_answered(client, method):
    status, headers, _ = client.ask("/", method)
    assert status == 405 and headers["Allow"] == "GET, HEAD"
    status, headers, body = client.ask("/", "HEAD")
    assert status == 200 and body == b"" and int(headers["Content-Length"]) > 1_000_000


@pytest.mark.parametrize(
    "path", ["/secret.txt", "/../secret.txt", "//etc/passwd", "/%2e%2e/%2e%2e/etc/passwd", "/ppo/seed-0/config.json", "/runs"]
)
def test_no_address_names_a_file(client, path):
    assert client.ask(path)[0] == 404


@pytest.mark.parametrize("name", ["../../etc", "/etc", "ppo", "ppo/../ppo/seed-0", "ppo/seed-1", "", "\0"])
def test_videos_are_those_of_the_directorys_runs(client, name):
    status, _, body = client.ask(f"/video?{urllib.parse.urlencode({'show': name})}")
    assert (status, body) == (404, b"")


@pytest.mark.parametrize(
    ("asked", "status", "part"),
    [(None, 200, range(100)), ("bytes=10-19", 206, range(10, 20)), ("bytes=90-", 206, range(90, 100)), ("bytes=100-", 416, ())],
)
def test_a_video_is_sent_whole_or_in_part(client, asked, status, part):
    got = client.ask("/video?show=ppo%2Fseed-0", **({} if asked is None else {"Range": asked}))
    assert (got[0], got[2]) == (status, bytes(part))


@pytest.mark.parametrize("query", ["run=%ff", "&".join(["run=a"] * 3000)])
def test_a_malformed_address_is_rejected(client, query):
    assert client.ask(f"/update?{query}")[0] == 400


def test_an_update_has_the_picked_runs_and_is_sent_once(client):
    status, headers, body = client.ask("/update?run=ppo%2Fseed-0&run=ppo%2Fseed-1&run=nothing&group-by=seed&group-by=nothing")
    update = json.loads(body)
    assert status == 200 and "2 runs in 2 groups" in update["content"] and update["charts"]["charts"]
    path = "/update?run=ppo%2Fseed-0&run=ppo%2Fseed-1&run=nothing&group-by=seed&group-by=nothing"
    assert client.ask(path, If_None_Match=headers["ETag"])[0::2] == (304, b"")
    one = json.loads(client.ask("/update?show=ppo%2Fseed-0")[2])
    assert "all runs" in one["head"] and "/video?show=ppo%2Fseed-0" in one["content"]
    gone = json.loads(client.ask("/update?show=no%3Cb%3Esuch")[2])
    assert "no&lt;b&gt;such: this run is not here any more" in gone["content"]


def test_a_hundred_tabs_and_silent_connections_are_answered(client):
    with contextlib.ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(socket.create_connection(("127.0.0.1", client.port)))
        answers = []
        threads = [threading.Thread(target=lambda: answers.append(client.ask("/update")[0])) for _ in range(100)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert answers == [200] * 100


def test_a_port_in_use_is_one_error(client, directory, capsys):
    assert main(["report", "--live", str(directory), "--port", str(client.port)]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err == f"error: port {client.port} of 127.0.0.1 is in use; choose another one with --port\n"


def test_a_directory_that_is_missing_or_a_file_is_one_error(tmp_path):
    (tmp_path / "file").write_text("")
    for name, reason in (("nothing", "there is no such directory"), ("file", "is not a directory")):
        with pytest.raises(RunError, match=f"{name}: {reason}; the live page needs a directory of runs"):
            serve_reports(tmp_path / name, 0, print)


def view(runs, show=None, picked=(), group_by=()):
    runs.refresh()
    return render_page(runs.view(show, picked, group_by), Live(2.0)).decode()


def test_runs_appear_grow_are_killed_damaged_and_removed(tmp_path):
    root = tmp_path / "runs"
    root.mkdir()
    runs = LiveRuns(root)
    assert "There are no runs here yet." in view(runs)
    path = write_run(root / "a", linear_rows(3), summary=False, env_steps=10_000)
    with open_run(path, write=True) as run:
        first = runs.refresh()
        assert "training" in view(runs) and runs.refresh() == first
        run.append_metrics({"env_steps": 7_777, "rollout/ep_rew_mean": 4_321.0, "train/new": 1.0})
        assert runs.refresh() != first
        assert "7,777" in view(runs) and "4,321" in view(runs, picked=["a"]) and "train/new" in view(runs, show="a")
        # A kill in the middle of a row.
        with (path / "metrics.jsonl").open("a") as file:
            file.write('{"env_steps": 8')
        assert "7,777" in view(runs)
    # Nothing changes on the disk when a process is killed.
    assert "killed" in view(runs)
    (path / "metrics.jsonl").write_text("{]\n")
    assert "metrics.jsonl, line 1: not valid JSON" in view(runs) and "not valid JSON" in view(runs, show="a")
    write_run(root / "b/c", linear_rows(3))
    (root / "broken").mkdir()
    (root / "broken/config.json").write_text("{")
    page = view(runs, picked=["b/c"])
    assert "1 run of one group" in page and "broken/config.json: not valid JSON" in page
    for name in ("a", "b", "broken"):
        shutil.rmtree(root / name)
    assert "this run is not here any more" in view(runs, show="b/c")
    root.rmdir()
    assert "There are no runs here yet." in view(runs)


def test_a_page_is_made_again_only_when_runs_change_and_there_is_time(tmp_path):
    path = write_run(tmp_path / "runs/a", linear_rows(3))
    pages = LivePages(tmp_path / "runs")
    made = pages.update(Query())
    assert pages.update(Query()) is made
    with (path / "metrics.jsonl").open("a") as file:
        file.write('{"env_steps": 400}\n')
    # The time of the last look, times 100, has not passed.
    assert pages.update(Query()) is made
    assert pages.update(Query(picked=("a",))).state > made.state
    deadline = time.monotonic() + 20
    while (newer := pages.update(Query())) is made:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert newer.etag != made.etag


def test_many_different_pages_are_not_all_kept(tmp_path):
    write_run(tmp_path / "runs/a", linear_rows(3))
    pages = LivePages(tmp_path / "runs")
    for n in range(70):
        pages.update(Query(show=str(n)))
    assert len(pages._pages) == 64
