"""TensorBoard's event file, as bytes: scalars and histograms, without protobuf, threads or queues.

`tensorboardX.SummaryWriter` writes from a thread that a full disk kills, after which the next scalar waits for ever; and it
imports torch where that is installed. Records are appended here by the caller, who sees every error.
"""

import struct
from collections.abc import Mapping

import numpy as np

from polyak.core.types import Histogram

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_EVENT = {"wall_time": 1, "step": 2, "file_version": 3, "summary": 5, "session_log": 7}
_SUMMARY_VALUE, _TAG, _SIMPLE_VALUE, _HISTOGRAM, _STATUS, _START = 1, 1, 2, 5, 1, 1
# Fields 1 to 5 of a histogram are min, max, num, sum, sum_squares.
_BUCKET_LIMIT, _BUCKET = 6, 7
_CASTAGNOLI = 0x82F63B78


def file_start(wall_time: float) -> bytes:
    """The record that an event file begins with."""
    version = _delimited(_EVENT["file_version"], b"brain.Event:2")
    return _record(_time_and_step(wall_time, 0) + version)


def restart(wall_time: float, step: int) -> bytes:
    """The record that makes TensorBoard forget what earlier files hold from this step on."""
    return _record(_time_and_step(wall_time, step) + _delimited(_EVENT["session_log"], _varint_field(_STATUS, _START)))


def summary(wall_time: float, step: int, scalars: Mapping[str, float], histograms: Mapping[str, Histogram]) -> bytes:
    """The record of one value for each tag at one step."""
    values = [_scalar(tag, value) for tag, value in scalars.items()]
    values += [_delimited(_TAG, tag.encode()) + _delimited(_HISTOGRAM, _histogram(h)) for tag, h in histograms.items()]
    whole = b"".join(_delimited(_SUMMARY_VALUE, value) for value in values)
    return _record(_time_and_step(wall_time, step) + _delimited(_EVENT["summary"], whole))


def _scalar(tag: str, value: float) -> bytes:
    # As a 32-bit float, which a large Python float would overflow.
    narrow = struct.pack("<f", value) if abs(value) < 3.4e38 or value != value else struct.pack("<f", value * float("inf"))
    return _delimited(_TAG, tag.encode()) + _head(_SIMPLE_VALUE, _FIXED32) + narrow


def _histogram(histogram: Histogram) -> bytes:
    counts = np.asarray(histogram.counts, np.float64)
    low, high = float(histogram.low), float(histogram.high)
    limits = np.linspace(low, high, len(counts) + 1)[1:]
    about = (low, high, float(counts.sum()), float(histogram.total), float(histogram.squares))
    head = b"".join(_head(number, _FIXED64) + struct.pack("<d", value) for number, value in enumerate(about, 1))
    return head + _doubles(_BUCKET_LIMIT, limits) + _doubles(_BUCKET, counts)


def _doubles(field: int, values: np.ndarray) -> bytes:
    return _delimited(field, values.astype("<f8").tobytes())


def _time_and_step(wall_time: float, step: int) -> bytes:
    return _head(_EVENT["wall_time"], _FIXED64) + struct.pack("<d", wall_time) + _varint_field(_EVENT["step"], step)


def _head(field: int, kind: int) -> bytes:
    return _varint(field << 3 | kind)


def _varint_field(field: int, value: int) -> bytes:
    return _head(field, _VARINT) + _varint(value)


def _delimited(field: int, data: bytes) -> bytes:
    return _head(field, _BYTES) + _varint(len(data)) + data


def _varint(value: int) -> bytes:
    result = bytearray()
    while value > 0x7F:
        result.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*result, value])


def _record(event: bytes) -> bytes:
    """TFRecord's frame: length and data, each with its masked CRC32C."""
    length = struct.pack("<Q", len(event))
    return length + struct.pack("<I", _masked_crc(length)) + event + struct.pack("<I", _masked_crc(event))


def _table() -> list[int]:
    entries = []
    for byte in range(256):
        entry = byte
        for _ in range(8):
            entry = entry >> 1 ^ (_CASTAGNOLI if entry & 1 else 0)
        entries.append(entry)
    return entries


_TABLE = _table()


def _masked_crc(data: bytes) -> int:
    crc = 0xFFFFFFFF
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= 0xFFFFFFFF
    return ((crc >> 15 | crc << 17) + 0xA282EAD8) & 0xFFFFFFFF
