"""``sim pool``: known results, computed by hand for six requests and published for the Mooncake trace."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sim.__main__ import main
from sim.vllm.config import EngineConfig
from sim.workload.chain import FIRST_PRIVATE, Chains
from tests.sim.cache.test_segments import traffic
from tests.sim.oracles.readable.request import Request
from tests.sim.oracles.readable.scheduler import Scheduler
from tests.sim.oracles.sequential import full_keys, plain_hits
from tracefile.records.errors import InputError
from tracefile.records.schema import Meta, Record, RequestId

SIX = str(Path(__file__).parent.parent / "data" / "six_requests.jsonl")


def pool(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert main(["pool", *arguments, "--json"]) == 0
    result: dict[str, Any] = json.loads(capsys.readouterr().out)
    return result


def test_unlimited_cache(capsys: pytest.CaptureFixture[str]) -> None:
    # r2 and r3 hit 2 (their third block holds their last token), r5 hits r4's prompt and output, r6 all 3.
    assert pool(capsys, SIX) == {
        "requests": 6,
        "rejected": 0,
        "input_tokens": 61,
        "lookup_blocks": 14,
        "hit_blocks": 9,
        "hit_tokens": 36,
        "evicted_blocks": 0,
        "block_size": 4,
        "usable_blocks": None,
        "compared": 0,
        "as_reported": 0,
        "hit_rate": 36 / 61,
    }


@pytest.mark.parametrize(
    ("blocks", "expected"),
    [
        # Free order after each request: 3421, 4321, 3421, 2143, 2143. r4 evicts both copies of block 3's key,
        # r5 evicts key 2, so r6 hits only key 1 and its three remaining blocks evict 9 and 10.
        (4, (7, 5, 0)),
        # r6 holds 4 blocks and never fits; r3 evicts key 3 by recomputing it, r4 keys 3 and 2, r5 key 1.
        (3, (6, 4, 1)),
        (100, (9, 0, 0)),
    ],
)
def test_small_pools_by_hand(capsys: pytest.CaptureFixture[str], blocks: int, expected: tuple[int, int, int]) -> None:
    result = pool(capsys, SIX, "--num-gpu-blocks", str(blocks + 1))
    assert (result["hit_blocks"], result["evicted_blocks"], result["rejected"]) == expected
    assert result["hit_tokens"] == 4 * result["hit_blocks"]
    assert result["usable_blocks"] == blocks


def test_double_block_size_uses_every_second_hash(capsys: pytest.CaptureFixture[str]) -> None:
    # At 8: r2, r3 and r6 hit key 2, r5 hits key 10, which r4's prompt began and r4's output filled.
    result = pool(capsys, SIX, "--block-size", "8")
    assert (result["hit_blocks"], result["hit_tokens"], result["lookup_blocks"]) == (4, 32, 5)


@pytest.mark.parametrize(
    ("arguments", "hits"),
    [
        ([], 105_592),
        (["--num-gpu-blocks", "1001"], 12_878),
        (["--num-gpu-blocks", "10001"], 61_238),
        (["--num-gpu-blocks", "50001"], 102_226),
    ],
)
def test_mooncake_conversation(
    mooncake: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], hits: int
) -> None:
    result = pool(capsys, str(mooncake), *arguments)
    assert (result["hit_blocks"], result["hit_tokens"]) == (hits, 512 * hits)
    assert (result["requests"], result["rejected"], result["input_tokens"]) == (12_031, 0, 144_793_823)


@given(traffic(), st.integers(20, 40))
def test_sequential_hits_equal_the_schedulers(records: list[Record], usable: int) -> None:
    meta = Meta(block_size=4)
    result = plain_hits(records, Chains(meta), usable)
    chains = Chains(meta)
    scheduler = Scheduler(EngineConfig(num_gpu_blocks=usable + 1, block_size=4, max_num_batched_tokens=5))
    for record in records:
        keys = full_keys(record, chains)
        scheduler.add(Request(record.request_id, record.prompt_tokens or 0, record.output_tokens or 1, keys))
        while scheduler.has_work:
            scheduler.finish_step(scheduler.schedule())
    assert scheduler.stats.hit_tokens == result.hit_tokens
    assert scheduler.pool.evicted_blocks == result.evicted_blocks


def record(**fields: Any) -> Record:
    return Record(request_id=RequestId("r"), **fields)


def test_blocks_without_hashes_have_private_keys() -> None:
    chains = Chains(Meta(block_size=4))
    first = FIRST_PRIVATE  # below every hash, so that no trace can hold it
    unknown_output = record(prompt_tokens=9, output_tokens=8, block_hashes=[1, 2])
    assert chains.block_keys(unknown_output) == [1, 2, first, first - 1]
    assert chains.block_keys(unknown_output) == [1, 2, first - 2, first - 3]
    known_output = record(prompt_tokens=9, output_tokens=8, block_hashes=[1, 2], output_block_hashes=[3, 4])
    assert chains.block_keys(known_output) == [1, 2, 3, 4]
    # An image without a digest ends the chain: later blocks, outputs included, have private keys.
    stopped = record(
        prompt_tokens=9, output_tokens=8, block_hashes=[1, 2], output_block_hashes=[3, 4], hashable_blocks=1
    )
    assert chains.block_keys(stopped) == [1, first - 4, first - 5, first - 6]
    assert chains.block_keys(record(prompt_tokens=9)) == [first - 7, first - 8, first - 9]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("pool --num-gpu-blocks 1", "--num-gpu-blocks: '1'; expected 2 to 2147483647 blocks, the null block included"),
        ("pool --block-size 6", "block size 6: not a multiple of the trace's 4"),
        ("pool --kv-groups full:4*99999999999", "expected at most 16777216 tokens and 1000 groups"),
        ("pool --kv-groups full:6", "blocks of 6 tokens; expected multiples of the trace's 4"),
        ("pool --engine llamacpp --slots 0", "--slots: 0; expected 1 to 4096"),
        ("pool --engine llamacpp --num-gpu-blocks 17", "--num-gpu-blocks: llama.cpp has no pool of blocks"),
        ("pool --slots 4", "--slots: only with --engine llamacpp"),
        ("pool --engine sglang --page-size 6 --chunked-prefill-size -1", "--page-size: 6 neither divides"),
        ("pool --engine sglang --kv-tokens 64 --num-gpu-blocks 17", "expected one of them"),
        ("curve --cache-tokens 99999999999999999999", "--cache-tokens: '99999999999999999999'; expected numbers"),
    ],
)
def test_invalid_flags_are_reported(arguments: str, message: str) -> None:
    command, *flags = arguments.split()
    with pytest.raises(InputError, match=message):
        main([command, SIX, *flags])


@pytest.mark.parametrize("command", ["pool", "curve"])
def test_trace_without_hashes_is_rejected(tmp_path: Path, command: str) -> None:
    trace = tmp_path / "bare.jsonl"
    trace.write_text('{"meta":{"schema":"kvtape/1"}}\n{"request_id":"r","prompt_tokens":9}\n')
    with pytest.raises(InputError, match=r"the trace has no block hashes; expected a trace with them"):
        main([command, str(trace)])
    with pytest.raises(InputError, match=r"bare.jsonl: block_hashes: no record has any"):
        main([command, str(trace), "--block-size", "16"])


@pytest.mark.parametrize(("flags", "unwanted"), [((), {"fastapi"}), (("--engine", "sglang"), {"numba", "fastapi"})])
def test_sim_pool_imports_are_light(flags: tuple[str, ...], unwanted: set[str]) -> None:
    code = f"import sys; from sim.__main__ import main; main(sys.argv[1:]); print({unwanted} & set(sys.modules))"
    ended = subprocess.run(
        [sys.executable, "-c", code, "pool", SIX, *flags], capture_output=True, text=True, check=True
    )
    assert ended.stdout.splitlines()[-1] == "set()"


@pytest.mark.parametrize(("second_ms", "warned"), [(70_000.0, True), (50_000.0, False)])
def test_a_file_sorted_by_session_is_reported(
    second_ms: float, warned: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "sessions.jsonl"
    path.write_text(
        '{"meta":{"schema":"kvtape/1","block_size":2,"hash":{"algorithm":"ids"}}}\n'
        + "".join(
            f'{{"request_id":"{number}","arrival_ms":{arrival_ms},"prompt_tokens":2,"block_hashes":[{number}]}}\n'
            for number, arrival_ms in enumerate((0.0, second_ms, 1.0))
        )
    )
    for command in (["pool"], ["misses", "--num-gpu-blocks", "9"]):
        assert main([command[0], str(path), *command[1:]]) == 0
        warning = "1 of 3 requests follow requests in the file that ended more than 60 s later"
        assert (warning in capsys.readouterr().err) == warned
