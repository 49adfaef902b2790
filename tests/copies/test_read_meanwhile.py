"""Copies that others read while they are trained: a snapshot is of one version, whole, in threads and between processes."""

import contextlib
import multiprocessing
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from polyak.copies.follow import Follow
from polyak.storage import checkpoint
from tests.copies.line import Line, made

WIDE = Line(width=4096)


def published():
    return made(Follow(), shared=True, network=WIDE)


def stepped(copies):
    """One version on: every weight of all three copies is 1 + version."""
    gradients = {"w": jnp.full(4096, -10.0), "b": jnp.full((), -10.0)}
    return copies.apply_and_sync(gradients).update_target()


def checked_version(copies):
    """The version, where all weights and counters agree with it."""
    version = int(copies.shared.version)
    for held in (copies.shared.variables, copies.online, copies.target):
        np.testing.assert_allclose(held.params["w"], 1.0 + version, rtol=1e-4)
    assert int(copies.version) == version
    return version


@pytest.mark.slow
def test_reads_during_concurrent_writes_are_consistent():
    current, stop = [published()], threading.Event()
    step = jax.jit(stepped)
    step(current[0])

    def write():
        while not stop.is_set():
            current[0] = step(current[0])

    writers = [threading.Thread(target=write) for _ in range(2)]
    for writer in writers:
        writer.start()
    versions = set()
    try:
        for number in range(10_000):
            copies = current[0]
            # Every read takes version, last and first weight of the three; one in a hundred all weights.
            version = int(copies.shared.version)
            if number % 100 == 0:
                versions.add(checked_version(copies))
            ends = [x.params["w"] for x in (copies.shared.variables, copies.online, copies.target)]
            assert all(abs(float(np.asarray(w)[i]) - 1.0 - version) < 1e-3 * (1 + version) for w in ends for i in (0, -1))
    finally:
        stop.set()
        for writer in writers:
            writer.join()
    assert len(versions) > 3


def write_versions(directory, enough, seconds):
    """Another process: train, and write every version aside, then rename, until the reader has enough."""
    copies, step = published(), jax.jit(stepped)
    checkpoint.save(directory, copies, step=0, meta={})
    until = time.monotonic() + seconds
    while not enough.is_set() and time.monotonic() < until:
        copies = step(copies)
        checkpoint.save(directory, copies, step=int(copies.shared.version), meta={}, keep=1000)


@pytest.mark.slow
def test_reads_during_writes_by_another_process_are_of_one_version(tmp_path):
    spawn = multiprocessing.get_context("spawn")
    enough = spawn.Event()
    writer = spawn.Process(target=write_versions, args=(tmp_path, enough, 60.0))
    writer.start()
    try:
        like, versions, reads = published(), set(), 0
        while writer.is_alive():
            # Before the first version there is nothing to read, which is an error.
            with contextlib.suppress(checkpoint.CheckpointError) if not versions else contextlib.nullcontext():
                restored = checkpoint.restore(tmp_path, like)
                assert checked_version(restored.tree) == restored.step
                versions.add(restored.step)
                reads += 1
                if len(versions) > 3 and reads > 30:
                    enough.set()
    finally:
        enough.set()
        writer.join(60)
    assert writer.exitcode == 0
    assert len(versions) > 3 and reads > 30


def test_snapshot_survives_donation_of_its_source():
    copies = published()
    snapshot = copies.newest()
    jax.jit(stepped, donate_argnums=0)(copies)
    np.testing.assert_array_equal(snapshot.params["w"], 1.0)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(copies.shared.variables.params["w"])
