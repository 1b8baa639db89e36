"""Keys and headers from flags and the environment: sent as engines take them, and never quoted by an error."""

import argparse

import pytest

from engines.access import Access, add_access_arguments, read_access
from tracefile.records.errors import InputError

ENVIRON = {"OPENAI_API_KEY": "canary-1", "ANTHROPIC_API_KEY": "canary-2", "GATE": "Basic canary-3", "BAD": "canary\n4"}


def access(
    *flags: str, api: str | None = None, url: str | None = None, environ: dict[str, str] | None = None
) -> Access:
    parser = argparse.ArgumentParser()
    add_access_arguments(parser, "a test")
    return read_access(parser.parse_args(flags), api=api, url=url, environ=ENVIRON if environ is None else environ)


def test_default_api_key_variable_by_api() -> None:
    assert access().headers == ((b"Authorization", b"Bearer canary-1"),)
    assert access(api="chat").headers == access().headers
    assert access("--api-key-env", "ANTHROPIC_API_KEY").headers == ((b"Authorization", b"Bearer canary-2"),)
    assert access(environ={}).headers == ()


def test_messages_api_headers_and_no_bearer_for_anthropic() -> None:
    key, version = (b"X-Api-Key", b"canary-2"), (b"Anthropic-Version", b"2023-06-01")
    assert access(api="messages").headers == ((b"Authorization", b"Bearer canary-2"), key, version)
    assert access(api="messages", url="https://api.anthropic.com/v1").headers == (key, version)
    second = access("--header", "anthropic-version: 2099-01-01", api="messages", environ={}).headers
    assert second == ((b"anthropic-version", b"2099-01-01"),)


@pytest.mark.parametrize(
    ("flags", "printed"),
    [
        (["--api-key-env", "NONE"], r"--api-key-env: \$NONE is not set; expected the name of an environment"),
        (["--api-key-env", "canary"], "--api-key-env: this variable is not set; expected"),
        (["--header", "canary"], "--header: invalid header name; expected NAME: VALUE"),
        (["--header", "Cookie: canary"], "--header Cookie: may hold a secret.*; expected --header-env Cookie=VARIABLE"),
        (["--ca", "gone.pem"], "--ca gone.pem: No such file"),
    ],
)
def test_errors_name_the_flag_without_the_secret(flags: list[str], printed: str) -> None:
    with pytest.raises(InputError, match=printed) as error:
        access(*flags)
    assert "canary" not in str(error.value)


def test_refusal_names_the_variable_not_the_secret() -> None:
    assert access(environ={}).refusal(401) == (
        "HTTP 401 without a key; expected one in $OPENAI_API_KEY, or the variable of --api-key-env"
    )
    assert access(api="messages").refusal(403) == (
        "HTTP 403 with the key that was sent; expected a valid key in $ANTHROPIC_API_KEY"
    )
    assert repr(access()) == "Access(Authorization)"
