"""The format of a trace, told by its first line: columns of a CSV header, or keys of a JSON object."""

from collections.abc import Callable, Collection, Sequence
from typing import Any

from tracefile.importers.blocktraces import BAILIAN_KEYS, BailianDecoder, MooncakeDecoder
from tracefile.importers.csvtraces import AZURE_COLUMNS, BURSTGPT_COLUMNS, AzureDecoder, BurstGptDecoder, has_columns
from tracefile.importers.dynamo import DynamoDecoder, is_dynamo
from tracefile.importers.trie import TRIE_KEYS, TrieDecoder
from tracefile.importers.weka import WekaDecoder, is_weka
from tracefile.records.decoding import KvtapeDecoder, LineDecoder, decode_meta, parse_object
from tracefile.records.errors import InputError
from tracefile.records.schema import SCHEMA, TraceFormat

MOONCAKE_KEYS = ("timestamp", "input_length", "output_length", "hash_ids")
NO_LONGER_READ = (
    ("a guidellm report", {"benchmarks"}),
    ("OpenTelemetry spans", {"resourceSpans"}),
    ("a trace of vllm-vcr", {"meta"}),
    ("a trace of vllm-vcr", {"prompt_tokens"}),
    ("a Mooncake line of AIPerf's", {"input_length", "session_id"}),
    ("a Mooncake line of AIPerf's", {"input_length", "delay"}),
    ("LiteLLM's spend logs", {"request_id", "startTime", "completion_tokens"}),
)

Found = dict[str, Any]


def recognise(line: bytes, where: str) -> tuple[TraceFormat, LineDecoder, bool]:
    """A first line's format, by columns or keys, its decoder, and whether it is a record already; raises InputError."""
    if not line.startswith(b"{"):
        for name, columns, of_header in TABLES:
            if has_columns(line, columns):
                return name, of_header(line), False
        raise InputError(f'{where}: {_beginning(line)}; expected a trace, which begins with {{"meta": …}}')
    found = parse_object(line, where)
    meta = found.get("meta")
    if isinstance(meta, dict) and "schema" in meta:
        return "kvtape", KvtapeDecoder(decode_meta(meta, where)), False
    return *_recognise_record(found, where), True


def _beginning(line: bytes) -> str:
    """Begin an error with the beginning of a line that is none of a trace."""
    text = line[:40].decode("utf-8", "replace")
    return f"begins with {text!r}{'…' if len(line) > 40 else ''}"


def _recognise_record(found: dict[str, Any], where: str) -> tuple[TraceFormat, LineDecoder]:
    for gone, keys in NO_LONGER_READ:
        if found.keys() >= keys:
            raise InputError(f"{where}: {gone}, no longer read; expected a trace that a tap recorded")
    for name, is_of_format, new_decoder in RECORDS:
        if is_of_format(found):
            return name, new_decoder(found)
    raise InputError(
        f"{where}: neither a trace's header nor a record of a known format; "
        f'expected {{"meta": {{"schema": "{SCHEMA}", …}}}}, or a format of `tracefile convert --help`'
    )


def _has(*keys: str) -> Callable[[Found], bool]:
    return lambda found: found.keys() >= set(keys)


TABLES: Sequence[tuple[TraceFormat, Collection[str], Callable[[bytes], LineDecoder]]] = (
    ("burstgpt", BURSTGPT_COLUMNS, BurstGptDecoder),
    ("azure", AZURE_COLUMNS, AzureDecoder),
)
"""Formats in CSV, by columns of the header."""
CSV_FORMATS: Collection[TraceFormat] = [name for name, _, _ in TABLES]
"""Formats without JSON: a last line without its end is not torn."""
RECORDS: Sequence[tuple[TraceFormat, Callable[[Found], bool], Callable[[Found], LineDecoder]]] = (
    ("dynamo", is_dynamo, lambda _: DynamoDecoder()),
    ("weka", is_weka, WekaDecoder),
    ("trie", _has(*TRIE_KEYS), lambda _: TrieDecoder()),
    ("bailian", _has(*BAILIAN_KEYS), lambda _: BailianDecoder()),
    ("mooncake", _has(*MOONCAKE_KEYS), lambda _: MooncakeDecoder()),
)
"""Formats without a header, in the order in which a first record is tried."""
