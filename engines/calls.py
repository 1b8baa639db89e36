"""HTTP calls to an engine off the data plane, each bounded in bytes and in its whole time.

An engine may respond without end, or a byte a second. A limit on each read bounds neither, so the time is one deadline
from connecting to the last byte, and a body is read no further than its limit.
"""

import asyncio

import httpx

from engines.dialect import Response

MAX_BYTES = 1 << 20
MAX_METRICS_BYTES = 4 << 20
"""Bound for ``/metrics``: of vLLM some 100 KB an engine."""
MAX_IDS_BYTES = 16 << 20
"""Bound for token ids: two million, with their commas."""
READ_BYTES = 1 << 16


class CallError(Exception):
    """The call has no response that can be used; the text is the kind of failure, without content."""


class LateError(CallError):
    """The response was not whole in time."""


def most_bytes(path: str) -> int:
    """Return the most bytes to read of a page."""
    return MAX_METRICS_BYTES if path == "/metrics" else MAX_BYTES


async def call(
    client: httpx.AsyncClient, path: str, *, body: bytes | None = None, timeout_s: float, max_bytes: int
) -> Response:
    """Return the response to a GET, or with ``body`` to a POST of JSON; raises CallError."""
    # A compressed body could be large again: identity is asked for, and another coding refused.
    headers = {"Accept-Encoding": "identity"} | ({} if body is None else {"Content-Type": "application/json"})
    method = "GET" if body is None else "POST"
    try:
        async with (
            asyncio.timeout(timeout_s),
            client.stream(method, path, content=body, headers=headers) as response,
        ):
            if response.headers.get("content-encoding", "identity") != "identity":
                raise CallError("encoded response")
            return Response(response.status_code, await _bounded(response, max_bytes))
    except (TimeoutError, httpx.TimeoutException):
        raise LateError(f"no whole response within {timeout_s:g} s") from None
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        raise CallError(type(error).__name__) from None


async def _bounded(response: httpx.Response, max_bytes: int) -> bytes:
    body = bytearray()
    async for piece in response.aiter_raw():
        body += piece
        if len(body) > max_bytes:
            raise CallError(f"response beyond {max_bytes} bytes")
    return bytes(body)


class BlockingCalls:
    """Calls to one engine from a process without an event loop, over kept connections; a context manager."""

    def __init__(self, url: str, timeout_s: float) -> None:
        verify = not url.startswith("http://")  # for plain http, httpx would still load every authority
        self._client = httpx.AsyncClient(base_url=url, timeout=timeout_s, trust_env=False, verify=verify)
        self._timeout_s = timeout_s
        self._runner = asyncio.Runner()

    def __enter__(self) -> "BlockingCalls":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def get(self, path: str) -> Response:
        """Return the response to a GET; raises CallError."""
        return self._run(path, None, most_bytes(path))

    def post(self, path: str, body: bytes) -> Response:
        """Return the response to a POST of JSON; raises CallError."""
        return self._run(path, body, MAX_IDS_BYTES)

    def close(self) -> None:
        with self._runner:
            self._runner.run(self._client.aclose())

    def _run(self, path: str, body: bytes | None, max_bytes: int) -> Response:
        return self._runner.run(call(self._client, path, body=body, timeout_s=self._timeout_s, max_bytes=max_bytes))
