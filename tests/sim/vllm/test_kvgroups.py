"""The grammar of KV groups, and the lengths at which hits may end."""

import pytest

from sim.vllm.config import EngineConfig
from sim.vllm.kvgroups import KvGroup, parse_groups
from tests.sim.oracles.integrity import check_readable
from tests.sim.oracles.readable.hybrid import HybridScheduler
from tests.sim.oracles.readable.request import Request
from tracefile.records.errors import InputError


def test_groups_are_parsed_and_named() -> None:
    layout = parse_groups("full:16 + window(1024):16*3 + retain=none")
    assert layout.groups == (KvGroup("full", 16), *[KvGroup("window", 16, 1024)] * 3)
    assert (layout.match_unit, layout.block_size, layout.alignment, layout.retain) == (16, 16, 16, None)
    assert layout.name == "full:16+window(1024):16*3+retain=none"
    assert parse_groups(layout.name) == layout


@pytest.mark.parametrize(
    ("text", "alignment", "partial"),
    [
        ("full:32+window(40):48", 96, False),  # the common multiple
        ("full:784+mamba:784*3", 784, False),
        ("full:784+mamba:784*3+match=16", 16, True),  # states inside a block can be matched
        ("full:784+mamba:784+window(64):784+match=16", 784, False),  # a window does not determine it
        ("full:784+mamba:784+window(64):16", 16, True),
    ],
)
def test_hit_alignment(text: str, alignment: int, partial: bool) -> None:
    layout = parse_groups(text)
    assert (layout.alignment, layout.partial_hits) == (alignment, partial)


@pytest.mark.parametrize(
    ("text", "output"),
    [
        ("full", "'full'; expected full:16"),
        ("full:16+mamba:24+match=16", "match=16: does not divide blocks of [16, 24]"),
        ("full:16+window(40):32+retain=48", "a multiple of 32"),
        ("full:32+chunk(64):16", "chunk(64):16: expected blocks of 32 tokens"),
    ],
)
def test_invalid_groups(text: str, output: str) -> None:
    with pytest.raises(InputError, match="kv_groups") as raised:
        parse_groups(text)
    assert output in str(raised.value)
    assert "\n" not in str(raised.value)


def run(scheduler: HybridScheduler, request: Request) -> int:
    """Serve ``request`` alone; its cached tokens."""
    scheduler.add(request)
    while scheduler.has_work:
        scheduler.finish_step(scheduler.schedule())
        check_readable(scheduler)
    assert request.cached_tokens is not None
    return request.cached_tokens


@pytest.mark.parametrize(
    ("groups", "hits"),
    [
        ("full:784+mamba:784*3", [0, 0, 0]),  # a system prompt of 240 tokens is less than a block
        ("full:784+mamba:784*3+match=16", [0, 0, 0]),  # inside a block only the end of a complete prompt is kept
        ("full:16+window(64):16*3", [0, 0, 240]),  # the window is kept once a second prompt showed it shared
        ("full:16+window(64):16*3+retain=none", [0, 240, 240]),
        ("full:16+window(64):16*3+retain=none+eagle", [0, 224, 224]),
        ("full:240+window(64):16", [0, 240, 240]),
        ("full:32+window(64):48+retain=none", [0, 192, 192]),  # 240 is no multiple of 96
    ],
)
def test_a_system_prompt_of_240_tokens(groups: str, hits: list[int]) -> None:
    unit = parse_groups(groups).match_unit
    config = EngineConfig(num_gpu_blocks=400, block_size=unit, kv_groups=groups, async_scheduling=False)
    scheduler = HybridScheduler(config)

    def prompt(number: int) -> Request:
        keys = [
            position if (position + 1) * unit <= 240 else 1000 * number + position for position in range(300 // unit)
        ]
        return Request(f"r{number}", 300, 1, keys)

    assert [run(scheduler, prompt(number)) for number in (1, 2, 3)] == hits


def test_a_match_unit_finds_the_end_of_an_earlier_prompt() -> None:
    config = EngineConfig(
        num_gpu_blocks=40, block_size=16, kv_groups="full:784+mamba:784*3+match=16", async_scheduling=False
    )
    scheduler = HybridScheduler(config)
    turns = [Request(f"r{tokens}", tokens, 1, list(range(tokens // 16))) for tokens in (240, 300, 400)]
    assert [run(scheduler, turn) for turn in turns] == [0, 224, 288]
