"""``sim curve --by``, against one plain LRU."""

import json
import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from measure.cache.accesses import Accesses
from sim.__main__ import main
from sim.cache.curve import cache_use
from sim.workload.groups import Grouping, Groups, short_names
from tests.sim.cache.packed import in_order
from tracefile import TraceWriter
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, Meta, Record, RequestId, SessionId

SIX = str(Path(__file__).parent.parent / "data" / "six_requests.jsonl")
BY_SESSION = Grouping(by="session")
Prompt = tuple[list[int], int, str]
"""A prompt's blocks, how many of them may be hit, and its session."""

prompts = st.lists(
    st.tuples(
        st.lists(st.integers(0, 2), max_size=6).map(
            lambda path: [hash(tuple(path[: i + 1])) for i in range(len(path))]
        ),
        st.integers(0, 6),
        st.sampled_from("abc"),
    ),
    min_size=1,
    max_size=30,
)


def accesses(found: list[Prompt]) -> tuple[Accesses, Groups]:
    numbers: dict[int, int] = {}
    blocks = [numbers.setdefault(block, len(numbers)) for prompt, _, _ in found for block in prompt]
    starts = np.cumsum([0] + [len(prompt) for prompt, _, _ in found])
    names = list(dict.fromkeys(session for _, _, session in found))
    of_request = np.array([names.index(session) for _, _, session in found], np.int64)
    groups = Groups(names, of_request, names, np.zeros(len(names), np.int64), of_request)
    limits = np.array([limit for _, limit, _ in found], np.int64)
    tokens = 16 * np.diff(starts).astype(np.int64)
    missing = np.full(len(found), np.nan)
    return Accesses(*in_order(blocks, starts), limits, len(numbers), 16, tokens, missing), groups


class SlowUse:
    """One LRU of one size whose blocks belong to who touched them last."""

    def __init__(self, found: list[Prompt], size: int) -> None:
        self.hits: Counter[str] = Counter()
        self.inserted: Counter[str] = Counter()
        self.held: Counter[str] = Counter()
        owners: dict[int, str] = {}  # least recently touched first
        for blocks, limit, session in found:
            there = [block in owners for block in blocks[:limit]]
            self.hits[session] += there.index(False) if False in there else len(there)
            for block in reversed(blocks):
                self.inserted[session] += block not in owners
                owners.pop(block, None)
                owners[block] = session
                if len(owners) > size:
                    del owners[next(iter(owners))]
            self.held.update(owners.values())


@settings(max_examples=120, deadline=None)
@given(prompts, st.integers(1, 15))
def test_groups_use_the_cache_as_in_a_plain_lru(found: list[Prompt], size: int) -> None:
    use = cache_use(*accesses(found), BY_SESSION, [size])[0]
    slow = SlowUse(found, size)
    assert {group.name: group.hit_blocks for group in use.groups} == {name: slow.hits[name] for name in slow.hits}
    assert {group.name: group.inserted_blocks for group in use.groups} == {
        name: slow.inserted[name] for name in slow.hits
    }
    held = sum(slow.held.values()) or 1
    for group in use.groups:
        assert group.held_share == pytest.approx(slow.held[group.name] / held)
        assert group.lookup_blocks == sum(len(blocks) for blocks, _, session in found if session == group.name)


