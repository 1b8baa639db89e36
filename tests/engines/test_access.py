"""Keys and headers from flags and the environment: sent as engines take them, and never quoted by an error."""

import argparse
import re

import pytest

from engines.access import Access, add_access_arguments, read_access
from tracefile import InputError

ENVIRON = {"OPENAI_API_KEY": "canary-1", "ANTHROPIC_API_KEY": "canary-2", "GATE": "Basic canary-3", "BAD": "canary\n4"}


def access(
    *flags: str, api: str | None = None, url: str | None = None, environ: dict[str, str] | None = None
) -> Access:
    parser = argparse.ArgumentParser()
    add_access_arguments(parser, "a test")
    return read_access(parser.parse_args(flags), api=api, url=url, environ=ENVIRON if environ is None else environ)


def test_the_key_is_the_apis_own_unless_another_is_named() -> None:
    assert access().headers == ((b"Authorization", b"Bearer canary-1"),)
    assert access(api="chat").headers == access().headers
    assert access("--api-key-env", "ANTHROPIC_API_KEY").headers == ((b"Authorization", b"Bearer canary-2"),)
    assert access(environ={}).headers == ()


def test_messages_have_anthropics_headers_and_its_own_host_gets_no_bearer() -> None:
    key, version = (b"X-Api-Key", b"canary-2"), (b"Anthropic-Version", b"2023-06-01")
    assert access(api="messages").headers == ((b"Authorization", b"Bearer canary-2"), key, version)
    assert access(api="messages", url="https://api.anthropic.com/v1").headers == (key, version)
    other = access("--header", "anthropic-version: 2099-01-01", api="messages", environ={}).headers
    assert other == ((b"anthropic-version", b"2099-01-01"),)


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--api-key-env", "NONE"], r"--api-key-env: \$NONE is not set; expected the name of an environment"),
        (["--api-key-env", "canary"], "--api-key-env: this variable is not set; expected"),
        (["--api-key-env", "BAD"], r"--api-key-env: \$BAD: no header's value; expected one line"),
        (["--header-env", "X-Gate"], "--header-env X-Gate=: this variable is not set; expected"),
        (["--header-env", "canary canary=GATE"], "--header-env: no header's name; expected NAME=VARIABLE"),
        (["--header", "canary"], "--header: no header's name; expected NAME: VALUE"),
        (["--header", "Cookie: canary"], "--header Cookie: may hold a secret.*; expected --header-env Cookie=VARIABLE"),
        (["--header", "Host: canary"], "--header Host: every request has its own; expected another header"),
        (["--header", "X-Team:"], "--header X-Team: no header's value; expected"),
        (["--header", "X-Team: ca\r\nnary: 1"], "--header X-Team: no header's value; expected"),
        (["--header", "X-A: 1", "--header", "x-a: 2"], "--header, --header-env: a header is named twice"),
        (["--header-env", "Authorization=GATE", "--api-key-env", "BAD"], "--api-key-env: beside a header with a key"),
        (["--ca", "gone.pem"], "--ca gone.pem: No such file"),
    ],
)
def test_bad_flags_are_named_without_a_value(flags: list[str], said: str) -> None:
    with pytest.raises(InputError, match=said) as error:
        access(*flags)
    assert "canary" not in str(error.value)


def test_a_refusal_names_the_variable_and_no_text_shows_a_value() -> None:
    assert access(environ={}).refusal(401) == (
        "HTTP 401 without a key; expected one in $OPENAI_API_KEY, or the variable of --api-key-env"
    )
    assert access(api="messages").refusal(403) == (
        "HTTP 403 with the key that was sent; expected a key that it takes in $ANTHROPIC_API_KEY"
    )
    assert repr(access()) == "Access(Authorization)"


BASIC = b'Basic realm="door"'


@pytest.mark.parametrize(
    ("flags", "challenge", "said"),
    [
        ((), BASIC, "HTTP 401 of Basic authentication; expected --header-env Authorization=VARIABLE, in it `Basic` "),
        (
            ("--header-env", "Authorization=GATE"),
            BASIC,
            "with the password that was sent; .* that it takes in [$]GATE$",
        ),
        (("--header-env", "Authorization=GATE"), b"", "behind Basic authentication; expected the engine's key in --h"),
        (("--header-env", "X-Key=OPENAI_API_KEY"), b"", "a key that it takes in [$]OPENAI_API_KEY or [$]OPENAI_API"),
        (("--header-env", "Authorization=GATE", "--header-env", "X-Key=ANTHROPIC_API_KEY"), b"Bearer", "[$]ANTHROPIC_"),
    ],
)
def test_a_challenge_tells_which_door_refused(flags: tuple[str, ...], challenge: bytes, said: str) -> None:
    assert re.search(said, access(*flags).refusal(401, challenge))
