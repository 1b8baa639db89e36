"""The format of a trace, told by the keys of its first line's JSON object."""

from collections.abc import Callable, Sequence
from typing import Any, Final

from tracefile.importers.blocktraces import BAILIAN_KEYS, MOONCAKE_KEYS, BailianDecoder, MooncakeDecoder
from tracefile.importers.trie import TRIE_KEYS, TrieDecoder
from tracefile.importers.weka import WEKA_KEYS, WekaDecoder
from tracefile.records.decoding import KvtapeDecoder, LineDecoder, decode_meta, parse_object
from tracefile.records.errors import InputError
from tracefile.records.schema import SCHEMA, TraceFormat

NO_LONGER_READ: Final = (
    ("a guidellm report", {"benchmarks"}),
    ("OpenTelemetry spans", {"resourceSpans"}),
    ("a Dynamo request trace", {"event_type"}),
    ("a trace of vllm-vcr", {"meta"}),
    ("a trace of vllm-vcr", {"prompt_tokens"}),
    ("a Mooncake line of AIPerf's", {"input_length", "session_id"}),
    ("a Mooncake line of AIPerf's", {"input_length", "delay"}),
)
FORMATS: Final[Sequence[tuple[TraceFormat, frozenset[str], Callable[[dict[str, Any]], LineDecoder]]]] = (
    ("weka", WEKA_KEYS, WekaDecoder),
    ("trie", TRIE_KEYS, lambda _: TrieDecoder()),
    ("bailian", BAILIAN_KEYS, lambda _: BailianDecoder()),
    ("mooncake", MOONCAKE_KEYS, lambda _: MooncakeDecoder()),
)
"""Formats without a header, by keys of a first record, in the order in which they are tried."""


def recognise(line: bytes, where: str) -> tuple[TraceFormat, LineDecoder, bool]:
    """Return a first line's format, its decoder, and whether it is a record already; raises InputError."""
    if not line.startswith(b"{"):
        text = line[:40].decode("utf-8", "replace")
        begins = f"begins with {text!r}{'…' if len(line) > 40 else ''}"
        raise InputError(f'{where}: {begins}; expected a trace, which begins with {{"meta": …}}')
    found = parse_object(line, where)
    meta = found.get("meta")
    if isinstance(meta, dict) and "schema" in meta:
        return "kvtape", KvtapeDecoder(decode_meta(meta, where)), False
    for gone, keys in NO_LONGER_READ:
        if found.keys() >= keys:
            raise InputError(f"{where}: {gone}, no longer read; expected a trace that a tap recorded")
    for name, known, new_decoder in FORMATS:
        if found.keys() >= known:
            return name, new_decoder(found), True
    raise InputError(
        f"{where}: neither a trace's header nor a record of a known format; "
        f'expected {{"meta": {{"schema": "{SCHEMA}", …}}}}, or a format of `tracefile convert --help`'
    )
