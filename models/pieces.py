"""What arrays of ours are made of, for the forms that several models share."""

from collections.abc import Mapping

from dhisparse_jax.models.stream import Piece, Pieces
from dhisparse_jax.models.tensor_files import Shape


def whole_tensor(name: str, shape: Shape, *, transposed: bool) -> Pieces:
    """A tensor as a whole."""
    published = tuple(reversed(shape)) if transposed else shape
    return (Piece(name, (0,) * len(shape), published, transposed=transposed),)


def stacked_experts(prefix: str, names: Mapping[str, str], part: str, shape: Shape) -> Pieces:
    """Matrices of all experts, stacked; `gate_up` has two of each side by side.

    Args:
        prefix: what the published names of all experts begin with.
        names: published names of the matrices "gate", "up" and "down".
        part: "gate_up" or "down".
        shape: of our array.
    """
    experts, fan_in, fan_out = shape
    sides = ("gate", "up") if part == "gate_up" else (part,)
    width = fan_out // len(sides)
    return tuple(
        Piece(
            f"{prefix}.{expert}.{names[side]}.weight",
            (expert, 0, number * width),
            (width, fan_in),
            transposed=True,
        )
        for expert in range(experts)
        for number, side in enumerate(sides)
    )


def stored_experts(prefix: str, matrix: str, kind: str, shape: Shape) -> Pieces:
    """Numbers or scales of all experts, stacked, as they are published."""
    suffix = "_scale_inv" if kind == "scales" else ""
    return tuple(
        Piece(f"{prefix}.{expert}.{matrix}.weight{suffix}", (expert, 0, 0), shape[1:], stored=True)
        for expert in range(shape[0])
    )
