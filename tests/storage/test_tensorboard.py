import math

import numpy as np
import pytest

from polyak.core.types import Histogram
from polyak.storage import tensorboard as events


def read(directory):
    """What TensorBoard shows of a directory: `{tag: [(step, value), ...]}`."""
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    reader = accumulator.EventAccumulator(str(directory), size_guidance={"scalars": 0})
    reader.Reload()
    return {tag: [(event.step, event.value) for event in reader.Scalars(tag)] for tag in reader.Tags()["scalars"]}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_the_scalars(tmp_path):
    rows = [
        (0, {"rollout/ep_rew_mean": 1.5, "ünïcode tag": -0.0}),
        (127, {"rollout/ep_rew_mean": math.nan, "time/fps": 12345}),
        (128, {"rollout/ep_rew_mean": math.inf}),
        (2**40, {"rollout/ep_rew_mean": 1e300, "long": 1.0, "l" * 300: 2.0}),
    ]
    data = events.start_record(1e9) + b"".join(events.values_record(1e9 + step, step, row, {}) for step, row in rows)
    (tmp_path / "events.out.tfevents.0").write_bytes(data)
    shown = read(tmp_path)
    assert shown["time/fps"] == [(127, 12345.0)]
    assert shown["ünïcode tag"] == [(0, 0.0)]
    assert shown["l" * 300] == [(2**40, 2.0)]
    steps, values = zip(*shown["rollout/ep_rew_mean"], strict=True)
    assert steps == (0, 127, 128, 2**40)
    assert values[0] == 1.5
    assert math.isnan(values[1])
    assert values[2:] == (math.inf, math.inf)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_restart_record_discards_later_values(tmp_path):
    first = events.start_record(1.0) + b"".join(events.values_record(1.0, step, {"a": step}, {}) for step in (10, 20, 30, 40))
    second = events.start_record(2.0) + events.restart_record(2.0, 21) + events.values_record(2.0, 35, {"a": 350.0}, {})
    (tmp_path / "events.out.tfevents.0").write_bytes(first)
    (tmp_path / "events.out.tfevents.1").write_bytes(second)
    assert read(tmp_path)["a"] == [(10, 10.0), (20, 20.0), (35, 350.0)]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_bytes_are_those_of_tensorboard_s_own_protobuf():
    event_pb2 = pytest.importorskip("tensorboard.compat.proto.event_pb2")
    event = event_pb2.Event.FromString(events.values_record(1.25, 300, {"a": 0.5, "b": -2.0}, {})[12:-4])
    assert (event.wall_time, event.step) == (1.25, 300)
    assert [(value.tag, value.simple_value) for value in event.summary.value] == [("a", 0.5), ("b", -2.0)]
    start = event_pb2.Event.FromString(events.start_record(1.25)[12:-4])
    assert start.file_version == "brain.Event:2"
    restart = event_pb2.Event.FromString(events.restart_record(1.25, 7)[12:-4])
    assert (restart.step, restart.session_log.status) == (7, event_pb2.SessionLog.START)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_tensorboard_reads_the_histograms(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    counts = np.array([3.0, 0.0, 2.0], np.float32)
    spread = Histogram(np.float32(-1.0), np.float32(2.0), counts, np.float32(1.5), np.float32(9.0))
    data = events.start_record(1.0) + events.values_record(1.0, 7, {"a": 1.0}, {"histogram/x": spread})
    (tmp_path / "events.out.tfevents.0").write_bytes(data)
    reader = accumulator.EventAccumulator(str(tmp_path)).Reload()
    assert reader.Tags()["scalars"] == ["a"]
    [event] = reader.Histograms("histogram/x")
    value = event.histogram_value
    assert (event.step, value.min, value.max, value.num, value.sum, value.sum_squares) == (7, -1.0, 2.0, 5.0, 1.5, 9.0)
    assert (list(value.bucket_limit), list(value.bucket)) == ([0.0, 1.0, 2.0], [3.0, 0.0, 2.0])
