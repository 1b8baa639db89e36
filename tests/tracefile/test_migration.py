"""A trace written under schema kvtape/1 reads for ever, every field where it was.

The file beside this test is never edited: a schema that cannot read it needs a migration, not another fixture.
"""

from pathlib import Path

from tracefile.__main__ import main
from tracefile.files.digest import trace_digest
from tracefile.files.reading import load_trace
from tracefile.files.writing import TraceWriter
from tracefile.records.schema import BlockHash, Engine, HashInfo, Meta, Record, RequestId, SessionId, Workload

FIXTURE = Path(__file__).parent / "data" / "kvtape-1.jsonl"


def test_the_header_reads() -> None:
    assert load_trace(FIXTURE)[0] == Meta(
        schema="kvtape/1",
        source="tap",
        model="m",
        tokenizer="ids",
        block_size=16,
        hash=HashInfo(algorithm="xxh3_64", key_id="3cf7051b19e69b5f"),
        epoch_unix_ns=1_700_000_000_000_000_000,
        engine=Engine(
            name="vllm",
            version="0.32.0",
            block_size=32,
            num_gpu_blocks=1000,
            max_num_seqs=8,
            max_num_batched_tokens=2048,
            max_model_len=16384,
            enable_prefix_caching=True,
            async_scheduling=False,
            extra={"a_later_setting": 1},
        ),
        workload=Workload(
            pattern="multiturn", seed=7, digest="d", nonce="n", speedup=2.0, cold_prompts=False, source_digest="s"
        ),
        extra={"a_later_header_field": ["kept"]},
    )


def test_the_records_read() -> None:
    first, second, third = load_trace(FIXTURE)[1]
    assert first == Record(
        request_id=RequestId("r1"),
        session_id=SessionId("s1"),
        session_source="explicit",
        turn=1,
        arrival_ms=0.5,
        scheduled_ms=0.0,
        first_byte_ms=49.0,
        ttft_ms=50.0,
        itl_ms=[5.0, 6.5],
        itl_tokens=[1, 2],
        e2e_ms=62.0,
        http_status=200,
        finish_reason="stop",
        endpoint="/v1/chat/completions",
        model="m",
        stream=True,
        max_tokens=64,
        priority=1,
        lora="adapter",
        tools=2,
        n=1,
        prompt_tokens=40,
        output_tokens=12,
        cached_tokens=0,
        tokens_source="usage",
        concurrency=1,
        block_hashes=[BlockHash(11420500001883158997), BlockHash(5425219226028439527)],
        output_block_hashes=[BlockHash(2**64 - 1)],
        hashable_blocks=2,
        hash_source="engine",
    )
    assert (second.parent_id, second.status, second.error, second.think_ms) == (
        "r1",
        "client_abort",
        "client_gone",
        37.5,
    )
    assert (second.block_hashes, second.extra) == ([], {"a_later_field": {"kept": True}})
    assert third == Record(request_id=RequestId("r3"))


def test_check_passes_and_rewriting_preserves_it(tmp_path: Path) -> None:
    assert main(["check", str(FIXTURE)]) == 0
    meta, records = load_trace(FIXTURE)
    with TraceWriter(tmp_path / "again.jsonl", meta) as writer:
        for record in records:
            writer.write(record)
    assert load_trace(tmp_path / "again.jsonl") == (meta, records)


def test_its_digest_is_fixed() -> None:
    assert trace_digest(FIXTURE) == "36abc15bb6fcb9d87131a77a6568a8c870541933fb11d39927a7ce494c261aa0"
