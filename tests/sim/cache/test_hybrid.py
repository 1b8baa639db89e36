"""Hits of several KV groups, one request at a time: against the scheduler, and the rules that took the rest."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from sim.__main__ import main
from sim.cache.hybrid import CAUSES, HybridPool, Prompt, count_hits, unlimited_hits
from sim.vllm.kvgroups import parse_groups
from sim.vllm.request import Request
from tests.sim.vllm.test_hybrid_oracle import make_hybrid
from tests.sim.vllm.test_vllm_oracle import Keys
from tracefile.records.errors import InputError

SIX = str(Path(__file__).parent.parent / "data" / "six_requests.jsonl")


def system_prompts(folder: Path) -> str:
    """Twenty requests of 300 tokens that share the first 240."""
    hashes_by = {"algorithm": "xxh3_64", "key_id": "synthetic"}
    meta = {"schema": "kvtape/1", "source": "client", "block_size": 16, "hash": hashes_by}
    lines: list[dict[str, Any]] = [{"meta": meta}]
    for number in range(20):
        hashes = [*range(1, 16), *(1000 * (number + 1) + place for place in range(3))]
        lines.append(
            {
                "request_id": f"r{number}",
                "arrival_ms": 10.0 * number,
                "prompt_tokens": 300,
                "output_tokens": 2,
                "block_hashes": hashes,
            }
        )
    path = folder / "system.jsonl"
    path.write_text("\n".join(map(json.dumps, lines)) + "\n")
    return str(path)


def told(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(arguments) == 0
    return " ".join(capsys.readouterr().out.split())


def test_zero_hits_of_a_short_system_prompt_are_explained(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = system_prompts(tmp_path)
    text = told(capsys, "pool", trace, "--kv-groups", "full:784+mamba:784*3")
    assert "0 of 6,000 input tokens hit (0.00%), 20 requests" in text
    assert "rounding to the block 4,560 76.00% full:784 4,560" in text
    assert "76.00% of input tokens were seen before, at most 240 in a row; a hit is a multiple of 784" in text
    assert "rounding keeps 0% of them; blocks of 16 tokens in all groups would keep 100%" in text
    # A finer match unit does not help: inside a block only the end of a whole prompt is cached.
    text = told(capsys, "pool", trace, "--kv-groups", "full:784+mamba:784*3+match=16")
    assert "window or state not kept 4,560 76.00% full:784 4,560" in text


def test_windows_that_are_not_kept_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "misses", system_prompts(tmp_path), "--kv-groups", "full:16+window(64):16*3")
    assert "4,320 of 6,000 input tokens hit (72.00%)" in text
    assert "window or state not kept 240 4.00% window(64):16 240" in text  # the second request's
    text = told(capsys, "curve", system_prompts(tmp_path), "--kv-groups", "full:32+window(64):16*3+eagle")
    assert "last block dropped" in text
    assert text.count("%") > 20


@pytest.mark.parametrize(("blocks", "hits"), [("inf", 36), ("5", 28)])
def test_one_group_is_the_simple_pool(blocks: str, hits: int, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["pool", SIX, "--num-gpu-blocks", blocks, "--json"]
    simple = json.loads(told(capsys, *flags))
    (grouped,) = json.loads(told(capsys, *flags, "--kv-groups", "full:4"))["counts"]
    assert (simple["hit_tokens"], simple["rejected"]) == (grouped["hit_tokens"], grouped["rejected"])
    assert grouped["hit_tokens"] == hits


@pytest.mark.parametrize("seed", range(6))
def test_one_at_a_time_hits_are_the_schedulers(seed: int) -> None:
    workload, keys = make_hybrid(seed), Keys()
    layout, unit = parse_groups(workload["config"]["kv_groups"]), workload["config"]["block_size"]
    prompts = [
        Prompt(len(one["prompt"]), len(one["output"]), keys.chain(one, unit), 0, one["prompt_logprobs"], 2)
        for one in workload["requests"]
    ]
    alone, stepped = HybridPool(layout, 400), HybridPool(layout, 400).scheduler
    for number, prompt in enumerate(prompts):
        request = Request(str(number), prompt.tokens, prompt.output_tokens, prompt.keys, prompt_logprobs=prompt.scored)
        stepped.add(request)
        while stepped.has_work:
            stepped.finish_step(stepped.schedule())
        found = alone.run(prompt)
        assert found is not None
        assert found[0] == request.cached_tokens
    assert alone.scheduler.pool.num_free == stepped.pool.num_free
    counts = count_hits(prompts, layout, 150, unlimited_hits(prompts, layout))
    assert sum(counts.tokens[cause] for cause in CAUSES) == counts.input_tokens


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv-groups", "full:6"], "--kv-groups: full:6: blocks of 6 tokens; expected multiples of the trace's 4"),
        (["--kv-groups", "full:4", "--block-size", "8"], "--block-size: given with --kv-groups"),
        (["--kv-groups", "full:4", "--free-rule", "append_all"], "--free-rule: given with --kv-groups"),
        (["--kv-groups", "fool:4"], "'fool:4'; expected full:16"),
        (["--kv-groups", "none.json"], "none.json: No such file"),
        (["--kv-groups", "full:4", "--engine", "sglang"], "--kv-groups: only with --engine vllm"),
    ],
)
def test_wrong_flags_are_one_line(arguments: list[str], message: str) -> None:
    with pytest.raises(InputError) as raised:
        main(["pool", SIX, *arguments])
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_causes_add_up() -> None:
    rng = random.Random(1)
    layout = parse_groups("full:8+window(24):8*2+eagle")
    prompts = []
    for _ in range(40):
        tokens, shared = rng.randrange(1, 120), rng.randrange(0, 12)
        keys = [*range(shared), *(rng.randrange(10**9) for _ in range(40))]
        prompts.append(Prompt(tokens, 3, keys, min(shared * 8, tokens), False, 0))
    counts = count_hits(prompts, layout, 80, unlimited_hits(prompts, layout))
    assert sum(counts.tokens[cause] for cause in CAUSES) == counts.input_tokens == sum(one.tokens for one in prompts)
    assert counts.tokens["evicted"] > 0
    assert min(counts.tokens[cause] for cause in CAUSES) >= 0
