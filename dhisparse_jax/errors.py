"""Errors that a person can act on."""


class UserError(Exception):
    """Bad input or an unusable machine.

    The message is one line: what was wrong, with the numbers, and what to change. The command
    prints it to stderr and exits with code 2.
    """
