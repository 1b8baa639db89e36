"""Rows of a trace in columns as records."""

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from itertools import pairwise, repeat
from typing import Any

import msgspec
import pyarrow as pa

from tracefile.parquet.arrowschema import CHAIN_COLUMNS, allowed_words, field_types
from tracefile.parquet.chaincoding import ChainDecoder
from tracefile.parquet.layout import REST
from tracefile.records.decoding import convert_object
from tracefile.records.encoding import known_fields, merge_unknown
from tracefile.records.errors import InputError
from tracefile.records.schema import BlockHash, Record

Values = Sequence[Any]
Hashes = list[BlockHash] | None


def group_records(columns: dict[str, pa.Array], count: int, path: str, first_row: int) -> Iterator[Record | InputError]:
    """The ``count`` records of one row group; a column that is not there has nothing to say."""
    known = {
        name: values
        for name in field_types()
        if name in columns and (values := _field_values(columns[name])) is not None
    }
    if set(known.get("status", ())) == {"ok"}:
        del known["status"]  # the default
    faults = faults_of(known, count)
    rows = zip(*known.values(), strict=True)
    rest: Iterable[dict[str, Any] | None] = rest_of(columns, path, first_row) or repeat(None, count)
    chains = _chains(columns, count, path, first_row)
    own, new_record = known_fields(Record), _constructor(tuple(known))
    for number, (values, (prompt, output), other) in enumerate(zip(rows, chains, rest, strict=True), first_row + 1):
        if number - first_row - 1 in faults:
            yield InputError(f"{path}: row {number}: {faults[number - first_row - 1]}")
            continue
        record = new_record(values, prompt, output)
        if other is None:
            yield record
        elif own.isdisjoint(other):
            record.extra = other
            yield record
        else:
            yield _with_fields(record, other, f"{path}: row {number}")


@cache
def _constructor(names: tuple[str, ...]) -> Callable[[Values, Hashes, Hashes], Record]:
    """A record of these fields' values, in order, and its hashes: keywords cost a third of what a dict of them does."""
    given = ", ".join(f"{name}=values[{place}]" for place, name in enumerate(names))
    code = f"lambda values, prompt, output: Record({given}, block_hashes=prompt, output_block_hashes=output)"
    made: Callable[[Values, Hashes, Hashes], Record] = eval(code, {"Record": Record})
    return made


def _with_fields(record: Record, rest: dict[str, Any], where: str) -> Record | InputError:
    """The record with fields whose values their columns could not hold."""
    try:
        return convert_object(merge_unknown(record) | rest, Record, where)
    except InputError as error:
        return error


def rest_of(columns: dict[str, pa.Array], path: str, first_row: int) -> list[dict[str, Any] | None] | None:
    """Decode the fields without a column as one list; None if no row has any."""
    texts = _python_values(columns[REST]) if REST in columns else None
    if texts is None:
        return None
    try:
        whole = "[" + ",".join("null" if text is None else text for text in texts) + "]"
        found = msgspec.json.decode(whole, type=list[dict[str, Any] | None])
    except msgspec.DecodeError as error:
        raise InputError(f"{path}: after row {first_row}: {REST}: {error}; expected JSON objects") from None
    if len(found) != len(texts):
        raise InputError(f"{path}: after row {first_row}: {REST}: {len(found)} objects; expected {len(texts)}")
    return found


def faults_of(known: dict[str, Values], count: int) -> dict[int, str]:
    """Return the faults of rows, by place."""
    ids = known.get("request_id", [None] * count)
    faults = {place: "request_id: missing; expected in every record" for place, name in enumerate(ids) if name is None}
    for name, words in allowed_words().items():
        optional = name != "status"
        if name not in known or set(known[name]) <= words | ({None} if optional else set()):
            continue
        for place, word in enumerate(known[name]):
            if word not in words and not (word is None and optional):
                faults[place] = f"{name}: {word!r}; expected {', '.join(sorted(words))}"
    return faults


def _chains(columns: dict[str, pa.Array], count: int, path: str, first_row: int) -> Iterator[tuple[Hashes, Hashes]]:
    """Each row's two lists of hashes; raises InputError where a chain has no beginning."""
    numbers = {
        name: values
        for name, kind in CHAIN_COLUMNS.items()
        if name in columns and not pa.types.is_list(kind)
        if (values := _python_values(columns[name])) is not None
    }
    prompts, outputs, rows, lengths = (
        numbers.get(name, [None] * count) for name in ("prompt_blocks", "output_blocks", "prefix_row", "prefix_blocks")
    )
    new = _lists(columns["new_hashes"]) if "new_hashes" in columns else [[] for _ in range(count)]
    decoder = ChainDecoder()
    coded = enumerate(zip(prompts, outputs, rows, lengths, new, strict=True), first_row + 1)
    for number, (prompt, output, row, blocks, added) in coded:
        try:
            chain = decoder.decode(row or 0, blocks or 0, added)
        except InputError as error:
            raise InputError(f"{path}: row {number}: {error}") from None
        end = prompt or 0
        yield (
            None if prompt is None else chain[:end],  # type: ignore[misc]
            None if output is None else chain[end : end + output],
        )


def _field_values(column: pa.Array) -> Values | None:
    """A column as Python's values; None where every row has the field's default."""
    if column.null_count == len(column):
        return None
    if pa.types.is_map(column.type):
        return [None if items is None else dict(items) for items in column.to_pylist()]
    if pa.types.is_list(column.type) and pa.types.is_string(column.type.value_type):
        return list(column.to_pylist())
    if pa.types.is_list(column.type):
        return _lists(column) if len(column.values) else None
    return _python_values(column)


def _python_values(column: pa.Array) -> Values | None:
    """Return ``to_pylist`` by way of NumPy, several times faster; None if all are null."""
    if column.null_count == len(column):
        return None
    if pa.types.is_string(column.type):
        return texts_of(column)
    if column.null_count == 0:
        return list(column.to_numpy(zero_copy_only=False).tolist())
    found = column.fill_null(False if pa.types.is_boolean(column.type) else 0).to_numpy(zero_copy_only=False).tolist()
    valid = column.is_valid().to_numpy(zero_copy_only=False).tolist()
    return [value if known else None for value, known in zip(found, valid, strict=True)]


def texts_of(column: pa.Array) -> Values:
    """A column of text as Python's strings."""
    coded = column.dictionary_encode()
    if 4 * len(coded.dictionary) > len(column):
        return list(column.to_pylist())
    # Interned, so that a word that is a field's default is that object, which is how defaults are told on writing.
    words = [sys.intern(word) for word in coded.dictionary.to_pylist()]
    places = _python_values(coded.indices) or ()
    return [None if place is None else words[place] for place in places]


def _lists(column: pa.Array) -> list[list[Any]]:
    """A column of lists of numbers; a null is an empty one."""
    flat = column.values.to_numpy(zero_copy_only=False).tolist()
    return [flat[start:end] for start, end in pairwise(column.offsets.to_numpy().tolist())]
