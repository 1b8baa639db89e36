"""The one exception that means: the user's input is wrong, and here is what was expected."""


class InputError(Exception):
    """Bad input: one line that names the file, line, flag or field; a command prints it and exits with 2."""
