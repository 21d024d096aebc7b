"""What is done, and what runs, above a committed offset, as the text of the commit's metadata.

Completion is out of order, so a watermark alone would repeat everything above it after a crash. The metadata holds the offsets
above the watermark as alternating run lengths: not done, done, not done, done, … The first run begins at the watermark, which is
never done; what follows the last run is not done. Offsets that carry no record (Kafka has gaps) belong to
whichever run is around them.

    base64url( version, CRC-32 of (watermark, body), body )      body: Elias gamma codes, zero bits to the byte

A gamma code costs 2·⌊log₂ n⌋+1 bits for a run of n. Runs over n records without gaps cost at most 1.5 bits a record, so a window
of 4,000 records takes 750 bytes at worst, far below the 4,096 that a broker allows (offset.metadata.max.bytes). With gaps
it can be more; then the highest runs are left out, and those records are run again after a crash rather than lost.

What runs, and would take its process along if it died, stands before the runs of the body in version 2, as the number of them plus one and then their
distances, the first from one below the watermark. There are no more of them than half of the room has place for; version 1 has none.

The checksum covers the watermark: metadata beside an offset that somebody moved by hand does not apply.
"""

from __future__ import annotations

import base64
import binascii
import zlib
from collections.abc import Collection, Iterable, Sequence
from itertools import accumulate

VERSION = 1
VERSION_RUNNING = 2
# The broker's default offset.metadata.max.bytes.
MAX_METADATA_BYTES = 4_096
_CHECKSUM_BYTES = 4
_HEAD_BYTES = 1 + _CHECKSUM_BYTES
# base64 makes 4 characters of 3 bytes.
_MAX_BODY_BITS = (MAX_METADATA_BYTES // 4 * 3 - _HEAD_BYTES) * 8
_WATERMARK_BYTES = 8
_MAX_RUNNING_BITS = _MAX_BODY_BITS // 2

# Half-open offset ranges, ascending, with room between any two.
Ranges = tuple[tuple[int, int], ...]


class UnreadableMetadata(ValueError):
    """A commit's metadata is not what this module writes."""


def encode_holes(watermark: int, done: Iterable[tuple[int, int]], running: Collection[int] = ()) -> str:
    """The metadata for a commit at `watermark`; at most MAX_METADATA_BYTES characters.

    Args:
        watermark: the offset that is committed.
        done: half-open ranges above it, ascending, with room between any two and before the first.
        running: offsets at or above it that run; what there is no room for is left out, the highest first.
    """
    codes = _running_codes(watermark, running) if running else []
    bits = sum(map(len, codes))
    at = watermark
    for start, stop in done:
        if not at < start < stop:
            raise ValueError(f"run {start}-{stop} does not follow {at}")
        pair = _gamma(start - at) + _gamma(stop - start)
        bits += len(pair)
        if bits > _MAX_BODY_BITS:
            break
        codes.append(pair)
        at = stop
    if not codes:
        return ""
    text = "".join(codes)
    text += "0" * (-len(text) % 8)
    body = int(text, 2).to_bytes(len(text) // 8)
    head = bytes((VERSION_RUNNING if running else VERSION,)) + _checksum(watermark, body)
    return base64.urlsafe_b64encode(head + body).decode("ascii")


def decode_holes(watermark: int, metadata: str) -> Ranges:
    """The ranges that are done above a committed offset.

    Raises:
        UnreadableMetadata: not written by `encode_holes` for this offset.
    """
    return _above(watermark, metadata)[0]


def decode_running(watermark: int, metadata: str) -> tuple[int, ...]:
    """The offsets that ran when it was committed, ascending.

    Raises:
        UnreadableMetadata: not written by `encode_holes` for this offset.
    """
    return _above(watermark, metadata)[1]


def _above(watermark: int, metadata: str) -> tuple[Ranges, tuple[int, ...]]:
    if not metadata:
        return (), ()
    try:
        data = base64.b64decode(metadata.encode("ascii"), altchars=b"-_", validate=True)
    except (UnicodeEncodeError, binascii.Error) as error:
        raise UnreadableMetadata(f"not base64: {error}") from error
    version = data[0] if data else None
    if version not in (VERSION, VERSION_RUNNING):
        raise UnreadableMetadata(f"version {version}, neither {VERSION} nor {VERSION_RUNNING}")
    body = data[_HEAD_BYTES:]
    if data[1:_HEAD_BYTES] != _checksum(watermark, body):
        raise UnreadableMetadata(f"does not belong to offset {watermark}")
    lengths = _lengths(body)
    count = lengths[0] if version == VERSION_RUNNING and lengths else 1
    if count > len(lengths) or (len(lengths) - (count if version == VERSION_RUNNING else 0)) % 2:
        raise UnreadableMetadata("ends in the middle of a pair")
    if version == VERSION:
        return _ranges(watermark, lengths), ()
    return _ranges(watermark, lengths[count:]), tuple(accumulate(lengths[1:count], initial=watermark - 1))[1:]


def _running_codes(watermark: int, running: Collection[int]) -> list[str]:
    """The number of offsets plus one, and their distances."""
    codes: list[str] = []
    bits = 0
    at = watermark - 1
    for offset in sorted(running):
        code = _gamma(offset - at)
        bits += len(code)
        if bits > _MAX_RUNNING_BITS:
            break
        codes.append(code)
        at = offset
    return [_gamma(len(codes) + 1), *codes]


def _gamma(number: int) -> str:
    # n in binary behind as many zeros as it has bits after its first.
    return f"{number:0{2 * number.bit_length() - 1}b}"


def _lengths(body: bytes) -> Sequence[int]:
    text = f"{int.from_bytes(body):0{8 * len(body)}b}"
    lengths: list[int] = []
    at = 0
    while (one := text.find("1", at)) >= 0:
        end = one + (one - at) + 1
        if end > len(text):
            raise UnreadableMetadata("cut short")
        lengths.append(int(text[one:end], 2))
        at = end
    return lengths


def _ranges(watermark: int, lengths: Sequence[int]) -> Ranges:
    found: list[tuple[int, int]] = []
    at = watermark
    for waiting, done in zip(lengths[::2], lengths[1::2], strict=True):
        found.append((at + waiting, at + waiting + done))
        at += waiting + done
    return tuple(found)


def _checksum(watermark: int, body: bytes) -> bytes:
    return zlib.crc32(watermark.to_bytes(_WATERMARK_BYTES) + body).to_bytes(_CHECKSUM_BYTES)
