"""Strict JAX and shape checks for the whole suite; must run before the project is imported."""

import ctypes
import functools
import gc
import importlib
import importlib.util
import os
from pathlib import Path

import jax
import jaxtyping
import psutil
import pytest

ROOT = Path(__file__).parents[1]

# Several workers share a GPU where there is one. JAX reads this at its first computation.
os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")

# XLA's threads on a CPU. Interpreted GPU kernels wait for each other in them: fewer than a block
# has would wait for ever, as they do on a machine of two cores.
os.environ.setdefault("NPROC", "8")

# Most of the time goes into compilation for the CPU: what makes programs fast is left out, half of
# that. Not where there is a GPU, whose programs some of these flags concern too.
CHEAP_PROGRAMS = (
    "--xla_backend_optimization_level=0",
    "--xla_llvm_disable_expensive_passes=true",
    "--xla_cpu_parallel_codegen_split_count=1",
    # jaxlib 0.11 has no such flag any more, and ends the process at an unknown one.
    *(("--xla_cpu_use_fusion_emitters=false",) if jax.__version_info__ < (0, 11) else ()),
)
if not Path("/dev/nvidiactl").exists():
    os.environ["XLA_FLAGS"] = " ".join((*CHEAP_PROGRAMS, os.environ.get("XLA_FLAGS", "")))

# Implicit broadcasting and promotion hide mistakes of shape and of precision.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Tracing makes objects by the million, of which hardly any are garbage in cycles: to look for them
# after every 700, as Python does, is a tenth of the time.
gc.set_threshold(50_000)

# Many tests compile the same programs, of which the thousands of small ones count too.
jax.config.update("jax_compilation_cache_dir", str(ROOT / ".pytest_cache" / "xla"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

# Two packages of the library live in folders of their own. The command line is left out: typer
# passes other types than the annotations say, and imports that wait for their use have no names.
LIBRARY = {path.stem for path in (ROOT / "dhisparse_jax").iterdir()}
CHECKED = (LIBRARY | {"models", "configs"}) - {"cli"}

# Where beartype is missing the annotations stay unchecked, and everything else runs.
if importlib.util.find_spec("beartype"):
    jaxtyping.install_import_hook(
        ["pallas_kernels", *(f"dhisparse_jax.{name}" for name in sorted(CHECKED))],
        "beartype.beartype",
    )


@pytest.fixture(autouse=True, scope="session")
def _share_programs():
    """Engines that are alike run the same programs: to trace and lower them takes seconds."""
    machine = importlib.import_module("dhisparse_jax.engine.machine")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "Compiled", functools.cache(machine.Compiled))
        yield machine.Compiled


@pytest.fixture
def new_programs(_share_programs):
    """A function to call where what programs are made of was replaced."""
    return _share_programs.cache_clear


MOST_BYTES = min(3_000_000_000, psutil.virtual_memory().total // 6)


@pytest.fixture(autouse=True, scope="module")
def _forget_programs():
    """Compiled programs, which other modules may use again, would take gigabytes in the end.

    What compilation has freed would too: glibc keeps it for threads that are gone.
    """
    yield
    trim = getattr(ctypes.CDLL(None), "malloc_trim", lambda _: None)
    trim(0)
    if psutil.Process().memory_info().rss > MOST_BYTES:
        jax.clear_caches()
        trim(0)
