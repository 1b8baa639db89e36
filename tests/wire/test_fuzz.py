"""Hostile bytes through a whole tap in memory: nothing smuggled, nothing out of step, nothing that the reads decide.

What the upstream got is read by two parsers that are not ours: a slow, obvious one (``strictparser``) and h11. The
corpus holds inputs that mattered once, named by what they are.
"""

from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.wire.fuzzproperties import check_requests, check_response

CORPUS = Path(__file__).with_name("corpus")
EXAMPLES = 100


def corpus_files(kind: str) -> list[Path]:
    files = sorted(CORPUS.glob(f"{kind}-*.http"))
    assert files
    return files


def seeds(kind: str) -> list[bytes]:
    """What of the corpus is short enough to be mutated with effect."""
    actual = [path.read_bytes() for path in corpus_files(kind)]
    return [stream for stream in actual if len(stream) < 600]


@pytest.mark.parametrize("path", corpus_files("request"), ids=lambda path: path.stem)
def test_requests_of_the_corpus(path: Path) -> None:
    stream = path.read_bytes()
    outcome = check_requests(stream, every_cut(stream))
    becomes = "passed" if outcome.open else "last" if outcome.forwarded else "refused"
    assert path.stem.startswith(f"request-{becomes}-"), "its name says what becomes of it"


@pytest.mark.parametrize("path", corpus_files("response"), ids=lambda path: path.stem)
def test_responses_of_the_corpus(path: Path) -> None:
    stream = path.read_bytes()
    outcome = check_response(stream, every_cut(stream))
    assert outcome.complete == path.stem.startswith("response-whole-"), "its name says what becomes of it"


def every_cut(stream: bytes) -> list[list[int]]:
    """Some ways to cut a stream: into bytes where it is short, else at each of its line ends."""
    if len(stream) <= 400:
        return [list(range(1, len(stream)))]
    return [[at for at in range(1, len(stream)) if stream[at - 1 : at] in b"\r\n"][:400]]


FRAGMENTS = [
    *(b"\r\n", b"\n", b"\r", b"\x00", b" ", b"\t", b":", b";", b",", b"0\r\n\r\n", b"\r\n\r\n", b"5\r\nhello\r\n"),
    *(b"Content-Length: 5\r\n", b"Transfer-Encoding: chunked\r\n", b"Host: t\r\n", b"Connection: close\r\n"),
    *(b"Connection: content-length, transfer-encoding\r\n", b"Expect: 100-continue\r\n", b"X: y\r\n", b" folded\r\n"),
    *(b"GET / HTTP/1.1\r\nHost: t\r\n\r\n", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTTP/1.0"),
    *(b"Upgrade: h2c\r\nConnection: upgrade\r\n", b"1;a=b", b"hello", b"\xff", b"chunked", b"0", b"+", b"-", b"_"),
]


@st.composite
def mutated(draw: st.DrawFn, originals: list[bytes]) -> bytes:
    """One or two samples in sequence, with a few bytes or fragments inserted, removed or replaced."""
    stream = b"".join(draw(st.lists(st.sampled_from(originals), min_size=1, max_size=2)))
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(stream)))
        until = at + draw(st.integers(0, 8))
        put_in = draw(st.one_of(st.just(b""), st.sampled_from(FRAGMENTS), st.binary(max_size=3)))
        stream = stream[:at] + put_in + stream[until:]
    return stream


cuts = st.lists(st.lists(st.integers(1, 600), max_size=6), min_size=1, max_size=2)


@settings(max_examples=EXAMPLES)
@given(stream=mutated(seeds("request")), cuts=cuts)
def test_tap_and_upstream_parse_requests_alike(stream: bytes, cuts: list[list[int]]) -> None:
    check_requests(stream, cuts)


@settings(max_examples=EXAMPLES)
@given(stream=mutated(seeds("response")), cuts=cuts, head_only=st.booleans())
@example(stream=b"\r", cuts=[[1]], head_only=False)
@example(
    stream=b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\n",
    cuts=[[at] for at in range(40, 58)],
    head_only=False,
)
def test_response_is_complete_for_the_client_only_if_complete(
    stream: bytes, cuts: list[list[int]], head_only: bool
) -> None:
    check_response(stream, cuts, method=b"HEAD" if head_only else b"GET")
