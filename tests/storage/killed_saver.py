"""Saves in a child that is killed at random moments, again and again; prints how often, how far the saves came and how
many were torn.

A process of its own, so that it can fork; the tree is NumPy's, so that JAX does nothing in it.
"""

import os
import random
import signal
import sys
import time

import numpy as np

from polyak.storage import checkpoint, segments
from polyak.storage.checkpoint import read_manifest, restore, save, steps
from polyak.storage.run_directory import machine_shape

# Every step overwrites one block of the ring, and each block is one segment.
BLOCKS = 64
COLUMNS = 2

MAX_KILLS = 400
"""However few of them tear a save, which depends on the machine's disk."""


def tree(step, rows):
    return {"a": np.full((20, 100), step, np.float32), "b": [np.arange(step, step + 3000), step], "ring": ring(step, rows)}


def ring(step, rows):
    """A ring of rows: each holds the number of the step that wrote it last, or 0."""
    written = step - (step - np.arange(BLOCKS)) % BLOCKS
    return np.repeat(np.maximum(written, 0).astype(np.float32), rows // BLOCKS)[:, None] * np.ones(COLUMNS, np.float32)


def save_step(directory, step, rows, **options):
    segmented = "['ring']" if rows else None
    save(directory, tree(step, rows), step=step, meta={"step": step}, keep=2, segmented=segmented, **options)


def save_until_killed(directory, step, rows, acknowledge):
    while True:
        step += 1
        # Every third one takes the place of one that is there.
        if step % 3 == 0:
            save_step(directory, step, rows)
        save_step(directory, step, rows, overwrite=True)
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


def is_torn(directory):
    """Whether a save was killed on its way."""
    listed = {
        name for step in steps(directory) for leaf in read_manifest(directory, step=step).leaves for name in leaf.segments
    }
    path = os.path.join(directory, segments.SEGMENTS)
    unlisted = set(os.listdir(path)) - listed if os.path.isdir(path) else ()
    return bool(unlisted) or any(name.startswith((".tmp-", ".replaced-")) for name in os.listdir(directory))


def main(directory, min_kills, min_torn, rows=0):
    machine_shape()
    segments.SEGMENT_BYTES = checkpoint.SEGMENT_BYTES = min(segments.SEGMENT_BYTES, max(rows * COLUMNS * 4 // BLOCKS, 64))
    random.seed(0)
    step = torn = kills = 0
    while kills < min_kills or (torn < min_torn and kills < MAX_KILLS):
        kills += 1
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            save_until_killed(directory, step, rows, writer)
        os.close(writer)
        acknowledged = kill_after_some_saves(child, reader)
        os.close(reader)
        torn += is_torn(directory)
        restored = restore(directory, tree(0, rows))
        step = restored.step
        assert step >= acknowledged, (step, acknowledged)
        assert restored.meta == {"step": step}
        assert np.array_equal(restored.tree["a"], tree(step, rows)["a"])
        assert np.array_equal(restored.tree["b"][0], tree(step, rows)["b"][0])
        assert restored.tree["b"][1] == step
        assert np.array_equal(restored.tree["ring"], ring(step, rows))
        assert len(steps(directory)) >= min(2, step), (steps(directory), step)
    save_step(directory, step + 1, rows)
    assert not is_torn(directory)
    left = [name for name in os.listdir(directory) if name.startswith(".") and name != ".lock"]
    assert not left, left
    print(kills, step, torn)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
