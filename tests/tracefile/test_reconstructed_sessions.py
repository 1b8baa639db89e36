"""Sessions of clients that name none, beside those that the clients had: precision and recall of the links."""

from collections.abc import Sequence
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.tracefile.conversations import (
    ASSISTANT,
    END,
    THINK,
    USER,
    B,
    Client,
    Sent,
    agent,
    altered,
    chat,
    compacted,
    exact,
    message,
    record_of,
    retried,
    rollouts,
    thinking,
    traffic,
)
from tracefile.promptends import HEADER_TOKENS
from tracefile.records.schema import Record
from tracefile.sessions import SessionIndex, infer_sessions

CLIENTS: dict[str, Client] = {
    "chats": partial(chat, again=exact),
    "chats, other tokens": partial(chat, again=altered),
    "short questions": partial(chat, again=altered, shortest=1),
    "agents": agent,
    "thinking": thinking,
    "thinking, header removed": lambda r: thinking(r, THINK),
    "compaction": compacted,
    "retries and edits": retried,
    "rollouts": rollouts,
}
KNOWN_BY_OUTPUT = {"rollouts"}
"""Which of several answers to one prompt was continued is told by their ids alone."""


def links(sent: Sequence[Sent], reported: Sequence[Record]) -> tuple[float, float]:
    """Precision and recall of the parents."""
    truth = {item.name: item.parent.name for item in sent if item.parent is not None}
    made = {str(record.request_id): record.parent_id for record in reported if record.parent_id is not None}
    right = sum(made.get(name) == parent for name, parent in truth.items())
    return right / len(made), right / len(truth)


def by_tokens(sent: Sequence[Sent], records: Sequence[Record]) -> list[Record]:
    index = SessionIndex(B)
    reported = [index.link(record, item.prompt) for record, item in zip(records, sent, strict=True)]
    index.check_integrity()
    return reported


@pytest.mark.parametrize("output_ids", [False, True], ids=["usage", "ids"])
@pytest.mark.parametrize("name", CLIENTS)
def test_sessions_from_token_ids_equal_the_clients(name: str, output_ids: bool) -> None:
    sent = traffic(CLIENTS[name], seed=1)
    precision, recall = links(sent, by_tokens(sent, [record_of(item, output_ids=output_ids) for item in sent]))
    if name in KNOWN_BY_OUTPUT and not output_ids:
        assert min(precision, recall) < 0.99  # the trace cannot tell
    else:
        assert min(precision, recall) >= 0.99


@pytest.mark.parametrize("name", sorted(CLIENTS.keys() - KNOWN_BY_OUTPUT))
def test_sessions_from_block_hashes_are_correct_and_nearly_complete(name: str) -> None:
    # A prompt whose last full block is of the system prompt alone, or of a header that is removed, is not found again.
    sent = traffic(CLIENTS[name], seed=2)
    precision, recall = links(sent, infer_sessions([record_of(item, output_ids=False) for item in sent], B).records)
    assert precision >= (0.9 if "header" in name else 0.99)
    assert recall >= (0.9 if "header" in name else 0.97)


def test_continuation_is_exact_or_altered() -> None:
    for again, expected in ((exact, {"exact"}), (altered, {"altered", "exact"})):
        sent = traffic(partial(chat, again=again), seed=3, sessions=40)
        reported = by_tokens(sent, [record_of(item, output_ids=True) for item in sent])
        degrees = {record.continuation for record in reported if record.parent_id is not None}
        assert degrees - {None} == expected  # None: the output fills no block


def single_chat(
    name: str, at_ms: float, prompt: list[int], output: list[int] | None = None
) -> tuple[Record, list[int]]:
    sent = Sent(prompt, output or [9] * 4, None, name=name, arrival_ms=at_ms, end_ms=at_ms + 10)
    return record_of(sent, output_ids=output is not None), prompt


def parents(*requests: tuple[Record, list[int]]) -> list[str | None]:
    index = SessionIndex(B)
    return [index.link(record, prompt).parent_id for record, prompt in requests]


HI = message(USER, [50, 51])


def test_a_prompt_shorter_than_a_block_is_continued() -> None:
    first = [*HI, ASSISTANT]
    assert parents(single_chat("a", 0, first), single_chat("b", 20, [*first, 60, END, *HI, ASSISTANT])) == [None, "a"]


def test_another_model_is_no_continuation() -> None:
    first, second = (
        single_chat("a", 0, [*HI, ASSISTANT]),
        single_chat("b", 20, [*HI, ASSISTANT, 60, END, *HI, ASSISTANT]),
    )
    second[0].model = "another"
    assert parents(first, second) == [None, None]


