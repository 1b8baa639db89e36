"""docs/commands.md is made of the commands' own help."""

from scripts.commands_page import PAGE, commands, page

COMMANDS = list(commands())


def test_the_page_is_what_the_commands_say() -> None:
    assert PAGE.read_text() == page(), "run: python -m scripts.commands_page"
