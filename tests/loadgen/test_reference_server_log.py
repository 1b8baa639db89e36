"""What a run's trace says, held against a server that knows: ids, counts, order, times. Nothing here asks how fast."""

from pathlib import Path

import numpy as np
import pytest

from loadgen.__main__ import main
from loadgen.core.draws import TokenIds
from scripts.reference_server import NS_PER_MS, Pace, Served, reference_server, token_ids
from tracefile.files.reading import load_trace
from tracefile.hashing.blockhash import BlockHasher, keyed_id
from tracefile.hashing.hashkey import load_key
from tracefile.records.schema import Meta, Record, RequestId

ROUNDED_NS = 1_000
"""A record's times are rounded to the microsecond, each of the two that make a difference."""


def ran(folder: Path, pace: Pace, flags: list[str]) -> tuple[Meta, list[Record], dict[RequestId, Served]]:
    """A run against a server of its own: its trace, and the truth by the ids that the trace has."""
    trace = folder / "t.jsonl"
    with reference_server(pace, folder / "server.log") as server:
        assert main(["--url", server.url, "-o", str(trace), *flags]) == 0
        truth = server.log()
    meta, records = load_trace(trace)
    key = load_key()
    served = {RequestId(keyed_id(key, "request", entry.request_id)): entry for entry in truth.served}
    assert len(served) == len(truth.served)
    return meta, records, served


def test_log_has_each_request_once_with_all_tokens(tmp_path: Path) -> None:
    server = Pace(ttft_low_ms=1.0, ttft_high_ms=6.0, gap_ms=2.0, tokens_per_write=3, prompt_tokens=40)
    load = ["--pattern", "constant", "--rate", "100", "--number", "60", "--prompt-tokens", "40"]
    _, records, served = ran(tmp_path, server, [*load, "--output-tokens", "1:20", "--seed", "3"])
    assert sorted(record.request_id for record in records) == sorted(served)
    assert len({record.output_tokens for record in records}) > 10
    for record in records:
        truth = served[record.request_id]
        assert (record.status, record.finish_reason, record.output_tokens) == ("ok", "length", truth.tokens)
        assert record.prompt_tokens == 40
        # The first write has one token, the others three. Reads may join writes, never split or lose them.
        first_read = truth.tokens - sum(record.itl_tokens)
        assert first_read % 3 == 1 or first_read == truth.tokens
        assert all(tokens % 3 == 0 for tokens in record.itl_tokens[:-1])
        assert len(record.itl_ms) == len(record.itl_tokens) < truth.writes
        assert all(gap_ms >= 0 for gap_ms in record.itl_ms)


def test_outputs_are_hashed_as_sent(tmp_path: Path) -> None:
    """Token for token, in order: a read lost, repeated or swapped would be another chain."""
    load = ["--parallel", "8", "--number", "30", "--prompt-tokens", "64", "--output-tokens", "33"]
    meta, records, _ = ran(tmp_path, Pace(tokens_per_write=4, prompt_tokens=64), load)
    hasher = BlockHasher(load_key(), block_size=meta.block_size or 0, model="truth")
    answer: TokenIds = np.array(list(token_ids(33)), dtype=np.uint32)
    assert len({tuple(record.block_hashes or ()) for record in records}) == 30
    for record in records:
        assert record.block_hashes is not None
        # Four blocks of prompt; the answer's last token has no place in a block yet, so 32 are two.
        assert len(record.block_hashes) == 4
        assert record.output_block_hashes == hasher.extend(record.block_hashes[-1], answer[:-1])


def test_client_ttft_is_never_below_server_ttft(tmp_path: Path) -> None:
    load = ["--pattern", "constant", "--rate", "80", "--number", "80", "--prompt-tokens", "32", "--output-tokens", "2"]
    _, records, served = ran(tmp_path, Pace(ttft_low_ms=1.0, ttft_high_ms=5.0), load)
    for record in records:
        truth = served[record.request_id]
        assert record.ttft_ms is not None
        assert record.e2e_ms is not None
        assert truth.ttft_ns is not None
        assert truth.last_write_ns is not None
        # The clock starts before the request leaves and stops after the token is read, on one monotonic clock.
        assert record.ttft_ms * NS_PER_MS >= truth.ttft_ns - ROUNDED_NS
        assert record.e2e_ms * NS_PER_MS >= truth.last_write_ns - truth.received_ns - ROUNDED_NS
        assert record.ttft_ms <= record.e2e_ms
    scheduled_ms = sorted(record.scheduled_ms or 0.0 for record in records)
    assert scheduled_ms == pytest.approx([12.5 * number for number in range(80)])
