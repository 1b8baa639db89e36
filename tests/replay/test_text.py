"""Captured prompts as words: which sharing is kept to the block, what the template takes, and how sessions go on."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from engines.vllm import VLLM
from loadgen.__main__ import main as loadgen
from loadgen.core.draws import TokenIds
from loadgen.core.job import Response
from loadgen.text.chattemplate import Gaps
from loadgen.text.prompts import ChatPrompt
from loadgen.text.targettext import TargetText
from loadgen.text.words import Words
from replay.__main__ import main as replay
from replay.capture import Captured
from replay.expansion import Expansion
from replay.text import Exchange, TextReplay, TextTarget, open_text, orders, text_notes
from tests.fakes.translating_engine import translating
from tests.jsonoutput import json_of
from tracefile.files.reading import load_trace
from tracefile.records.schema import BlockHash, Record, RequestId

BLOCK = 8
WORDS = Words(tuple(f"w{number:03}" for number in range(500)), tuple(range(1000, 1500)), tuple(range(2000, 2500)))
HEAD, BETWEEN, END = (1, 2, 3), (4, 5), (6, 7, 8, 9)
"""What the template writes before the first message, between a message and the next, and behind the last one."""


def gaps(messages: int, head: tuple[int, ...] = HEAD) -> Gaps:
    # Before an old answer stands what opened it when it was new, so that prompts begin with those before them.
    between = [END if position % 2 == 0 else BETWEEN for position in range(messages - 1)]
    return Gaps((head, *between, END), (False,) * messages)


def text_replay(head: tuple[int, ...] = HEAD) -> TextReplay:
    table = {order: gaps(len(order), head) for order in orders(4)}
    return open_text(TextTarget("chat", TargetText(WORDS, table)), VLLM, BLOCK)


def captured(
    name: str, hashes: list[int], prompt_tokens: int, *, output: int = 4, output_hashes: list[int] | None = None
) -> Captured:
    return Captured(
        request_id=RequestId(name),
        session_id=None,
        session_source=None,
        parent_id=None,
        turn=None,
        offset_ms=0.0,
        end_ms=None,
        hashes=[BlockHash(each) for each in hashes],
        has_hashes=True,
        hash_source=None,
        output_hashes=None if output_hashes is None else [BlockHash(each) for each in output_hashes],
        prompt_tokens=prompt_tokens,
        output_tokens=output,
        cached_tokens=None,
        endpoint=None,
        stream=True,
        n=None,
        priority=None,
        lora=None,
    )


def words_for(captured: Captured, expansion: Expansion) -> TokenIds:
    blocks = expansion.blocks(captured.hashes, captured.request_id).ravel()
    return np.concatenate([blocks, expansion.tail(captured.prompt_tokens - len(blocks), captured.request_id)])


def sent(maker: TextReplay, request: Captured, before: Exchange | None = None) -> ChatPrompt:
    expansion = Expansion(BLOCK, "nonce", maker.vocabulary())
    return maker.prompt(request, words_for(request, expansion), before)


def ids_of(prompt: ChatPrompt) -> list[int]:
    token_ids = prompt.form.text_maker.ids(prompt.conversation)
    assert token_ids is not None
    return [int(token_id) for token_id in token_ids]


def shared(first: list[int], second: list[int]) -> int:
    size = min(len(first), len(second))
    return next((position for position in range(size) if first[position] != second[position]), size)


@given(
    common=st.integers(0, 4),
    private=st.tuples(st.integers(1, 3), st.integers(1, 3)),
    tails=st.tuples(st.integers(0, 7), st.integers(0, 7)),
)
def test_shared_blocks_stay_shared(common: int, private: tuple[int, int], tails: tuple[int, int]) -> None:
    """k blocks shared in the capture are k blocks shared here, whatever the template takes of the first and last."""
    maker = text_replay()
    prompts = []
    for which in (0, 1):
        hashes = [*range(100, 100 + common), *range(1000 * (which + 1), 1000 * (which + 1) + private[which])]
        request = captured(str(which), hashes, len(hashes) * BLOCK + tails[which])
        prompt = sent(maker, request)
        token_ids = ids_of(prompt)
        assert prompt.planned_tokens() == len(token_ids)
        # As long as it was; longer only where the tail has no room for the template's end.
        assert len(token_ids) == request.prompt_tokens + max(0, len(END) - tails[which])
        prompts.append(token_ids)
    assert shared(*prompts) // BLOCK == common


def answered(prompt: ChatPrompt, token_ids: list[int]) -> Response:
    record = Record(
        request_id=RequestId("1"),
        status="ok",
        prompt_tokens=len(ids_of(prompt)),
        output_tokens=len(token_ids),
        tokens_source="usage",
        finish_reason="length",
    )
    return Response(record, 0.0, token_ids, None, "what was said")


@pytest.fixture(scope="session")
def chats(sim_server: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Sessions of chats as their client recorded them."""
    trace = tmp_path_factory.mktemp("captured") / "t.jsonl"
    flags = ["--turns", "3", "--rate", "30", "--number", "4", "--prompt-tokens", "40:70", "--output-tokens", "24"]
    assert loadgen(["--url", sim_server, "-o", str(trace), "--api", "chat", *flags]) == 0
    return trace


@pytest.mark.parametrize("api", ["chat", "responses", "messages"])
def test_session_replay_in_words_hits_as_captured(sim_server: str, chats: Path, tmp_path: Path, api: str) -> None:
    """The embedded engine's prefix cache, over real sockets."""
    source = {record.request_id: record for record in load_trace(chats)[1]}
    out = tmp_path / "t.jsonl"
    with translating(sim_server) as url:
        target = ["--url", url, "--api", api, "-o", str(out), "--nonce", api]
        check: dict[str, Any] = json_of(replay, [str(chats), *target, "--replay-sessions"])["run"]["prompt_check"]
    assert check["verdict"].startswith("exact (")
    later = [record for record in load_trace(out)[1] if record.turn != 1]
    assert len(later) == 8
    for record in later:
        before = source[record.request_id]
        assert 0 <= (record.prompt_tokens or 0) - (before.prompt_tokens or 0) <= 2
        if record.prompt_tokens == before.prompt_tokens:
            assert record.cached_tokens == before.cached_tokens


def test_output_that_repeats_the_prompt_is_not_a_long_template() -> None:
    maker = text_replay()
    first = captured("a", [1, 2], 10, output=2, output_hashes=[3])
    before = sent(maker, first)
    echo = Response(Record(request_id=first.request_id, output_tokens=40), 0.0, None, None, "many words")
    before.resolve(echo)
    sent(maker, captured("b", [1, 2, 3], 14), Exchange(first, before, echo))
    assert maker.counts.outgrown == 1
    assert "earlier outputs have more tokens as text than were generated" in text_notes(maker.counts)[-1]
