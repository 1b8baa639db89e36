"""Recognition of a trace's format by its first line: a header's columns or a record's keys, never the file's name."""

from collections.abc import Collection
from typing import Any

from tracefile.importers import azure, burstgpt
from tracefile.importers.aiperfmooncake import TEXTS, AiperfMooncakeDecoder
from tracefile.importers.bailian import KEYS as BAILIAN_KEYS
from tracefile.importers.bailian import BailianDecoder
from tracefile.importers.csvrows import has_columns
from tracefile.importers.mooncake import MooncakeDecoder
from tracefile.importers.vcr import VcrDecoder
from tracefile.records.decoding import KvtapeDecoder, RecordDecoder, decode_meta, parse_object
from tracefile.records.errors import InputError
from tracefile.records.schema import SCHEMA, TraceFormat

CSV_FORMATS: Collection[TraceFormat] = ("burstgpt", "azure")
"""Formats without JSON: a last line without its end is not torn."""
MOONCAKE_KEYS = {"timestamp", "input_length", "output_length", "hash_ids"}


def recognise(line: bytes, where: str) -> tuple[TraceFormat, RecordDecoder, bool]:
    """A first line's format, its decoder, and whether the line is a record already; raises InputError."""
    if has_columns(line, burstgpt.COLUMNS):
        return "burstgpt", burstgpt.BurstGptDecoder(line), False
    if has_columns(line, azure.COLUMNS):
        return "azure", azure.AzureDecoder(line), False
    found = parse_object(line, where)
    meta = found.get("meta")
    if isinstance(meta, dict) and "schema" in meta:
        return "kvtape", KvtapeDecoder(decode_meta(meta, where)), False
    if isinstance(meta, dict):
        return "vllm-vcr", VcrDecoder(meta, where), False
    return *_recognise_record(found, where), True


def _recognise_record(found: dict[str, Any], where: str) -> tuple[TraceFormat, RecordDecoder]:
    if found.keys() >= set(BAILIAN_KEYS):
        return "bailian", BailianDecoder()
    if found.keys() >= MOONCAKE_KEYS and not found.keys() & {"session_id", "delay"}:
        return "mooncake", MooncakeDecoder()
    if "input_length" in found or found.keys() & set(TEXTS):
        return "aiperf-mooncake", AiperfMooncakeDecoder()
    if "prompt_tokens" in found and "request_id" not in found:
        return "vllm-vcr", VcrDecoder({}, where)
    raise InputError(
        f"{where}: neither a trace's header nor a record of a known format; "
        f'expected {{"meta": {{"schema": "{SCHEMA}", …}}}}, or a Mooncake, Bailian, BurstGPT, Azure or vllm-vcr trace'
    )
