"""Progress in a notebook: one output that changes, and a result after an interrupt."""

import sys
import types

import pytest

from polyak.core.types import Progress
from polyak.train.display import Screen, show_progress

CELLS = (
    """
import os, signal, threading
import polyak
settings = {"num_steps": 16, "num_epochs": 1, "num_minibatches": 1}
given = {"num_envs": 2, "settings": settings, "eval_every": 150, "eval_episodes": 2}
result = polyak.train.run("ppo", "jax/CartPole-v1", env_steps=300, **given)
""",
    """
sent = []

def interrupt(progress, metrics, state):
    # Once: a second interrupt ends the training at once.
    if progress.env_steps > 10_000 and not sent:
        sent.append(progress)
        os.kill(os.getpid(), signal.SIGINT)

given |= {"eval_every": None, "eval_episodes": 0, "callbacks": [interrupt]}
stopped = polyak.train.run("ppo", "jax/CartPole-v1", env_steps=1_000_000, report_every=1000, **given)
""",
    "print(stopped.stopped, stopped.progress.env_steps < 1_000_000, stopped.policy.predict([0.0, 0.0, 0.0, 0.0])[0] in (0, 1))",
)


class Handle:
    def __init__(self):
        self.shown = []

    def update(self, picture):
        self.shown.append(picture)


@pytest.fixture
def kernel(monkeypatch):
    """A notebook's kernel, as far as it is used: the outputs that it shows, each with its later states."""
    outputs = []

    def display(picture, display_id):
        handle = Handle()
        handle.update(picture)
        outputs.append(handle)
        return handle

    shell = types.SimpleNamespace(kernel=object())
    monkeypatch.setitem(sys.modules, "IPython", types.SimpleNamespace(get_ipython=lambda: shell))
    monkeypatch.setitem(sys.modules, "IPython.display", types.SimpleNamespace(display=display))
    return outputs


def test_a_notebook_has_one_output_that_changes(kernel, capsys):
    with show_progress(Screen(), "ppo <b>", 1000) as display:
        for steps in (500, 1000):
            display(Progress(steps, 1000, 1, steps / 100, 2.5, 100.0), {"rollout/ep_rew_mean": 21.0}, None)
    ((first, middle, last),) = [output.shown for output in kernel]
    assert repr(first) == "ppo <b>: compiling …"
    assert 'value="500" max="1000"' in middle._repr_html_() and "ppo &lt;b&gt;" in middle._repr_html_()
    assert repr(last) == "ppo <b>: 1,000 of 1,000 env_steps, 100/s, mean return 21.0, 0 s left"
    assert capsys.readouterr().out == "compiled in 2.5 s\n"


def test_a_quiet_training_shows_nothing_in_a_notebook(kernel, capsys):
    with show_progress(Screen(quiet=True), "ppo", 1000) as display:
        display(Progress(1000, 1000, 1, 1.0, 2.5, 100.0), {}, None)
    assert kernel == [] and capsys.readouterr().out == ""


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_a_notebook_of_jupyter_has_one_bar_and_one_text(tmp_path):
    nbclient = pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    nbformat = pytest.importorskip("nbformat")
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in CELLS])
    # A front end shows streams that follow each other as one, as `coalesce_streams` does.
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=200, coalesce_streams=True, resources=resources).execute()
    for cell, end in zip(notebook.cells[:2], ("300 of 300 env_steps", "of 1,000,000 env_steps"), strict=True):
        bar, *texts = cell.outputs
        assert bar.output_type == "display_data" and end.replace("300 of", "of") in bar.data["text/plain"]
        assert "<progress value=" in bar.data["text/html"]
        # Everything else is one text.
        assert [text.output_type for text in texts] == ["stream"], texts
    assert "evaluated at" in notebook.cells[0].outputs[1].text and "stopped by interrupt" in notebook.cells[1].outputs[1].text
    assert notebook.cells[2].outputs[0].text.strip() == "interrupt True True"
