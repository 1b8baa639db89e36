"""The one exception that means: the user's input is wrong, and here is what was expected."""


class InputError(Exception):
    """Bad input from outside: its message is one line that names the file, line, flag or field.

    Every command prints it after its own name and exits with 2; it is never a traceback.
    """
