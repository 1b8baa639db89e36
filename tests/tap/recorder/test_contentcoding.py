"""Content codings taken off copies: every read's plain bytes at its time, and no bomb goes off."""

import gzip
import zlib
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec

import pytest
import zstandard

from tap.recorder import recording
from tap.recorder.recording import UndecodableError, decode_reads

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


def flushed_brotli() -> list[bytes]:
    if find_spec("brotli") is None:
        pytest.skip("brotli not installed")
    packer = import_module("brotli").Compressor()
    reads = [packer.process(event) + packer.flush() for event in EVENTS]
    return [*reads, packer.finish()]


@pytest.mark.parametrize(
    ("coding", "packed"),
    [("gzip", flushed_gzip), ("zstd", flushed_zstd), ("ZSTD", zstd_frames), ("br", flushed_brotli)],
)
def test_each_event_comes_at_the_time_of_the_read_that_completed_it(
    coding: str, packed: Callable[[], list[bytes]]
) -> None:
    reads = list(enumerate(packed()))
    assert [(at, data) for at, data in decode_reads(reads, coding) if data] == list(enumerate(EVENTS))
    byte_by_byte = [(at, data[cut : cut + 1]) for at, data in reads for cut in range(len(data))]
    decoded = decode_reads(byte_by_byte, coding)
    assert b"".join(data for _, data in decoded) == b"".join(EVENTS)
    assert all(data for _, data in decoded), "a read that completed nothing is none"


def test_no_coding_is_none() -> None:
    reads = [(1, b"a"), (2, b"b")]
    for coding in (None, "", "identity"):
        assert decode_reads(reads, coding) == reads


def test_codings_are_taken_off_in_the_order_opposite_to_how_they_were_put_on() -> None:
    packed = zstandard.compress(gzip.compress(b"plain"))
    assert decode_reads([(1, packed)], "gzip, zstd") == [(1, b"plain")]


@pytest.mark.parametrize("coding", ["compress", "gzip;q=1", "gzip", "zstd", "deflate", "br"])
def test_what_cannot_be_undone_is_said(coding: str) -> None:
    with pytest.raises(UndecodableError):
        decode_reads([(1, b"\x00\x01 no such coding \xff" * 9)], coding)


def test_brotli_where_it_is_not_installed_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UndecodableError):
        decode_reads([(1, b"x")], "br")


@pytest.mark.parametrize("coding", ["gzip", "zstd", "br"])
def test_a_bomb_is_noticed_before_it_is_in_memory(coding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "MAX_DECODED_BYTES", 1 << 20)
    zeros = bytes(64 << 20)
    if coding == "br" and find_spec("brotli") is None:
        pytest.skip("brotli not installed")
    if coding == "br":
        packed = import_module("brotli").compress(zeros)
    else:
        packed = gzip.compress(zeros) if coding == "gzip" else zstandard.compress(zeros)
    with pytest.raises(UndecodableError, match="too large"):
        decode_reads([(1, packed)], coding)
