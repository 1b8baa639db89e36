"""Control calls to an engine before and after a run: model, facts, prefix cache reset."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from engines.access import OPEN, Access
from engines.calls import BlockingCalls, CallError, Calls, max_page_bytes
from engines.detection import DIALECTS
from engines.dialect import Control, Dialect, Response
from engines.facts import PAGES, EngineFacts, add_settings, first_model, read_facts, settings_pages
from tracefile.records.errors import InputError
from wire.answer import parse_answer
from wire.head import OK
from wire.url import Origin

CONTROL_TIMEOUT_S = 30.0
PAGE_TIMEOUT_S = 2.0
"""Timeout of a page while traffic is recorded."""


class ControlClient:
    """Control calls to one engine; a context manager, and an ``engines.dialect.Control``."""

    def __init__(self, url: str, access: Access = OPEN, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        self.url, self.access = url.rstrip("/"), access
        self.date = ""
        """``Date`` header of the last GET; empty: no header, or the call failed."""
        self._calls = BlockingCalls(self.url, timeout_s, access)

    def __enter__(self) -> "ControlClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.close()

    def resolve_model(self, model: str) -> str:
        """Return ``model``, or for ``auto`` the first model of ``/v1/models``; raises InputError without a model."""
        try:
            response = self._get("/v1/models")
        except CallError as error:
            raise InputError(f"--url: {self.url}: {error}") from None
        if model != "auto":
            return model
        if not response.is_success:
            failure = response.failure("an engine's base URL, or --model NAME")
            raise InputError(f"--url: {self.url}/v1/models: {failure}")
        listed = first_model(response.text)
        if listed is None:
            raise InputError(f"--model: {self.url}/v1/models names none; expected --model NAME (mlx_lm: default_model)")
        return listed

    def facts(self) -> EngineFacts:
        facts = _facts_of([self._page(path) for path in PAGES])
        return add_settings(facts, next(filter(None, map(self.text, settings_pages(facts))), ""))

    def text(self, path: str) -> str:
        return self._page(path).text

    def _page(self, path: str) -> "Page":
        try:
            return _page_of(path, self._get(path))
        except CallError as error:
            return Page("", f"{path}: {error}")

    def status(self, path: str) -> int | None:
        try:
            return self._get(path).status
        except CallError:
            return None

    def _get(self, path: str) -> Response:
        self.date = ""
        response = self._calls.get(path)
        self.date = response.date
        return response

    def post(self, path: str, body: bytes = b"") -> Response:
        try:
            return self._calls.post(path, body)
        except CallError as error:
            raise InputError(f"--url: {self.url}{path}: {error}") from None


async def learn_engine_facts(origin: Origin, access: Access = OPEN) -> EngineFacts:
    """Return the facts of an engine (block size, KV cache, load) from its pages, read concurrently."""
    facts = replace(_facts_of(await read_pages(origin, PAGES, access)), origin=origin)
    settings = await read_pages(origin, settings_pages(facts), access) if settings_pages(facts) else []
    return add_settings(facts, next((page.text for page in settings if page.text), ""))


def _facts_of(pages: "Sequence[Page]") -> EngineFacts:
    version, metrics, models = (page.text for page in pages)
    problem = next((page.problem for page in pages if page.problem is not None), None)
    return replace(read_facts(version, metrics, models), problem=problem)


class Page(NamedTuple):
    """Text of a page; empty unless complete, in time and with status 200."""

    text: str
    problem: str | None = None
    """Reason for a page that could not be read, for the user; None: read, or absent."""


async def read_pages(origin: Origin, paths: Sequence[str], access: Access = OPEN) -> list[Page]:
    """Return the pages in order, read concurrently."""
    calls = Calls(origin, access)
    try:
        return await asyncio.gather(*(_page(calls, path) for path in paths))
    finally:
        calls.close()


async def _page(calls: Calls, path: str) -> Page:
    try:
        return _page_of(path, await calls.call(path, timeout_s=PAGE_TIMEOUT_S, max_bytes=max_page_bytes(path)))
    except CallError as error:
        return Page("", f"{path}: {error}")


def _page_of(path: str, response: Response) -> Page:
    if response.refusal:
        return Page("", f"{path}: {response.refusal}")
    return Page(response.text if response.status == OK else "")


def reset_prefix_cache(control: Control, dialect: Dialect, probe: bytes) -> str | None:
    """Reset the prefix cache and check that it is empty; return a note if the check is not possible.

    ``probe`` is the body of a request with a new prompt of two blocks. The probe is sent before and after the reset:
    the second response must report no cached tokens. A final reset evicts the probe itself. If a further cache tier
    holds evicted prompts, the probe is moved to this tier before the reset.
    Raises InputError if the engine has no reset or the reset does not work.
    """
    reset = dialect.reset_cache
    if reset is None:
        supported = ", ".join(name for name, candidate in DIALECTS.items() if candidate.reset_cache is not None)
        raise InputError(f"--reset-cache: not supported with --dialect {dialect.name}; expected {supported}")
    if dialect.has_reset(control) is False:
        reset(control)  # raises with its reason, before the probe's blocks are cached permanently
    probed_cached_tokens(control, dialect, probe, "--reset-cache")
    if dialect.displace is not None:
        dialect.displace(control)
    reset(control)
    cached_tokens = probed_cached_tokens(control, dialect, probe, "--reset-cache")
    reset(control)
    if cached_tokens is None:
        return "--reset-cache: sent, but not verified: the engine reports no cached tokens"
    if cached_tokens > 0:
        raise InputError(
            f"--reset-cache: {cached_tokens} tokens still cached after {dialect.name}'s reset; expected none"
            + dialect.reset_hint
        )
    return None


def probed_cached_tokens(control: Control, dialect: Dialect, probe: bytes, flag: str) -> int | None:
    """Return the cached tokens of one small request; None: not reported. Raises InputError that names ``flag``."""
    response = control.post(dialect.path, probe)
    if not response.is_success:
        raise InputError(f"{flag}: the probe request gave {response.failure('200')}")
    return parse_answer(dialect.path, [(0, response.content)], stream=False).cached_tokens
