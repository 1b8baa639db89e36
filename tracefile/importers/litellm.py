"""LiteLLM's spend logs with prefix block ids, JSON Lines: a row a request of the proxy.

Source: LiteLLM's ``prefix_block_hashes`` callback (1.111): chained HMAC-SHA256 digests cut to 16 hex digits, one for
every started block, in the row's ``metadata``. The ids are looked for by that name at any depth there, as a list or in
an object that also says its block size. Messages and responses, where they were stored, are dropped on sight.
"""

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from tracefile.importers.blocktraces import PARTIAL_BLOCK
from tracefile.importers.wallclock import checked_ns, elapsed, iso_unix_ns, midnight_ns
from tracefile.records.decoding import convert_object, convert_row, parse_object
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, Count, HashInfo, Meta, Ordinal, Record, RequestId, SessionId

IDS = "prefix_block_hashes"
ID_LISTS = ("hashes", "block_hashes", "hash_ids", "ids")
"""Names of the list in an object of ids."""


class LitellmRow(msgspec.Struct, kw_only=True):
    """Row of the spend logs; other columns are left alone."""

    request_id: str
    startTime: str | float  # noqa: N815 - the column's name
    endTime: str | float | None = None  # noqa: N815
    completionStartTime: str | float | None = None  # noqa: N815
    prompt_tokens: Count | None = None
    completion_tokens: Count | None = None
    model: str | None = None
    status: str | None = None
    session_id: str | None = None
    metadata: dict[str, Any] | str | None = None
    extra: dict[str, Any] = {}


class LitellmIds(msgspec.Struct, frozen=True):
    """Block ids of a prompt, and tokens in a block if the row says so."""

    ids: list[Annotated[str, msgspec.Meta(pattern="^[0-9a-fA-F]{1,16}$")]]
    block_size: Ordinal | None


def is_litellm(found: dict[str, Any]) -> bool:
    """Return whether a line is a row of the spend logs."""
    return {"request_id", "startTime", "completion_tokens"} <= found.keys()


class LitellmDecoder:
    """Rows as records; t = 0 is the midnight before the first row's start."""

    def __init__(self) -> None:
        self.meta = Meta()
        self._zero_ms: float | None = None
        self._without_size = 0

    @property
    def warnings(self) -> Sequence[str]:
        if not self._without_size:
            return ()
        return [f"{self._without_size} rows have block ids of no stated size: left without hashes"]

    def decode_all(self, line: bytes, where: str) -> list[Record]:
        row = convert_object(parse_object(line, where), LitellmRow, where)
        found = _ids(_object(row.metadata, f"{where}: metadata"), f"{where}: metadata")
        start_ms = _unix_ms(row.startTime, f"{where}: startTime")
        if self._zero_ms is None:
            self._begin(start_ms, found)
        assert self._zero_ms is not None
        end_ms = None if row.endTime is None else _unix_ms(row.endTime, f"{where}: endTime")
        began = row.completionStartTime
        first_ms = None if began is None else _unix_ms(began, f"{where}: completionStartTime")
        hashes, extra = self._hashes(found, row.prompt_tokens, where)
        record = Record(
            request_id=RequestId(row.request_id),
            session_id=None if not row.session_id else SessionId(row.session_id),
            session_source=None if not row.session_id else "explicit",
            arrival_ms=start_ms - self._zero_ms,
            ttft_ms=None if first_ms == end_ms else elapsed(start_ms, first_ms),
            e2e_ms=elapsed(start_ms, end_ms),
            status="error" if row.status == "failure" else "ok",
            model=row.model or None,
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.completion_tokens,
            tokens_source="usage",
            block_hashes=hashes,
            hash_source=None if hashes is None else "tokenizer",
            extra=extra,
        )
        return [record]

    def _begin(self, first_ms: float, found: LitellmIds | None) -> None:
        zero_ns = midnight_ns(round(first_ms * 1e6))
        self._zero_ms = zero_ns / 1e6
        size = None if found is None else found.block_size
        known = None if size is None else HashInfo(algorithm="litellm")
        self.meta = Meta(block_size=size, hash=known, epoch_unix_ns=zero_ns)

    def _hashes(
        self, found: LitellmIds | None, tokens: int | None, where: str
    ) -> tuple[list[BlockHash] | None, dict[str, Any]]:
        """Hashes of full blocks, and the id of a partial last block to keep."""
        if found is None:
            return None, {}
        size = found.block_size or self.meta.block_size
        if size is None or tokens is None:
            self._without_size += 1
            return None, {}
        if size != self.meta.block_size:
            raise InputError(f"{where}: block_size: {size}; expected {self.meta.block_size}, as in the first row")
        ids = [BlockHash(int(text, 16)) for text in found.ids]
        full = min(len(ids), tokens // size)
        return ids[:full], ({PARTIAL_BLOCK: ids[full]} if len(ids) > full else {})


def _ids(found: Any, where: str) -> LitellmIds | None:
    """Block ids at any depth of an object; raises InputError if they are none."""
    if not isinstance(found, dict):
        return None
    here = found.get(IDS)
    if isinstance(here, list):
        return _checked_ids(here, found.get("block_size"), where)
    if isinstance(here, dict):
        for name in ID_LISTS:
            if isinstance(here.get(name), list):
                return _checked_ids(here[name], here.get("block_size"), where)
    return next((ids for value in found.values() if (ids := _ids(value, where)) is not None), None)


def _checked_ids(ids: list[Any], block_size: Any, where: str) -> LitellmIds:
    found = {"ids": ids, "block_size": block_size}
    return convert_row(found, LitellmIds, f"{where}: {IDS}", "up to 16 hex digits an id, and a block_size of 1 or more")


def _object(metadata: dict[str, Any] | str | None, where: str) -> dict[str, Any]:
    """Metadata as an object; exports of the database have it as text."""
    if isinstance(metadata, str):
        return parse_object(metadata.encode("utf-8", "replace"), where)
    return metadata or {}


def _unix_ms(at: str | float, where: str) -> float:
    """Milliseconds since 1970, of a number of seconds or of ISO 8601."""
    unix_ns = iso_unix_ns(at, where) if isinstance(at, str) else checked_ns(at * 1e9, where)
    return unix_ns / 1e6
