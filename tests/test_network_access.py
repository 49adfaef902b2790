"""polyak downloads nothing; workers and learners of a training, and `polyak report --live`, alone open connections."""

import ast
import textwrap
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "polyak"
REACHING = {
    *("socket", "socketserver", "ssl", "asyncio", "http", "urllib", "ftplib", "smtplib", "poplib", "imaplib"),
    *("telnetlib", "xmlrpc", "webbrowser", "requests", "httpx", "aiohttp", "urllib3", "websockets", "grpc", "zmq", "paramiko"),
    *("huggingface_hub", "wandb", "mlflow", "fsspec", "boto3", "gdown", "subprocess", "pty", "ray", "tensorboard"),
}
STARTING = {"system", "popen", "posix_spawn", "posix_spawnp", "fork", "forkpty", "execv", "execve", "execvp", "execvpe"}
ALLOWED = {
    # The name of this host, in a lock's message and in a file's name.
    "storage/lock.py": {"socket"},
    "storage/writers.py": {"socket"},
    # Time limits of the pipes to its own processes.
    "envs/process_workers.py": {"socket"},
    # Its format of files, not its server.
    "storage/tensorboard.py": {"tensorboard"},
    # The caller's own tracking, which is asked for.
    "train/callbacks.py": {"mlflow"},
    "tracking/names.py": {"wandb", "mlflow", "tensorboard"},
    "tracking/to_wandb.py": {"wandb"},
    "tracking/to_mlflow.py": {"mlflow"},
    # A program that is not known is first read in another process.
    "export/stablehlo.py": {"subprocess"},
    # ffmpeg, which reads images from a pipe, and a library of OpenGL that is tried in another process.
    "videos/encoder.py": {"subprocess"},
    "dynamics/opengl.py": {"subprocess"},
    # Asks whether the robots that the library is about to clone can be reached.
    "dynamics/playground.py": {"subprocess"},
    # Opens a report where --open asks for it, and serves a page for this machine alone where --live does.
    "cli/report.py": {"webbrowser"},
    "reports/live.py": {"http", "urllib"},
    "reports/live_runs.py": {"urllib"},
    "reports/live_video.py": {"http"},
    # Its own processes, over a pair of sockets.
    "studies/jobs.py": {"subprocess"},
    "workers/learner_group.py": {"socket", "subprocess"},
    "workers/ray_head.py": {"ray", "subprocess"},
    "workers/ray_workers.py": {"ray", "socket", "subprocess"},
}


def findings(text: str) -> set[str]:
    """Modules that reach beyond this process, and functions of `os` that start a program, used anywhere in a source."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names} & REACHING
        elif isinstance(node, ast.ImportFrom):
            module = (node.module or "").partition(".")[0]
            found |= {module} & REACHING
            found |= {alias.name for alias in node.names if module == "os"} & STARTING
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "os":
            found |= {node.attr} & STARTING
    return found


def test_no_source_file_reaches_the_network_or_starts_a_program():
    found = {str(path.relative_to(SOURCE)): findings(path.read_text()) for path in SOURCE.rglob("*.py")}
    others = {path: names - ALLOWED.get(path, set()) for path, names in found.items()}
    assert not {path: names for path, names in others.items() if names}


def test_the_format_of_tensorboard_is_written_without_its_server():
    nodes = ast.walk(ast.parse((SOURCE / "storage/tensorboard.py").read_text()))
    imported = {node.module for node in nodes if isinstance(node, ast.ImportFrom)}
    assert {name for name in imported if name and name.startswith("tensorboard")} == {
        "tensorboard.compat.proto.event_pb2",
        "tensorboard.compat.proto.summary_pb2",
        "tensorboard.summary.writer.record_writer",
    }


@pytest.mark.parametrize(
    "planted",
    [
        "import urllib.request",
        "from urllib.request import urlopen",
        "def f():\n    import requests",
        "from huggingface_hub import hf_hub_download as get",
        "import http.server",
        "import subprocess",
        "import os\nos.system('tensorboard')",
        "from os import popen",
        "from tensorboard import program",
    ],
)
def test_the_scan_finds_planted_samples(planted):
    assert findings(textwrap.dedent(planted))
