"""Trainings in processes of their own, and what they left."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np

import polyak
from polyak.runs import read_config, run_key
from polyak.storage.checkpoint import restore
from polyak.storage.run_directory import open_run
from polyak.train.evaluation import make_again

SETTINGS = "--hidden 4 --num-steps 8 --num-envs 2 --num-epochs 1 --num-minibatches 1 --eval-episodes 2"


def edit_config(run, old, new):
    """Replace text in a run's config.json, and drop its hash, as in the runs of older versions."""
    path = run / "config.json"
    text = path.read_text()
    assert old in text
    config = json.loads(text.replace(old, new, 1))
    del config["sha256"]
    path.write_text(json.dumps(config))


def environment(jax_cache=None):
    """Of a process with one device, and of one memory of compiled programs with others."""
    cache = {"JAX_COMPILATION_CACHE_DIR": str(jax_cache), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0"}
    own = {"JAX_NUM_CPU_DEVICES": "1", "POLYAK_COMPILATION_CACHE": "1"}
    return {**os.environ, **own, **(cache if jax_cache else {})}


def start(arguments, directory, jax_cache=None):
    """`polyak ARGUMENTS` in a new process."""
    return subprocess.Popen(
        [sys.executable, "-m", "polyak", *arguments.split()],
        cwd=directory,
        env=environment(jax_cache),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process, seconds=120):
    """Its exit code and output, once it has ended by itself."""
    out, _ = process.communicate(timeout=seconds)
    return process.returncode, out


def wait_until(condition, process, seconds=120):
    """Wait for the condition while the process lives."""
    end = time.monotonic() + seconds
    while not condition():
        assert process.poll() is None, process.communicate()[0]
        if time.monotonic() > end:
            # Left alone, it would slow down every test after this one.
            process.kill()
            raise AssertionError("waited in vain")
        time.sleep(0.005)


def rows(run):
    """Lines in a run's metrics."""
    path = Path(run) / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def metrics(run):
    """All that a run has recorded, but for what its clock says."""
    clocks = ("time/fps", "time/time_elapsed")
    return [{name: value for name, value in row.items() if name not in clocks} for row in open_run(run).read_metrics()]


def last_checkpoint(run):
    """The name of a run's newest checkpoint, and its arrays to the bit: segments are named by their content."""
    newest = max(path for path in (Path(run) / "checkpoints").iterdir() if path.name.isdigit())
    leaves = json.loads((newest / "manifest.json").read_text())["leaves"]
    segments = {leaf["path"]: leaf["segments"] for leaf in leaves if "segments" in leaf}
    return newest.name, (newest / "arrays.safetensors").read_bytes(), segments


def check_that_its_config_runs_again_to_the_same_bits(run):
    """A training of what config.json says ends with the parameters of the newest checkpoint."""
    stored = open_run(run)
    config = read_config(stored)
    env = make_again(stored, config, None, config.num_envs)
    result = polyak.train.run(
        config.agent, env, env_steps=config.env_steps, key=run_key(config.seed), report_every=config.report_every
    )
    saved = restore(Path(run) / "checkpoints", jax.eval_shape(config.agent.init, run_key(0)), prefix=".agent")
    assert saved.step == result.progress.env_steps
    for got, wanted in zip(jax.tree.leaves(result.state), jax.tree.leaves(saved.tree), strict=True):
        np.testing.assert_array_equal(got, wanted)
