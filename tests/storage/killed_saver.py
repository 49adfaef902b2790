"""Saves in a child that is killed at random moments, again and again; prints how far the saves came and
how many were torn.

A process of its own, so that it can fork; the tree is NumPy's, so that JAX does nothing in it.
"""

import os
import random
import signal
import sys
import time

import numpy as np

from polyak.storage.checkpoint import restore, save, steps
from polyak.storage.run_directory import machine_shape


def tree(step):
    return {"a": np.full((20, 100), step, np.float32), "b": [np.arange(step, step + 3000), step]}


def save_until_killed(directory, step, acknowledge):
    while True:
        step += 1
        # Every third one takes the place of one that is there.
        if step % 3 == 0:
            save(directory, tree(step), step=step, meta={"step": step}, keep=2)
        save(directory, tree(step), step=step, meta={"step": step}, keep=2, overwrite=True)
        os.write(acknowledge, step.to_bytes(8, "little"))


def kill_after_some_saves(child, reader):
    """Kill the child somewhere in its next saves; returns the last step that it had acknowledged."""
    os.read(reader, 8)
    start = time.monotonic()
    last = os.read(reader, 8)
    time.sleep(random.uniform(0, 2) * (time.monotonic() - start))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return int.from_bytes((last + os.read(reader, 1 << 16))[-8:], "little")


def main(directory, kills):
    machine_shape()
    random.seed(0)
    step = torn = 0
    for _ in range(kills):
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            save_until_killed(directory, step, writer)
        os.close(writer)
        acknowledged = kill_after_some_saves(child, reader)
        os.close(reader)
        torn += any(name.startswith((".tmp-", ".replaced-")) for name in os.listdir(directory))
        restored = restore(directory, tree(0))
        step = restored.step
        assert step >= acknowledged, (step, acknowledged)
        assert restored.meta == {"step": step}
        assert np.array_equal(restored.tree["a"], tree(step)["a"])
        assert np.array_equal(restored.tree["b"][0], tree(step)["b"][0])
        assert restored.tree["b"][1] == step
        assert len(steps(directory)) >= min(2, step), (steps(directory), step)
    save(directory, tree(step + 1), step=step + 1, meta={}, keep=2)
    left = [name for name in os.listdir(directory) if name.startswith(".") and name != ".lock"]
    assert not left, left
    print(step, torn)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
