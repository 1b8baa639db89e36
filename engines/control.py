"""What the target says of itself, asked before and after a run over plain HTTP; never on the data plane."""

from dataclasses import dataclass

import httpx

from engines.facts import PrefixCounters, describe_engine, first_model, parse_metrics, prefix_counters
from tracefile import Engine, InputError

CONTROL_TIMEOUT_S = 30.0


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """What could be learnt; null: the engine did not say."""

    engine: Engine
    counters: PrefixCounters | None


class ControlClient:
    """Control calls to one target; a context manager."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        self._client = httpx.Client(timeout=CONTROL_TIMEOUT_S, trust_env=False)

    def __enter__(self) -> "ControlClient":
        return self

    def __exit__(self, *_: object) -> None:
        self._client.close()

    def resolve_model(self, model: str) -> str:
        """The model to name in requests: as given, or the first that ``/v1/models`` lists for ``auto``.

        Raises InputError if the target cannot be reached, or lists none.
        """
        try:
            response = self._client.get(f"{self.url}/v1/models")
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise InputError(f"--url: {self.url}: {type(error).__name__}; expected an engine that answers") from None
        if model != "auto":
            return model
        listed = first_model(response.text) if response.is_success else None
        if listed is None:
            raise InputError(
                f"--model: {self.url}/v1/models (HTTP {response.status_code}) names none; expected --model NAME"
            )
        return listed

    def facts(self) -> EngineFacts:
        """Version, cache configuration and prefix counters, as far as the target tells them."""
        metrics = parse_metrics(self.text("/metrics"))
        engine = describe_engine(self.text("/version"), metrics, self.text("/v1/models"))
        return EngineFacts(engine, prefix_counters(metrics))

    def text(self, path: str) -> str:
        """What a GET of ``path`` answers; empty if it does not."""
        try:
            return self._client.get(f"{self.url}{path}").raise_for_status().text
        except httpx.HTTPError:
            return ""

    def post(self, path: str, body: bytes = b"") -> httpx.Response:
        """One POST; raises InputError if the target cannot be reached."""
        try:
            return self._client.post(f"{self.url}{path}", content=body, headers={"Content-Type": "application/json"})
        except httpx.HTTPError as error:
            raise InputError(f"--url: {self.url}{path}: {type(error).__name__}; expected an answer") from None
