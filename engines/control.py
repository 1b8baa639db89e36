"""Control calls to an engine, before and after a run, the prefix cache's reset included."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from engines.access import OPEN, Access
from engines.calls import BlockingCalls, CallError, Calls, most_bytes
from engines.detection import DIALECTS
from engines.dialect import Control, Dialect, Response
from engines.facts import PAGES, EngineFacts, add_settings, first_model, read_facts, settings_pages
from tracefile.records.errors import InputError
from wire.answer import parse_answer
from wire.head import OK
from wire.url import Origin

CONTROL_TIMEOUT_S = 30.0
PAGE_TIMEOUT_S = 2.0
"""Time that one page may take while traffic is recorded."""


class ControlClient:
    """Control calls to one target; a context manager. An ``engines.dialect.Control``."""

    def __init__(self, url: str, access: Access = OPEN, *, timeout_s: float = CONTROL_TIMEOUT_S) -> None:
        self.url, self.access = url.rstrip("/"), access
        self.date = ""
        """``Date`` header of the last GET; empty: none was sent, or the call failed."""
        self._calls = BlockingCalls(self.url, timeout_s, access)

    def __enter__(self) -> "ControlClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._calls.close()

    def resolve_model(self, model: str) -> str:
        """Return ``model``, or for ``auto`` the first of ``/v1/models``; raises InputError if none is there."""
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
    """Return the facts of one engine, its pages read at the same time; a page that is late tells nothing."""
    facts = replace(_facts_of(await read_pages(origin, PAGES, access)), origin=origin)
    settings = await read_pages(origin, settings_pages(facts), access) if settings_pages(facts) else []
    return add_settings(facts, next((page.text for page in settings if page.text), ""))


def _facts_of(pages: "Sequence[Page]") -> EngineFacts:
    version, metrics, models = (page.text for page in pages)
    problem = next((page.problem for page in pages if page.problem is not None), None)
    return replace(read_facts(version, metrics, models), problem=problem)


class Page(NamedTuple):
    """Text of a page; empty if it did not come in time, in full and with status 200."""

    text: str
    problem: str | None = None
    """Reason why it did not come, for the user; null: it came, or is not there."""


async def read_pages(origin: Origin, paths: Sequence[str], access: Access = OPEN) -> list[Page]:
    """Return each page, all read at the same time."""
    calls = Calls(origin, access)
    try:
        return await asyncio.gather(*(_page(calls, path) for path in paths))
    finally:
        calls.close()


async def _page(calls: Calls, path: str) -> Page:
    try:
        return _page_of(path, await calls.call(path, timeout_s=PAGE_TIMEOUT_S, max_bytes=most_bytes(path)))
    except CallError as error:
        return Page("", f"{path}: {error}")


def _page_of(path: str, response: Response) -> Page:
    if response.refusal:
        return Page("", f"{path}: {response.refusal}")
    return Page(response.text if response.status == OK else "")


def reset_prefix_cache(control: Control, dialect: Dialect, probe: bytes) -> str | None:
    """Reset, and check that the cache is empty; return a note if that could not be checked.

    ``probe`` is the body of a request for a prompt of two blocks, new in every call. It is sent before and after the
    reset: the second time none of it may be cached. A last reset takes the probe itself out of the cache. Where a
    further tier keeps what is displaced, the probe is displaced first.
    Raises InputError if the engine has no reset or the reset does not work.
    """
    reset = dialect.reset_cache
    if reset is None:
        able = ", ".join(name for name, other in DIALECTS.items() if other.reset_cache is not None)
        raise InputError(f"--reset-cache: not known how with --dialect {dialect.name}; expected {able}")
    if dialect.has_reset(control) is False:
        reset(control)  # raises with its reason, before the probe's blocks are in the cache for good
    probed_cached_tokens(control, dialect, probe, "--reset-cache")
    if dialect.displace is not None:
        dialect.displace(control)
    reset(control)
    cached_tokens = probed_cached_tokens(control, dialect, probe, "--reset-cache")
    reset(control)
    if cached_tokens is None:
        return "--reset-cache: done, but the engine reports no cached tokens, so whether it worked is not known"
    if cached_tokens > 0:
        raise InputError(
            f"--reset-cache: {cached_tokens} tokens still cached after {dialect.name}'s reset; expected none"
            + dialect.reset_hint
        )
    return None


def probed_cached_tokens(control: Control, dialect: Dialect, probe: bytes, flag: str) -> int | None:
    """Return the cached tokens of one small request; null: not reported. Raises InputError that names ``flag``."""
    response = control.post(dialect.path, probe)
    if not response.is_success:
        raise InputError(f"{flag}: the check's own request gave {response.failure('200')}")
    return parse_answer(dialect.path, [(0, response.content)], stream=False).cached_tokens
