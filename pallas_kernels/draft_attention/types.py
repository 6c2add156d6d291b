"""What the rows of blocks attend to."""

from typing import NamedTuple

from jaxtyping import Array, Bool, Float, Int


class KeysValues(NamedTuple):
    """Keys and values in one order.

    Attributes:
        keys: normed and rotated.
        values: as many.
    """

    keys: Float[Array, "*n kv dim"]
    values: Float[Array, "*n kv dim"]


class Seen(NamedTuple):
    """What the rows of one layer see, one by one.

    Attributes:
        context: of the context that all blocks of a sequence share.
        block: of the rows of their own block.
    """

    context: Bool[Array, "b a t s"]
    block: Bool[Array, "t t"]


class RingSeen(NamedTuple):
    """What the rows of one layer see where the context is a ring.

    Attributes:
        next: int32, the position that is written next; position p lies in slot p mod C.
        counts: int32, how many of the newest positions of the ring each row sees, C at most.
        block: of the rows of their own block.
    """

    next: Int[Array, " R"]
    counts: Int[Array, "R T"]
    block: Bool[Array, "T T"]
