"""TensorBoard's event file, as bytes: scalars only, without protobuf, threads or queues.

`tensorboardX.SummaryWriter` writes from a thread that a full disk kills, after which the next scalar waits for ever; and it
imports torch where that is installed. Records are appended here by the caller, who sees every error.
"""

import struct
from collections.abc import Mapping

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_EVENT = {"wall_time": 1, "step": 2, "file_version": 3, "summary": 5, "session_log": 7}
_SUMMARY_VALUE, _TAG, _SIMPLE_VALUE, _STATUS, _START = 1, 1, 2, 1, 1
_CASTAGNOLI = 0x82F63B78


def file_start(wall_time: float) -> bytes:
    """The record that an event file begins with."""
    version = _delimited(_EVENT["file_version"], b"brain.Event:2")
    return _record(_time_and_step(wall_time, 0) + version)


def restart(wall_time: float, step: int) -> bytes:
    """The record that makes TensorBoard forget what earlier files hold from this step on."""
    return _record(_time_and_step(wall_time, step) + _delimited(_EVENT["session_log"], _varint_field(_STATUS, _START)))


def scalars(wall_time: float, step: int, values: Mapping[str, float]) -> bytes:
    """The record of one value for each tag at one step."""
    summary = b"".join(_delimited(_SUMMARY_VALUE, _scalar(tag, value)) for tag, value in values.items())
    return _record(_time_and_step(wall_time, step) + _delimited(_EVENT["summary"], summary))


def _scalar(tag: str, value: float) -> bytes:
    # As a 32-bit float, which a large Python float would overflow.
    narrow = struct.pack("<f", value) if abs(value) < 3.4e38 or value != value else struct.pack("<f", value * float("inf"))
    return _delimited(_TAG, tag.encode()) + _head(_SIMPLE_VALUE, _FIXED32) + narrow


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