def curve(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert main(["curve", *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_six_requests_by_prefix(capsys: pytest.CaptureFixture[str]) -> None:
    # Two blocks: r2 and r3 hit 1 and 2, r5 hits 9 and 10; r6 finds none of its own.
    found = curve(capsys, SIX, "--by", "prefix", "--cache-tokens", "8")["curves"][0]
    use = found["use"][0]
    assert (use["blocks"], use["tokens"]) == (2, 8)
    told = [
        (group["name"], group["requests"], group["hit_blocks"], group["inserted_blocks"]) for group in use["groups"]
    ]
    # r1 puts in 2 blocks; r2, r3 and r6 put in all three of theirs: the third pushes out the second, that the first.
    assert told == [("1", 4, 4, 11), ("9", 2, 2, 2)]
    assert use["groups"][0]["hit_rate"] == 16 / 46
    assert sum(group["hit_share"] for group in use["groups"]) == 1.0


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--cache-tokens", "99999999999999999999"], "--cache-tokens: '99999999999999999999'; expected numbers from 1"),
        (["--cache-tokens", ""], "--cache-tokens"),
        (["--block-size", "6"], "not a multiple"),
        (["--by", "session", "--groups", "0"], "--groups: 0"),
        (["--groups", "3"], "^--groups: without --by; expected both$"),
        (["--by", "session", "--tenant-field", "lora"], "^--tenant-field: without --by tenant; expected both$"),
        (["--by", "tenant", "--prefix-blocks", "3"], "^--prefix-blocks: without --by prefix; expected both$"),
        (["--kv-groups", "full:4", "--groups", "3"], "^--groups: given with --kv-groups"),
    ],
)
def test_flags_that_make_no_sense_are_refused(arguments: list[str], told: str) -> None:
    with pytest.raises(InputError, match=told):
        main(["curve", SIX, *arguments])


def test_the_command_prints_who_uses_the_cache(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curve", SIX, "--by", "prefix", "--cache-tokens", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[2].split() == ["67%", "6", "39.34%", "2", "8"]
    assert lines[4].startswith("prefixes of 1 block (4 tokens), the first depth that tells them apart")
    assert lines[6] == "2 usable blocks (8 tokens)"
    assert lines[8].split()[:5] == ["1", "16", "66.67%", "34.78%", "4"]


def write(path: Path, prompts: list[list[int]], session: str | None = None) -> str:
    """A trace of prompts that are paths in a tree, in blocks of 4 tokens, one after another."""
    with TraceWriter(path, Meta(block_size=4)) as writer:
        for number, prompt in enumerate(prompts):
            chain = [hash((9, *prompt[: end + 1])) & (2**64 - 1) for end in range(len(prompt))]
            writer.write(
                Record(
                    request_id=RequestId(f"r{number}"),
                    session_id=SessionId(f"{session}{number % 2}") if session else None,
                    arrival_ms=10.0 * number,
                    e2e_ms=5.0,
                    prompt_tokens=4 * len(prompt) + 1,
                    output_tokens=1,
                    block_hashes=[BlockHash(key) for key in chain],
                )
            )
    return str(path)


def test_the_depth_of_prefixes_is_where_groups_differ(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    # All begin with 7, 7. Behind it one group shares 3 more blocks, another 1 more; every request ends with its own.
    first = [[7, 7, 1, 1, 1, 100 + number] for number in range(6)]
    second = [[7, 7, 2, 200 + number] for number in range(4)]
    trace = write(tmp_path / "t.jsonl", [prompt for pair in zip(first, second, strict=False) for prompt in pair])
    assert main(["curve", trace, "--by", "prefix", "--cache-tokens", "400"]) == 0
    printed = capsys.readouterr().out
    assert "prefixes of 3 blocks (12 tokens), the first depth that tells them apart" in printed
    found = curve(capsys, trace, "--by", "prefix", "--cache-tokens", "400")["curves"][0]["use"][0]
    told = [(group["requests"], group["hit_tokens"], group["shared_tokens"]) for group in found["groups"]]
    # Of the first: 3 requests find 5 blocks. Of the second: the first finds 7, 7; 3 find 3 blocks.
    assert told == [(4, 4 * 15, 20), (4, 4 * (2 + 9), 12)]
    assert found["groups"][0]["example"] == "r0"
    asked = curve(capsys, trace, "--by", "prefix", "--prefix-blocks", "1", "--cache-tokens", "400")["curves"][0]["use"][
        0
    ]
    assert [group["requests"] for group in asked["groups"]] == [8]


def test_one_prompt_for_all_is_one_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path / "t.jsonl", [[7, 7, 7, 100 + number] for number in range(6)])
    groups = curve(capsys, trace, "--by", "prefix")["curves"][0]["use"][-1]["groups"]
    assert [(group["requests"], group["hit_share"], group["shared_tokens"]) for group in groups] == [(6, 1.0, 12)]


def test_sessions_are_inferred_where_the_trace_names_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = [[1], [5], [1, 2], [5, 6], [1, 2, 3], [5, 6, 7]]
    trace = write(tmp_path / "t.jsonl", turns)
    assert main(["curve", trace, "--by", "session"]) == 0
    assert "sessions inferred from prefixes for 6 of 6 requests\n" in capsys.readouterr().out
    use = curve(capsys, trace, "--by", "session")["curves"][0]["use"][-1]
    assert [(group["requests"], group["sessions"], group["hit_tokens"]) for group in use["groups"]] == [
        (3, 1, 12),
        (3, 1, 12),
    ]
    named = write(tmp_path / "named.jsonl", turns, "s")
    assert main(["curve", named, "--by", "session"]) == 0
    assert "inferred" not in capsys.readouterr().out


def test_a_trace_without_a_later_turn_gets_a_word_and_no_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = write(tmp_path / "t.jsonl", [[7, 100 + number] for number in range(4)])
    assert main(["curve", trace, "--by", "session"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == (
        "sessions inferred from prefixes for 4 of 4 requests: no request was found to continue another, so each is a "
        "session of one turn"
    )


def test_the_groups_in_the_last_row_are_counted_and_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["curve", SIX, "--by", "prefix", "--groups", "1", "--cache-tokens", "8"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-2].split()[:4] == ["1", "others", "8", "33.33%"]
    assert lines[-1] == "each of the 1 others saves at most 8 tokens"


def test_several_sizes_are_columns_of_one_table(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    turns = [[1], [5], [1, 2], [5, 6], [1, 2, 3], [5, 6, 7]]
    trace = write(tmp_path / "t.jsonl", turns, "a-conversation-of-the-team-number-")
    assert main(["curve", trace, "--by", "session", "--cache-tokens", "8,20"]) == 0
    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert lines[-4:] == [
        "tokens saved (hit rate) by usable blocks",
        "group requests sessions shared tokens 2 blocks 5 blocks",
        "a-conversat…eam-number-0 3 1 4 4 (14.81%) 12 (44.44%)",
        "a-conversat…eam-number-1 3 1 4 0 (0.00%) 12 (44.44%)",
    ]


def test_names_in_a_table_differ() -> None:
    words = ["x" * 30 + "1", "x" * 30 + "2", "y" * 20 + "1" + "y" * 20, "y" * 20 + "2" + "y" * 20]
    assert short_names(words) == ["xxxxxxxxxxx…xxxxxxxxxxx1", "xxxxxxxxxxx…xxxxxxxxxxx2", *words[2:]]


def test_mooncake_conversation(capsys: pytest.CaptureFixture[str]) -> None:
    folder = os.environ.get("KVTAPE_DATA")
    if not folder:
        pytest.skip("KVTAPE_DATA does not name a folder with mooncake/conversation_trace.jsonl")
    trace = str(Path(folder) / "mooncake" / "conversation_trace.jsonl")
    # All but a few requests share block 0, so the first block tells nothing apart.
    assert main(["curve", trace, "--by", "prefix", "--groups", "2", "--cache-tokens", "15154688"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[5].startswith("prefixes of 2 blocks (1,024 tokens)")
    assert lines[9].split()[:7] == ["9382", "1,105,408", "2.27%", "80.27%", "17", "–", "74,240"]
    assert lines[-2].split()[:4] == ["6,046", "others", "46,770,176", "96.12%"]
