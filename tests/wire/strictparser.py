"""A parser of requests that is slow and obvious: what a careful server makes of bytes, to compare others with."""

import re
from dataclasses import dataclass
from typing import Literal

TOKEN = rb"[!#$%&'*+\-.^_`|~0-9A-Za-z]+"
REQUEST_LINE = re.compile(rb"(" + TOKEN + rb") ([!-~\x80-\xff]+) HTTP/1\.([01])")
FIELD_LINE = re.compile(rb"(" + TOKEN + rb"):[ \t]*([\t\x20-\x7e\x80-\xff]*)")
SIZE_LINE = re.compile(rb"([0-9A-Fa-f]+)(?:;[\t\x20-\x7e\x80-\xff]*)?")


class Malformed(Exception):  # noqa: N818  a finding of this parser, not an error in it
    """Bytes that are no request, or that could be two."""


class Incomplete(Exception):  # noqa: N818
    """The bytes end within a request."""


@dataclass(frozen=True)
class Request:
    """Fields of a request."""

    method: bytes
    target: bytes
    fields: tuple[tuple[bytes, bytes], ...]
    body: bytes
    raw_body: bytes

    @property
    def essence(self) -> tuple[bytes, bytes, bytes]:
        """Fields that must be equal for all parsers of the request."""
        return self.method, self.target, self.body


@dataclass(frozen=True)
class Reading:
    """Reading of a client's bytes by a server."""

    requests: list[Request]
    """Return the complete requests, in order."""
    end: Literal["whole", "incomplete", "malformed"]
    """Where they stop: at the end of the bytes, within a request, or before what is none."""


def parse_requests(data: bytes, *, skip_empty_lines: bool) -> Reading:
    """Read requests from the beginning of ``data``, as far as it goes."""
    actual: list[Request] = []
    while data:
        if skip_empty_lines:
            data = data.lstrip(b"\r\n")
        try:
            request, data = parse_request(data)
        except Malformed:
            return Reading(actual, "malformed")
        except Incomplete:
            return Reading(actual, "incomplete")
        actual.append(request)
    return Reading(actual, "whole")


def parse_request(data: bytes) -> tuple[Request, bytes]:
    """The first request and what stands behind it. Raises Malformed, Incomplete."""
    head, end, remainder = data.partition(b"\r\n\r\n")
    if not end:
        raise Incomplete
    first, *lines = head.split(b"\r\n")
    start = REQUEST_LINE.fullmatch(first)
    if start is None:
        raise Malformed("request line")
    fields = tuple(parse_field(line) for line in lines)
    codings = [value.strip().lower() for name, value in fields if name.lower() == b"transfer-encoding"]
    lengths = [value.strip() for name, value in fields if name.lower() == b"content-length"]
    if codings and (lengths or codings != [b"chunked"] or start[3] == b"0"):
        raise Malformed("transfer coding")
    if codings:
        body, raw_body, remainder = parse_chunks(remainder)
    else:
        body, remainder = parse_length(lengths, remainder)
        raw_body = body
    return Request(start[1], start[2], fields, body, raw_body), remainder


def parse_field(line: bytes) -> tuple[bytes, bytes]:
    """Name and value of a header or trailer line. Raises Malformed."""
    actual = FIELD_LINE.fullmatch(line)
    if actual is None:
        raise Malformed("field line")
    return actual[1], actual[2]


def parse_length(lengths: list[bytes], remainder: bytes) -> tuple[bytes, bytes]:
    """A body of a given length and what stands behind it. Raises Malformed, Incomplete."""
    if not lengths:
        return b"", remainder
    if len(lengths) > 1 or re.fullmatch(rb"[0-9]+", lengths[0]) is None:
        raise Malformed("content length")
    length = int(lengths[0])
    if len(remainder) < length:
        raise Incomplete
    return remainder[:length], remainder[length:]


def parse_chunks(data: bytes) -> tuple[bytes, bytes, bytes]:
    """A chunked body without and with its framing, and what stands behind it. Raises Malformed, Incomplete."""
    body, remainder = b"", data
    while True:
        line, end, remainder = remainder.partition(b"\r\n")
        if not end:
            raise Incomplete
        actual = SIZE_LINE.fullmatch(line)
        if actual is None:
            raise Malformed("chunk size")
        size = int(actual[1], 16)
        if size == 0:
            break
        if len(remainder) < size + 2:
            raise Incomplete
        if remainder[size : size + 2] != b"\r\n":
            raise Malformed("chunk end")
        body, remainder = body + remainder[:size], remainder[size + 2 :]
    while True:
        line, end, remainder = remainder.partition(b"\r\n")
        if not end:
            raise Incomplete
        if not line:
            return body, data[: len(data) - len(remainder)], remainder
        parse_field(line)
