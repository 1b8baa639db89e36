"""What is asked of an engine beside what the client asked: usage and token ids, put into the request's own bytes.

Everything the client wrote stays where it was, byte for byte; the additions stand at the end of the object, so that an
engine that complains of a position in the body complains of the client's. What is added is taken out of the response
again (``tap/proxy/responsefilter.py``), so nothing is added whose traces cannot be taken out.
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
    """The body with what is wanted asked for, and what of it was added: not what the client asked for itself.

    A body that is no JSON object, or none that the engine will answer, comes back as it is.
    """
    if endpoint not in INJECTABLE:
        return body, frozenset()
    short = shorten(body)
    text = short.text
    try:
        members = object_members(text)
        if not any(name in members for name in _PROMPT[endpoint]):
            return body, frozenset()  # the engine's complaint would quote what it was sent
        edits: dict[Injection, Edit] = {}
        if "usage" in wanted and (edit := _ask_for_usage(text, members, endpoint, dialect)):
            edits["usage"] = edit
        if "token-ids" in wanted and (edit := _ask_for_ids(text, members, endpoint, dialect)):
            edits["token-ids"] = edit
    except UnlocatableError:
        return body, frozenset()
    return apply_edits(body, short.original([*edits.values()])), frozenset(edits)


def _ask_for_usage(body: bytes, members: dict[str, Member], endpoint: Endpoint, dialect: DialectName) -> Edit | None:
    """The edit that asks a stream for its usage: a whole answer has it, and an engine refuses to be asked for it."""
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
    """The edit within the client's own stream options; null if they ask for usage, or for more of it than that."""
    inner = object_members(body, options)
    if _value(body, inner, "continuous_usage_stats") not in (b"", *_NOT_ASKED):
        return None  # alone it does nothing; with include_usage, every event would carry usage
    if "include_usage" in inner:
        return _switch_on(body, inner["include_usage"])
    start = options.start + 1
    return Edit(start, start, b'"include_usage":true,' if inner else b'"include_usage":true')


def _ask_for_ids(body: bytes, members: dict[str, Member], endpoint: Endpoint, dialect: DialectName) -> Edit | None:
    """The edit that asks for the prompt's and the answer's token ids."""
    if not can_inject(dialect, "token-ids") or _value(body, members, "echo") not in (b"", *_NOT_ASKED):
        return None  # vLLM leaves the echoed prompt's text out where it returns ids
    streams = _value(body, members, "stream") not in (b"", *_NOT_ASKED)
    if endpoint == CHAT and streams:
        if dialect == "sglang":
            return None  # it refuses such requests
        if _value(body, members, "parallel_tool_calls") == b"false":
            return None  # what vLLM then empties of further calls looks like what it sends for our ids' sake alone
    if "return_token_ids" in members:
        return _switch_on(body, members["return_token_ids"])
    return _append(body, b'"return_token_ids":true')


def _switch_on(body: bytes, member: Member) -> Edit | None:
    """The edit that makes a flag true; null if the client did that, or wrote something that is no flag."""
    return Edit(*member.value, b"true") if member.value.of(body) in _NOT_ASKED else None


def _append(body: bytes, member: bytes) -> Edit:
    """The edit that puts a member behind the others of an object that has some."""
    end = body.rindex(b"}")
    return Edit(end, end, b"," + member)


def _value(body: bytes, members: dict[str, Member], name: str) -> bytes:
    """A member's value as it is written; empty: there is no such member."""
    return members[name].value.of(body) if name in members else b""
