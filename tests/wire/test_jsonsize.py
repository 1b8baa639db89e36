"""Memory of decoded JSON: bombs are refused before they are decoded, large texts and prompts of ids are not."""

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from wire import jsonsize
from wire.answer import parse_answer
from wire.jsonsize import LARGE_BYTES, MAX_DECODED_BYTES, fits_in_memory


@pytest.mark.parametrize(
    ("head", "piece", "times", "tail", "fits"),
    [
        (b'{"messages":[', b"{},", 2_000_000, b"{}]}", False),
        (b"[", b"[],", 2_000_000, b"[]]", False),
        (b"{", b'"a":0,', 1_000_000, b'"a":0}', False),
        (b'["', b'","', 1_500_000, b'"]', False),
        (b'{"prompt":[', b"12345,", 1_000_000, b"1]}", True),
        (b'{"prompt":"', b"{[,:", 3_000_000, b'"}', True),
        (b'{"prompt":"', b'\\\\\\"{},', 2_000_000, b'"}', True),
        (b'{"a":"\\\\","b":[', b'{"c":"\\"{},"},', 600_000, b"0]}", False),
        (b"", b"{},", LARGE_BYTES // 3, b"", True),
    ],
)
def test_structure_is_counted_and_text_is_not(head: bytes, piece: bytes, times: int, tail: bytes, fits: bool) -> None:
    assert fits_in_memory(head + piece * times + tail) is fits


def weight(value: Any) -> int:
    """Count what the rule counts, in the decoded value."""
    if isinstance(value, dict):
        commas = max(0, len(value) - 1)
        return 64 + 150 * len(value) + 48 * commas + sum(map(weight, value.values()))
    if isinstance(value, list):
        return 64 + 48 * max(0, len(value) - 1) + sum(map(weight, value))
    return 0


JSON = st.recursive(
    st.none() | st.integers() | st.text('"\\{},:[]x', max_size=9),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\{}x', max_size=3), inner, max_size=4),
)


@given(value=JSON, window=st.integers(1, 9))
def test_window_counts_equal_the_decoded_value(value: Any, window: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonsize, "LARGE_BYTES", -1)
        patch.setattr(jsonsize, "_WINDOW_BYTES", window)
        patch.setattr(jsonsize, "MAX_DECODED_BYTES", weight(value))
        assert fits_in_memory(msgspec.json.encode(value))
        patch.setattr(jsonsize, "MAX_DECODED_BYTES", weight(value) - 1)
        assert not fits_in_memory(msgspec.json.encode(value))


def test_huge_event_is_skipped() -> None:
    bomb = b'data: {"choices":[' + b"{}," * 1_000_000 + b"{}]}\n\n"
    assert MAX_DECODED_BYTES < 112 * 1_000_000
    answer = parse_answer("/v1/completions", [(1, bomb), (2, b'data: {"usage":{"prompt_tokens":3}}\n\n')], stream=True)
    assert (answer.error_kind, answer.prompt_tokens, answer.first_token_ns) == ("unparseable", 3, None)
