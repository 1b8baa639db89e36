"""Rich's console as our commands use it."""

from typing import TextIO

from rich.console import Console

from tracefile.commandline.printing import raw_stream


class CommandConsole(Console):
    """Console of text that was made printable; a reader who goes away (head, less) is no failure of the command."""

    def __init__(self, stream: TextIO, *, highlight: bool = True) -> None:
        super().__init__(file=raw_stream(stream), highlight=highlight)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
