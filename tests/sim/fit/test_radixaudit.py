"""The audit of SGLang: counts by its rules at the captured times, and a cause for each that differs."""

from pathlib import Path

import pytest

from sim.__main__ import main
from sim.cache.pool import count_radix_hits, page_chains
from sim.fit.radixaudit import RadixAudit, audit_radix
from sim.sglang.config import RadixConfig
from sim.workload.chain import finest_records
from tracefile import (
    BlockHasher,
    Engine,
    HashInfo,
    HashKey,
    InputError,
    Meta,
    Record,
    RequestId,
    TraceWriter,
    open_trace,
)
from tracefile.hashing.branches import BranchFinder

KEY = HashKey(bytes(range(32)))
META = Meta(
    source="tap",
    block_size=16,
    hash=HashInfo(algorithm="xxh3_64", branches=True),
    engine=Engine(name="sglang", block_size=1, extra={"max_total_num_tokens": 500}),
)
PREFIX = list(range(20))


class Capture:
    """Records of requests with these prompts, as a tap writes them."""

    def __init__(self) -> None:
        self.records: list[Record] = []
        self._finder = BranchFinder(16)

    def add(self, prompt: list[int], cached: int, *, at_ms: float, ttft_ms: float = 10.0, e2e_ms: float = 30.0) -> None:
        hasher, output = BlockHasher(KEY), [900 + len(self.records), 901, 902]
        chain = hasher.hash_blocks([*prompt, *output[:-1]])
        request_id = RequestId(f"r{len(self.records)}")
        branch = self._finder.add(hasher.root, chain, prompt, output[:-1], request_id)
        self.records.append(
            Record(
                request_id=request_id,
                arrival_ms=at_ms,
                ttft_ms=ttft_ms,
                e2e_ms=e2e_ms,
                prompt_tokens=len(prompt),
                output_tokens=len(output),
                cached_tokens=cached,
                block_hashes=chain[: len(prompt) // 16],
                output_block_hashes=chain[len(prompt) // 16 :],
                branch_tokens=None if branch is None else branch.tokens,
                branch_hash=None if branch is None else branch.block,
            )
        )

    def audit(self, config: RadixConfig | None = None) -> RadixAudit:
        return audit_radix(META, self.records, config or RadixConfig())


def causes(audit: RadixAudit) -> dict[str, str]:
    return {each.request_id: each.cause for each in audit.differences}


def test_hits_to_the_token_and_within_an_output() -> None:
    capture = Capture()
    capture.add([*PREFIX, 100, 101], 0, at_ms=0.0)
    capture.add([*PREFIX, 200], 20, at_ms=100.0)
    capture.add([*PREFIX, 100, 101, 900, 901, 7], 24, at_ms=200.0)
    capture.add([*PREFIX, 100, 101], 21, at_ms=300.0)  # the whole prompt is cached, and its last token computed
    found = capture.audit()
    assert (found.requests, found.exact, found.differences) == (4, 4, [])
    assert (found.reported_tokens, found.predicted_tokens) == (65, 65)


def test_requests_of_one_batch_see_nothing_of_each_other() -> None:
    capture = Capture()
    capture.add([*PREFIX, 1], 0, at_ms=0.0, ttft_ms=50.0, e2e_ms=90.0)
    capture.add([*PREFIX, 2], 0, at_ms=1.0, ttft_ms=49.5, e2e_ms=90.0)
    capture.add([*PREFIX, 3], 20, at_ms=2.0, ttft_ms=70.0, e2e_ms=90.0)  # of the next one
    assert capture.audit().differences == []


def test_each_difference_has_its_cause() -> None:
    capture = Capture()
    capture.add([*PREFIX, 1], 5, at_ms=0.0)
    capture.add([*PREFIX, 2], 0, at_ms=1.0, ttft_ms=40.0)
    capture.add([*PREFIX, 3], 12, at_ms=100.0)
    found = capture.audit()
    assert causes(found) == {
        "r0": "cached before the capture, or part of an output whose ids are unknown",
        "r1": "order: agrees if looked up at its arrival",
        "r2": "less than is cached by the rules: evicted, or the cache was reset",
    }
    assert causes(capture.audit(RadixConfig(page_size=4)))["r0"] == "reported is no multiple of 4: another page size"


def test_a_full_pool_evicts_the_least_recent() -> None:
    capture = Capture()
    capture.add([*range(1000, 1040)], 0, at_ms=0.0)
    capture.add([*range(2000, 2040)], 0, at_ms=100.0)
    capture.add([*range(1000, 1040)], 0, at_ms=200.0)
    assert capture.audit(RadixConfig(max_total_num_tokens=60)).differences == []
    assert len(capture.audit(RadixConfig(max_total_num_tokens=200)).differences) == 1


def test_the_command_takes_the_settings_of_the_header(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    capture = Capture()
    capture.add([*PREFIX, 1], 0, at_ms=0.0)
    capture.add([*PREFIX, 2], 20, at_ms=100.0)
    path = tmp_path / "t.jsonl"
    with TraceWriter(path, META) as writer:
        for record in capture.records:
            writer.write(record)
    assert main(["audit", str(path), "--min-exact-share", "1"]) == 0
    said = capsys.readouterr().out
    assert "2 of 2 requests (100.0%) have the cached tokens that the rules of SGLang's radix cache give them" in said
    assert "500 tokens in pages of 1; what prompts share is known to the token" in said
    with pytest.raises(
        InputError, match=r"^--block-size: .*t\.jsonl is audited as sglang's; expected a trace of vllm$"
    ):
        main(["audit", str(path), "--block-size", "16"])
    with open_trace(path) as reader:
        meta, records = finest_records(reader, 1)
        counts = count_radix_hits(records, page_chains(meta, 1, None), RadixConfig())
    assert (counts.hit_tokens, counts.block_size) == (20, 1)
