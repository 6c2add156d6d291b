"""Records of int32 words, seen by a Triton kernel as rows of numbers: no byte moves.

XLA computes a bitcast between types of different sizes as a copy with shifts, which would double
the hot pool. A Triton kernel only gets the address of its operand, and takes the element type from
the aval of its `Ref`. So it is enough to change the aval: the primitive below lowers to its operand
on a GPU, where nothing but a Triton kernel may read the result, and to `unpack` anywhere else,
which is what interpret mode needs.
"""

import jax
import numpy as np
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from pallas_kernels.common.rows import WORD_BYTES, unpack

_view = Primitive("dhisparse_typed_view")
_view.def_abstract_eval(
    lambda words, *, dtype: words.update(
        shape=(words.shape[0], words.shape[1] * WORD_BYTES // dtype.itemsize), dtype=dtype
    )
)
mlir.register_lowering(_view, mlir.lower_fun(lambda words, *, dtype: unpack(words, dtype), False))
for _platform in ("cuda", "rocm"):
    mlir.register_lowering(_view, lambda ctx, words, *, dtype: [words], platform=_platform)


def typed_view(
    words: Int[Array, "N W"], dtype: DTypeLike, *, interpret: bool
) -> Float[Array, "N width"]:
    """The records as numbers of `dtype`, as an operand of a `pallas_call`. Under `jit`.

    Args:
        words: records; on a GPU they stay where they are.
        dtype: of the numbers.
        interpret: whether the kernel is interpreted, so that plain XLA operations read the result.
    """
    if interpret or jax.typeof(words).dtype == dtype:
        return unpack(words, dtype)
    return _view.bind(words, dtype=np.dtype(dtype))
