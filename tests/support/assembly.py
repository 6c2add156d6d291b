"""The few PTX instructions of `packed_products`, in NumPy: what a text does to registers."""

import re

import ml_dtypes
import numpy as np

_LINE = re.compile(r"^\s*([\w.]+) (.+);$")


def run(text, registers):
    """Registers after the text ran; each is an array of uint32."""
    now = dict(registers)
    for line in text.splitlines():
        if (found := _LINE.match(line)) and not found[1].startswith(".reg"):
            target, *sources = (part.strip() for part in found[2].split(","))
            values = [_value(part, now) for part in sources]
            now[target] = _RUN[found[1]](*values)
    return now


def _value(part, registers):
    return registers[part] if part in registers else np.uint32(int(part, 0))


def _permuted(low, high, selector):
    """`prmt`: four bytes out of eight, by a digit each."""
    low, high = np.broadcast_arrays(low, high)
    both = [(word >> np.uint32(8 * at)) & 0xFF for word in (low, high) for at in range(4)]
    digits = [(int(selector) >> (4 * at)) & 0xF for at in range(4)]
    return sum(
        (both[digit].astype(np.uint32) << np.uint32(8 * at)) for at, digit in enumerate(digits)
    )


def _looked_up(a, b, c, table):
    """`lop3`: bit by bit what the table says of three bits."""
    out = np.zeros(np.broadcast_shapes(np.shape(a), np.shape(b), np.shape(c)), np.uint32)
    for row in range(8):
        if (int(table) >> row) & 1:
            bits = (side if (row >> at) & 1 else ~side for side, at in ((a, 2), (b, 1), (c, 0)))
            out |= np.bitwise_and.reduce([np.broadcast_to(each, out.shape) for each in bits])
    return out


def _multiplied(a, b, c):
    """`fma` of two bfloat16 numbers in each register."""
    halves = lambda word: (
        np.asarray(word, np.uint32)[..., None].view(np.uint16).view(ml_dtypes.bfloat16)
    )
    wide = [halves(np.broadcast_to(word, np.shape(a))).astype(np.float64) for word in (a, b, c)]
    return (wide[0] * wide[1] + wide[2]).astype(ml_dtypes.bfloat16).view(np.uint32)[..., 0]


_RUN = {
    "mov.b32": lambda value: value,
    "shl.b32": lambda value, by: value << by,
    "and.b32": lambda one, other: one & other,
    "prmt.b32": _permuted,
    "lop3.b32": _looked_up,
    "fma.rn.bf16x2": _multiplied,
}
