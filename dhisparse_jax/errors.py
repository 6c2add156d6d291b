"""Errors that a person can act on."""

import contextlib
import re
from collections.abc import Generator, Mapping


class UserError(Exception):
    """Bad input or an unusable machine.

    The message is one line: what was wrong, with the numbers, and what to change. The command
    prints it to stderr and exits with code 2.
    """


@contextlib.contextmanager
def renamed(names: Mapping[str, str]) -> Generator[None, None, None]:
    """Say in errors of the body what whoever reads them calls things.

    Args:
        names: theirs by ours. One word, which may mean something else, is replaced only where a
            message begins with it.

    Raises:
        UserError: what the body raised, in their words.
    """
    theirs = lambda found: (
        names.get(found[0], found[0]) if "_" in found[0] or not found.start() else found[0]
    )
    try:
        yield
    except UserError as error:
        raise UserError(re.sub(r"\b[a-z]\w*", theirs, str(error))) from error
