"""Where the time of a step goes, from a profile: GPU time of its kernels by stage.

XLA names a kernel after the instruction that it computes, and an instruction knows the named scopes
that it was traced in. Kernels of other streams may run at the same time, so stages may add up to
more than the step; what is left of the step is launch gaps.
"""

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

import jax

SCOPES = {
    "experts": "experts",
    "router": "router",
    "shared": "shared expert",
    "dense": "dense layers",
    "project": "attention weights",
    "combine": "attention weights",
    "indexer": "indexer",
    "window": "attend",
    "engram": "n-grams",
    "streams": "streams",
    "select": "index",
    "plan": "plan",
    "retrieve": "retrieve",
    "retrieve_attend": "attend",
    "attend": "attend",
    "append": "append",
    "embed": "head",
    "verify": "head",
    "accept": "head",
    "propose": "draft",
    "draft": "draft",
    "commit": "adapt",
    "schedule": "adapt",
    "adapt": "adapt",
    "backup": "backup",
}
"""Stage of a named scope; the innermost one counts, but `draft` and `propose` take all."""

KERNELS = {
    "index_scores": "index",
    "top_k": "top-K",
    "plan": "plan",
    "retrieve_attend": "retrieve and attend",
    "retrieve": "retrieve",
    "sparse_attention": "attend",
    "backup": "backup",
    "packed_products": "experts",
    "sinkhorn": "streams",
}
"""Stage of the library's own kernels, by the beginning of their names; the first that fits."""

_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = ", re.MULTILINE)
_SCOPE = re.compile(r'metadata=\{[^}]*?op_name="([^"]*)"')


def scopes_of(text: str) -> dict[str, str]:
    """Scopes of the instructions of a compiled program, by what their kernels are called."""
    found = {}
    for line in text.splitlines():
        name, scope = _INSTRUCTION.match(line), _SCOPE.search(line)
        if name and scope:
            found[re.sub(r"\W", "_", name.group(1))] = scope.group(1)
    return found


class Kernel(NamedTuple):
    """A kernel in a profile.

    Attributes:
        program: name of the jitted function that launched it, if the profile says so.
        name: its own.
        instruction: the one that it computes, as `scopes_of` has it; a library's kernel is not
            called after it.
    """

    program: str
    name: str
    instruction: str


def stage_of(kernel: Kernel, scopes: Mapping[str, str]) -> str:
    """Stage of a kernel of a program with these scopes."""
    words = scopes.get(kernel.instruction, scopes.get(kernel.name, "")).split("/")
    if "propose" in words or "draft" in words:
        return "draft"
    for start, stage in KERNELS.items():
        if start in kernel.name:
            return stage
    known = [SCOPES[word] for word in words if word in SCOPES]
    return known[-1] if known else "other"


Spent = Mapping[Kernel, tuple[float, int]]
"""GPU seconds and calls of every kernel."""


def profiled(run: Callable[[], object]) -> Spent:
    """What every kernel spends meanwhile; empty without a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        files = list(Path(folder).rglob("*.xplane.pb"))
        return _kernels(files[0]) if files else {}


def _kernels(path: Path) -> Spent:
    total: dict[Kernel, float] = defaultdict(float)
    calls: dict[Kernel, int] = defaultdict(int)
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue  # sums of what the streams have
            for event in line.events:
                key = _kernel(event.name, dict(event.stats))
                total[key] += event.duration_ns / 1e9
                calls[key] += 1
    return {key: (seconds, calls[key]) for key, seconds in total.items()}


def _kernel(name: str, stats: Mapping[str, object]) -> Kernel:
    """With `hlo_module` jit_group_3(17), the program is group_3."""
    program, instruction = (str(stats.get(key, "")) for key in ("hlo_module", "hlo_op"))
    program = program.removeprefix("jit_").partition("(")[0]
    return Kernel(program, name, re.sub(r"\W", "_", instruction))


def by_stage(kernels: Spent, scopes: Mapping[str, Mapping[str, str]]) -> dict[str, float]:
    """Seconds by stage; scopes by program."""
    stages: dict[str, float] = defaultdict(float)
    for kernel, (seconds, _) in kernels.items():
        stages[stage_of(kernel, scopes.get(kernel.program, {}))] += seconds
    return dict(stages)
