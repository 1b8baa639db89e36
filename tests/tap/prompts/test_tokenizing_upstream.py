"""``--tokenizer engine`` through the whole tap: the recorder asks the upstream beside the traffic, once a text."""

import asyncio
import json
from typing import Any

from tracefile import BlockHasher

PROMPT_IDS = list(range(40, 49))


def engine(answers_tokenize: bool) -> Any:
    """A script: completions of 2 tokens; ``/tokenize`` with fixed ids, or not at all."""

    async def script(request: Any) -> None:
        if request.target == b"/tokenize":
            if answers_tokenize:
                request.write_json({"count": len(PROMPT_IDS), "max_model_len": 99, "tokens": PROMPT_IDS})
            else:
                request.write_json({"error": "CANARY"}, b"500 Internal Server Error")
            return
        choice = {"index": 0, "text": "ab", "message": {"content": "ab"}, "finish_reason": "length"}
        usage = {"prompt_tokens": len(PROMPT_IDS), "completion_tokens": 2}
        request.write_json({"choices": [choice], "usage": usage})

    return script


def ask(lab: Any, answers_tokenize: bool) -> list[Any]:
    """What the upstream was asked at ``/tokenize``."""

    async def scenario() -> list[Any]:
        async with lab.tap(engine(answers_tokenize), tokenizer="engine") as (tap, upstream):
            for _ in range(2):
                assert (await tap.post("/v1/completions", {"model": "m", "prompt": "some text"})).status == 200
            await tap.post("/v1/chat/completions", {"model": "m", "messages": [{"role": "user", "content": "x"}]})
            await tap.post("/v1/completions", {"model": "m", "prompt": [1, 2, 3, 4]})
        return [json.loads(request.body) for request in upstream.requests if request.target == b"/tokenize"]

    return asyncio.run(scenario())


def test_the_upstream_tokenizes_each_text_once_and_no_ids(lab: Any) -> None:
    questions = ask(lab, answers_tokenize=True)
    assert questions == [
        {"prompt": "some text", "add_special_tokens": True},
        {"model": "m", "messages": [{"role": "user", "content": "x"}], "add_generation_prompt": True},
    ]
    hasher = BlockHasher(lab.key, block_size=4, model="m")
    assert [record.block_hashes for record in lab.records] == [
        *[hasher.hash_blocks(PROMPT_IDS)] * 3, hasher.hash_blocks([1, 2, 3, 4])
    ]  # fmt: skip
    assert [record.hash_source for record in lab.records] == ["tokenizer"] * 3 + ["engine"]
    # Nobody asks an engine to tokenize what it said itself.
    assert all(record.output_block_hashes is None for record in lab.records)
    assert (lab.counts.prompt_counts_checked, lab.counts.prompt_counts_matched) == (4, 3)


def test_an_upstream_that_refuses_costs_the_hashes_and_the_reason_is_counted(lab: Any) -> None:
    assert len(ask(lab, answers_tokenize=False)) == 3
    assert lab.counts.unhashed == {"engine_tokenizer_http_500": 3}
    assert (lab.counts.recorded, lab.records[3].hash_source) == (4, "engine")
    assert b"CANARY" not in lab.trace.read_bytes()


UNKNOWN_MODEL = {"error": {"message": "The model `typo` does not exist.", "type": "NotFoundError", "code": 404}}
