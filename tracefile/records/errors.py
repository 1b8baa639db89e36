"""The one exception that means: the user's input is wrong, and here is what was expected."""


class InputError(Exception):
    """Bad input: one line that names the file, line, flag or field; a command prints it and exits with 2."""


USAGE_ADVICE = "capture with tap --inject usage, or have clients send stream_options.include_usage"
"""Way to cached tokens in a trace: engines report them in a stream only if they are asked."""
