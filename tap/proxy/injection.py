"""Injection of usage and token ids into the bytes of a request.

The client's bytes stay unchanged; additions stand at the end of the object, so a position in an engine's error message
is one in the client's body. Additions are removed from the response (``tap/proxy/responsefilter.py``), so nothing is
added that cannot be removed.
"""

from engines.dialect import DialectName
from engines.recognition import DIALECTS
from tap.ipc.exchange import Endpoint, Injection
from tap.proxy.jsonspans import Edit, Member, Span, UnlocatableError, apply_edits, object_members, shorten

CHAT = "/v1/chat/completions"
INJECTABLE = frozenset({"/v1/completions", CHAT})
_PROMPT = {"/v1/completions": ("prompt", "prompt_embeds"), CHAT: ("messages",)}
_NOT_ASKED = (b"false", b"null")


def can_inject(dialect: DialectName, injection: Injection) -> bool:
    """Return whether an engine of this kind can be asked for it at all."""
    return injection in DIALECTS[dialect].injectable


def inject(
    body: bytes, endpoint: Endpoint, dialect: DialectName, wanted: frozenset[Injection]
) -> tuple[bytes, frozenset[Injection]]:
    """Return the body with the wanted additions, and those made: without those that the client asked for itself.

    A body that is no JSON object, or that the engine will refuse, is returned unchanged.
    """
    if endpoint not in INJECTABLE:
        return body, frozenset()
    short = shorten(body)
    text = short.text
    try:
        members = object_members(text)
        if not any(name in members for name in _PROMPT[endpoint]):
            return body, frozenset()  # the engine's error would quote the additions
        edits: dict[Injection, Edit] = {}
        if "usage" in wanted and (edit := _ask_for_usage(text, members, endpoint, dialect)):
            edits["usage"] = edit
        if "token-ids" in wanted and (edit := _ask_for_ids(text, members, endpoint, dialect)):
            edits["token-ids"] = edit
    except UnlocatableError:
        return body, frozenset()
    return apply_edits(body, short.original([*edits.values()])), frozenset(edits)


def _ask_for_usage(body: bytes, members: dict[str, Member], endpoint: Endpoint, dialect: DialectName) -> Edit | None:
    """Return the edit that asks for a stream's usage; a response that is no stream has it."""
    if not can_inject(dialect, "usage") or _value(body, members, "stream") != b"true":
        return None
    if dialect == "llamacpp" and endpoint != CHAT:
        return None  # its completion streams end in their usage unasked
    if "stream_options" not in members:
        return _append(body, b'"stream_options":{"include_usage":true}')
    options = members["stream_options"].value
    if options.of(body) == b"null":
        return Edit(*options, b'{"include_usage":true}')
    return _include_usage(body, options)


def _include_usage(body: bytes, options: Span) -> Edit | None:
    """Return the edit of the client's own stream options; null if they ask for usage, or for more."""
    inner = object_members(body, options)
    if _value(body, inner, "continuous_usage_stats") not in (b"", *_NOT_ASKED):
        return None  # alone it does nothing; with include_usage, every event would carry usage
    if "include_usage" in inner:
        return _switch_on(body, inner["include_usage"])
    start = options.start + 1
    return Edit(start, start, b'"include_usage":true,' if inner else b'"include_usage":true')


def _ask_for_ids(body: bytes, members: dict[str, Member], endpoint: Endpoint, dialect: DialectName) -> Edit | None:
    """Return the edit that asks for the token ids of prompt and output."""
    if not can_inject(dialect, "token-ids") or _value(body, members, "echo") not in (b"", *_NOT_ASKED):
        return None  # vLLM leaves the echoed prompt's text out where it returns ids
    streams = _value(body, members, "stream") not in (b"", *_NOT_ASKED)
    if endpoint == CHAT and streams:
        if dialect == "sglang":
            return None  # it refuses such requests
        if _value(body, members, "parallel_tool_calls") == b"false":
            return None  # vLLM then empties events of further calls, which look like events that exist for ids alone
    if "return_token_ids" in members:
        return _switch_on(body, members["return_token_ids"])
    return _append(body, b'"return_token_ids":true')


def _switch_on(body: bytes, member: Member) -> Edit | None:
    """Return the edit that makes a flag true; null if it is true, or no flag."""
    return Edit(*member.value, b"true") if member.value.of(body) in _NOT_ASKED else None


def _append(body: bytes, member: bytes) -> Edit:
    """Return the edit that appends a member to a non-empty object."""
    end = body.rindex(b"}")
    return Edit(end, end, b"," + member)


def _value(body: bytes, members: dict[str, Member], name: str) -> bytes:
    """Return a member's value as it is written; empty: no such member."""
    return members[name].value.of(body) if name in members else b""
