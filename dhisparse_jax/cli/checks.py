"""What an option refuses, with the value. Typer's own ranges let NaN through."""

import math

import typer

AUTO = "auto"
"""A length that the program chooses."""

SEEDS = 2**32
"""Seeds are below it."""

MOST_COUNT = 2**31 - 1
"""What 32 bits hold, which is what arrays are counted in."""

MOST_DISPATCHED = 1024
"""Steps at once: more save the host nothing, and what all of them tell is kept until their end."""

MOST_FLOAT32 = (2 - 2**-23) * 2.0**127


def count(value: int | None) -> int | None:
    """Refuse less than 1, and what 32 bits do not hold; None is an option that was not given."""
    return _within(value, MOST_COUNT)


def dispatch_steps(value: int | None) -> int | None:
    """Refuse less than 1, and so many that memory would go to what they tell."""
    return _within(value, MOST_DISPATCHED)


def _within(value: int | None, most: int) -> int | None:
    if value is not None and not 1 <= value <= most:
        raise typer.BadParameter(f"{value} is not in the range 1 to {most}")
    return value


def draft_length(value: str | None) -> str | None:
    """Refuse what is neither AUTO nor a number of at least 1."""
    if value is None or value == AUTO:
        return value
    if not value.isdecimal() or int(value) < 1:
        raise typer.BadParameter(f"{value} is neither {AUTO} nor a number of at least 1")
    return value


def not_negative(value: float) -> float:
    """Refuse less than 0, NaN, and what is infinite in float32."""
    if not 0 <= value <= MOST_FLOAT32:
        raise typer.BadParameter(f"{value} is not a number of at least 0, or more than float32 has")
    return value


def top_k(value: int) -> int:
    """Refuse what does not fit the 32 bits of a number of tokens."""
    if not 0 <= value < 2**31:
        raise typer.BadParameter(f"{value} is not in the range 0 to {2**31 - 1}")
    return value


def probability(value: float) -> float:
    """Refuse what is not above 0 and at most 1."""
    if not 0 < value <= 1:
        raise typer.BadParameter(f"{value} is not above 0 and at most 1")
    return value


def seed_value(value: int) -> int:
    """Refuse what does not fit the 32 bits of a seed."""
    if not 0 <= value < SEEDS:
        raise typer.BadParameter(f"{value} is not in the range 0 to {SEEDS - 1}")
    return value


def positive(value: float | None) -> float | None:
    """Refuse 0 and less, NaN and infinity; None is an option that was not given."""
    if value is not None and not (math.isfinite(value) and value > 0):
        raise typer.BadParameter(f"{value} is not a number above 0")
    return value
