"""Content codings taken off copies: every read's plain bytes at its time, and no bomb goes off."""

import gzip
import zlib
from collections.abc import Callable

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from tap.recorder.contentcoding import UndecodableError, decode_reads

LIMIT = 1 << 20
EVENTS = [b"data: %d\n\n" % number for number in range(50)]


def flushed_gzip() -> list[bytes]:
    packer = zlib.compressobj(wbits=31)
    reads = [packer.compress(event) + packer.flush(zlib.Z_SYNC_FLUSH) for event in EVENTS]
    return [*reads, packer.flush()]


def flushed_zstd() -> list[bytes]:
    packer = zstandard.ZstdCompressor().compressobj()
    reads = [packer.compress(event) + packer.flush(zstandard.COMPRESSOBJ_FLUSH_BLOCK) for event in EVENTS]
    return [*reads, packer.flush()]


def zstd_frames() -> list[bytes]:
    return [zstandard.compress(event) for event in EVENTS]


def gzip_members() -> list[bytes]:
    return [gzip.compress(event) for event in EVENTS]


@pytest.mark.parametrize(
    ("coding", "packed"),
    [
        *(("gzip", flushed_gzip), ("gzip", gzip_members)),
        *(("zstd", flushed_zstd), ("ZSTD", zstd_frames)),
    ],
)
def test_decoded_events_have_the_time_of_the_completing_read(coding: str, packed: Callable[[], list[bytes]]) -> None:
    reads = list(enumerate(packed()))
    assert [(at, data) for at, data in decode_reads(reads, coding, LIMIT) if data] == list(enumerate(EVENTS))
    byte_by_byte = [(at, data[cut : cut + 1]) for at, data in reads for cut in range(len(data))]
    decoded = decode_reads(byte_by_byte, coding, LIMIT)
    assert b"".join(data for _, data in decoded) == b"".join(EVENTS)
    assert all(data for _, data in decoded), "a read that completed nothing is none"


@pytest.mark.parametrize("coding", ["compress", "gzip;q=1", "gzip", "zstd", "deflate", "br"])
def test_undecodable_bodies_raise(coding: str) -> None:
    with pytest.raises(UndecodableError):
        decode_reads([(1, b"\x00\x01 no such coding \xff" * 9)], coding, LIMIT)


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_decompression_bomb_is_refused(coding: str) -> None:
    zeros = bytes(64 << 20)
    packed = gzip.compress(zeros) if coding == "gzip" else zstandard.compress(zeros)
    with pytest.raises(UndecodableError, match="too large"):
        decode_reads([(1, packed)], coding, LIMIT)


@given(texts=st.lists(st.binary(max_size=40), min_size=1, max_size=20), cut=st.integers(1, 50))
def test_multiple_members_and_frames(texts: list[bytes], cut: int) -> None:
    for coding, pack in (("gzip", gzip.compress), ("zstd", zstandard.compress), ("deflate", zlib.compress)):
        packed = b"".join(map(pack, texts))
        reads = [(at, packed[at : at + cut]) for at in range(0, len(packed), cut)]
        assert b"".join(data for _, data in decode_reads(reads, coding, LIMIT)) == b"".join(texts)


@pytest.mark.parametrize("behind", [b"\0" * 512, b"\n", b"garbage", gzip.compress(b"x", mtime=0)[:5]])
def test_trailing_bytes_are_ignored(behind: bytes) -> None:
    packed = gzip.compress(b"one ") + gzip.compress(b"two") + behind
    assert decode_reads([(1, packed)], "gzip", LIMIT) == [(1, b"one two")]
    byte_by_byte = [(1, packed[at : at + 1]) for at in range(len(packed))]
    assert b"".join(data for _, data in decode_reads(byte_by_byte, "gzip", LIMIT)) == b"one two"


def test_decoded_size_limit() -> None:
    for coding, pack in (("gzip", gzip.compress), ("zstd", zstandard.compress)):
        assert decode_reads([(1, pack(bytes(LIMIT)))], coding, LIMIT) == [(1, bytes(LIMIT))]
        with pytest.raises(UndecodableError, match="too large"):
            decode_reads([(1, pack(bytes(LIMIT + 1)))], coding, LIMIT)


def test_multiple_codings_empty_members_and_large_windows_are_refused() -> None:
    with pytest.raises(UndecodableError, match="unknown"):
        decode_reads([(1, b"")], "gzip, zstd", LIMIT)
    with pytest.raises(UndecodableError, match="too large"):
        decode_reads([(1, gzip.compress(b"") * 100_001)], "gzip", LIMIT)
    settings = zstandard.ZstdCompressionParameters(window_log=27, write_content_size=False)
    wide = zstandard.ZstdCompressor(compression_params=settings).compressobj()
    with pytest.raises(UndecodableError, match="broken"):
        decode_reads([(1, wide.compress(b"x") + wide.flush())], "zstd", LIMIT)
