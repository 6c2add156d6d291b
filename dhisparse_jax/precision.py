"""Products of float32 numbers as what they are."""

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import jax

Inputs = ParamSpec("Inputs")
"""A function's parameters, which stay what they are."""

Output = TypeVar("Output")
"""What it returns."""


def full_precision(function: Callable[Inputs, Output]) -> Callable[Inputs, Output]:
    """`function`, traced so that float32 operands of a product are not rounded.

    By default a GPU rounds them to TF32, 10 bits of mantissa, and sums in an order that goes with
    the number of rows: logits of 10 then differ by some hundredths between one query and four, and
    so do tokens. What is computed in bfloat16 stays as it is.
    """

    @functools.wraps(function)
    def traced(*args: Inputs.args, **kwargs: Inputs.kwargs) -> Output:
        with jax.default_matmul_precision("highest"):
            return function(*args, **kwargs)

    bound = function.func if isinstance(function, functools.partial) else function
    traced.__name__ = bound.__name__  # what a profile calls it; `partial` has none
    return traced
