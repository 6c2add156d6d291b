"""What kernels for Mosaic GPU share: one spelling for two versions of JAX, and inline PTX.

`plgpu` has no gather by index for Hopper and no way to read host memory, so those stages are
written in PTX. `inline_mgpu` runs such a stage once per warpgroup; its values are MLIR integers.
"""

import functools
import importlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.experimental.mosaic.gpu as mgpu
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import arith, llvm

Ref = Any
"""A reference, or a slice of one, which has another type."""

WARPGROUP = 128
"""CUDA threads of what Pallas calls a thread."""

SCALAR = plgpu.Layout.WG_SPLAT(())
"""Layout of a scalar operand of inline code."""

_LOAD_WANTS_INDEX = (
    inspect.signature(plgpu.load).parameters["idx"].default is inspect.Parameter.empty
)


def kernel(
    body: Callable[..., None],
    *,
    out: Sequence[jax.ShapeDtypeStruct],
    scratch: Mapping[str, Any],
    mesh: plgpu.Mesh,
    compiler_params: plgpu.CompilerParams,
    name: str,
    interpret: Any = False,
) -> Callable[..., Any]:
    """A kernel; references among its operands (`jax.new_ref`) are written in place.

    `plgpu.kernel` takes no references in every JAX version, and names its arguments differently.
    With `interpret`, see `interpreter`, it runs on a CPU.
    """

    def run(*refs: jax.Ref) -> None:
        with_scratch = functools.partial(body, *refs)
        pl.run_scoped(with_scratch, collective_axes=mesh.thread_name, **scratch)

    return pl.kernel(
        run,
        out_type=tuple(out),
        mesh=mesh,
        compiler_params=compiler_params,
        name=name,
        interpret=interpret,
    )


def interpreter() -> Any:
    """What `kernel` takes as `interpret` to run on a CPU, thread by thread, barriers and all.

    It prints "RACE DETECTED" where nothing orders two accesses to the same memory.

    Every thread of a block waits in a host thread of its own, so XLA needs as many: it takes their
    number from the variable NPROC, when it starts.
    """
    if hasattr(plgpu, "InterpretGPUParams"):
        return plgpu.InterpretGPUParams(detect_races=True)
    # jax 0.10 has it, but not in public.
    params = importlib.import_module("jax._src.pallas.mosaic_gpu.interpret.params")
    return params.InterpretGPUParams(detect_races=True)


def params(**options: Any) -> plgpu.CompilerParams:
    """Compiler parameters of a kernel that says itself where a warpgroup must wait.

    Every hand-over between warpgroups goes through an mbarrier on which all their CUDA threads
    arrive, so the barriers that Pallas would add around each access to memory are not needed.
    """
    return plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, **options
    )


def load(ref: Ref, layout: Any) -> jax.Array:
    """What `ref` holds, in registers of a layout."""
    index = ((),) if _LOAD_WANTS_INDEX else ()
    return plgpu.load(ref, *index, layout=layout, optimized=False)


def integer(value: int, bits: int = 32) -> Any:
    """A constant."""
    return arith.constant(ir.IntegerType.get_signless(bits), value)


def wide(value: Any) -> Any:
    """A 32-bit unsigned integer as a 64-bit one."""
    return arith.extui(ir.IntegerType.get_signless(64), value)


def thread_index() -> Any:
    """The CUDA thread's number within its warpgroup."""
    return arith.remui(mgpu.utils.thread_idx(), integer(WARPGROUP))


def address(ref: Any, bits: int) -> Any:
    """Address of a reference: 32 bits in shared memory, 64 in global memory."""
    return llvm.ptrtoint(ir.IntegerType.get_signless(bits), mgpu.utils.memref_ptr(ref))


def ptx(text: str, constraints: str, *operands: Any, results: int = 0) -> Any:
    """Inline PTX with 32-bit integer results: none, one, or a list of them."""
    word = ir.IntegerType.get_signless(32)
    if results == 0:
        kind = ir.Type.parse("!llvm.void")
    else:
        kind = word if results == 1 else llvm.StructType.get_literal([word] * results)
    value: Any = llvm.inline_asm(kind, list(operands), text, constraints, has_side_effects=True)
    if results > 1:
        return [llvm.extractvalue(word, value, [place]) for place in range(results)]
    return value


def ptx_if(condition: Any, text: str, constraints: str, *operands: Any) -> None:
    """Inline PTX under a 1-bit condition; `text` numbers its operands from $1."""
    flag = arith.extui(ir.IntegerType.get_signless(32), condition)
    guarded = f"{{ .reg .pred p; setp.ne.b32 p, $0, 0; @p {text} }}"
    ptx(guarded, ",".join(["r", *filter(None, [constraints])]), flag, *operands)


def scalar(array: Any) -> Any:
    """The MLIR value of a SCALAR operand."""
    return array.registers.item()
