"""Rich console for status lines."""

from typing import TextIO

from rich.console import Console

from tracefile.commandline.printing import raw_stream


class CommandConsole(Console):
    """Rich console on the raw stream; a closed pipe (``head``, ``less``) raises BrokenPipeError instead of exiting."""

    def __init__(self, stream: TextIO, *, highlight: bool = True) -> None:
        super().__init__(file=raw_stream(stream), highlight=highlight)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
