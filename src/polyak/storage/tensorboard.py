"""Creates the records of a TensorBoard event file, scalars and histograms, as bytes that the caller appends.

TensorBoard's own `EventFileWriter` writes from a thread, so its caller never sees that the disk is full.
"""

import io
from collections.abc import Mapping

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import HistogramProto, Summary
from tensorboard.summary.writer.record_writer import RecordWriter

from polyak.core.types import Histogram


def start_record(wall_time: float) -> bytes:
    """Return the record that starts an event file."""
    return _record(Event(wall_time=wall_time, file_version="brain.Event:2"))


def restart_record(wall_time: float, step: int) -> bytes:
    """Return the record that makes TensorBoard discard values of earlier files from `step` on."""
    return _record(Event(wall_time=wall_time, step=step, session_log=SessionLog(status=SessionLog.START)))


def values_record(wall_time: float, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]) -> bytes:
    """Return the record of one value for each tag at one step."""
    with np.errstate(over="ignore"):  # A scalar is stored in 32 bits.
        values = [Summary.Value(tag=tag, simple_value=float(np.float32(value))) for tag, value in scalars.items()]
    values += [Summary.Value(tag=tag, histo=_histogram(x)) for tag, x in histograms.items()]
    return _record(Event(wall_time=wall_time, step=step, summary=Summary(value=values)))


def _histogram(histogram: Histogram) -> HistogramProto:
    counts = np.asarray(histogram.counts, np.float64)
    low, high = float(histogram.low), float(histogram.high)
    return HistogramProto(
        min=low,
        max=high,
        num=float(counts.sum()),
        sum=float(histogram.total),
        sum_squares=float(histogram.squares),
        bucket_limit=np.linspace(low, high, len(counts) + 1)[1:].tolist(),
        bucket=counts.tolist(),
    )


def _record(event: Event) -> bytes:
    buffer = io.BytesIO()
    RecordWriter(buffer).write(event.SerializeToString())
    return buffer.getvalue()