def test_different_short_prompt_starts_a_session() -> None:
    system = list(range(100, 100 + 2 * B))
    yes, no = ([*system, *message(USER, [word]), ASSISTANT] for word in (70, 71))
    assert parents(single_chat("yes", 0, yes), single_chat("no", 20, [*no, 60, END, *HI, ASSISTANT])) == [None, None]


def test_longer_last_message_is_no_continuation() -> None:
    # "yes" and "yes, but …": the template's end of a message does not follow the first's text in the second.
    system = list(range(100, 100 + 2 * B))
    short, longer = [*system, USER, 70, END, ASSISTANT], [*system, USER, 70, 71, 72, END, ASSISTANT]
    assert parents(single_chat("short", 0, short), single_chat("longer", 20, longer)) == [None, None]


def test_equal_prompt_is_no_continuation() -> None:
    prompt = [*range(100, 140), ASSISTANT]
    assert parents(single_chat("a", 0, prompt), single_chat("again", 20, prompt)) == [None, None]


def test_changed_generation_header_is_ignored() -> None:
    for length in range(30, 30 + 2 * B):
        history = [*range(100, 100 + length), END]
        later = [*history, ASSISTANT, 60, END, *HI, ASSISTANT, THINK]
        asked = single_chat("a", 0, [*history, ASSISTANT, THINK], [9] * 40)
        assert parents(asked, single_chat("b", 200, later)) == [None, "a"]


def test_memory_of_token_ids_is_bounded() -> None:
    index = SessionIndex(B, max_blocks=64)
    system = list(range(100, 100 + 2 * B))
    for number in range(300):
        index.link(*single_chat(f"r{number}", 20 * number, [*system, USER, 1000 + number, END, ASSISTANT]))
        index.check_integrity()


@st.composite
def overlapping(draw: st.DrawFn) -> list[tuple[Record, list[int], list[int]]]:
    """Records by their ends, with prompt and output, many of which begin as others do."""
    texts: list[list[int]] = [[1] * 5]
    requests = []
    for number in range(draw(st.integers(1, 9))):
        text = draw(st.sampled_from(texts))
        cut = draw(st.integers(1, len(text)))
        prompt = [
            *text[:cut],
            *draw(st.lists(st.integers(1, 2), max_size=2 * B)),
            *draw(st.sampled_from([[3], [3, 4]])),
        ]
        output = draw(st.lists(st.integers(1, 2), min_size=1, max_size=2 * B))
        arrival_ms = float(draw(st.integers(0, 30)))
        end_ms = arrival_ms + draw(st.integers(1, 15)) + number / 100
        sent = Sent(prompt, output, None, name=f"r{number}", arrival_ms=arrival_ms, end_ms=end_ms)
        requests.append((record_of(sent, output_ids=draw(st.booleans())), prompt, output))
        texts += [prompt, [*prompt, *output]]
    return sorted(requests, key=lambda item: item[0].end_ms() or 0.0)


def common(item: Sequence[int], other: Sequence[int]) -> int:
    return next(
        (at for at, pair in enumerate(zip(item, other, strict=False)) if pair[0] != pair[1]), min(len(item), len(other))
    )


def oracle(child: Record, prompt: list[int], earlier: list[tuple[Record, list[int], list[int]]]) -> str | None:
    """The parent by the rules read off one by one, over all tokens of every earlier request."""
    result: list[tuple[int, bool, float, str]] = []
    for record, other, output in earlier:
        end_ms, shared = record.end_ms() or 0.0, common(other, prompt)
        if end_ms > (child.arrival_ms or 0.0):
            continue
        if record.output_block_hashes is not None:
            chain = [*other, *output[:-1]]
            blocks = common(chain, prompt) // B
            if blocks > len(other) // B:
                result.append((blocks * B, blocks == len(chain) // B, end_ms, record.request_id))
        header = common(other[::-1][:HEADER_TOKENS], prompt[::-1])
        is_continued = shared == len(other) or shared > len(other) - header
        if is_continued and len(other) < len(prompt):
            result.append((shared, True, end_ms, record.request_id))
    return max(result)[3] if result else None


@settings(max_examples=300, deadline=None)
@given(overlapping())
def test_token_links_equal_the_oracle(trace: list[tuple[Record, list[int], list[int]]]) -> None:
    index = SessionIndex(B)
    for number, (record, prompt, _) in enumerate(trace):
        assert index.link(record, prompt).parent_id == oracle(record, prompt, trace[:number])
    index.check_integrity()
