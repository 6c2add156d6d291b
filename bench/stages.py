"""Where the time of a step goes, from a profile: GPU time of its kernels by stage.

XLA names a kernel after the instruction that it computes, and an instruction knows the named scopes
that it was traced in. Kernels of other streams may run at the same time, so stages may add up to
more than the step; what is left of the step is launch gaps.
"""

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
    "draft_attention": "draft",
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


class Event(NamedTuple):
    """A kernel that ran.

    Attributes:
        kernel: which one.
        begin: seconds since any time that events have in common.
        seconds: that it took.
    """

    kernel: Kernel
    begin: float
    seconds: float


def profiled(run: Callable[[], object]) -> list[Event]:
    """The kernels that run meanwhile, in order; none without a GPU."""
    with tempfile.TemporaryDirectory() as folder:
        with jax.profiler.trace(folder):
            run()
        files = list(Path(folder).rglob("*.xplane.pb"))
        return sorted(_events(files[0]), key=lambda event: event.begin) if files else []


def _events(path: Path) -> Iterator[Event]:
    for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
        if not plane.name.startswith("/device:GPU"):
            continue
        for line in plane.lines:
            if not line.name.startswith("Stream"):
                continue  # sums of what the streams have
            for event in line.events:
                kernel = _kernel(event.name, dict(event.stats))
                yield Event(kernel, event.start_ns / 1e9, event.duration_ns / 1e9)


def _kernel(name: str, stats: Mapping[str, object]) -> Kernel:
    """With `hlo_module` jit_group_3(17), the program is group_3."""
    program, instruction = (str(stats.get(key, "")) for key in ("hlo_module", "hlo_op"))
    program = program.removeprefix("jit_").partition("(")[0]
    return Kernel(program, name, re.sub(r"\W", "_", instruction))


Scopes = Mapping[str, Mapping[str, str]]
"""What `scopes_of` says, by program."""


def stages_of(events: Iterable[Event], scopes: Scopes) -> Iterator[str]:
    """Stage of each kernel, in the order in which they ran.

    One of a library may come from no instruction that the program's text has. It multiplies what
    the program's kernel before it has gathered or rounded, and has that one's stage.
    """
    before = defaultdict[str, str](lambda: "other")
    for kernel in (event.kernel for event in events):
        known = scopes.get(kernel.program, {})
        stage = stage_of(kernel, known)
        if stage != "other" or kernel.instruction in known or kernel.name in known:
            before[kernel.program] = stage
        yield before[kernel.program]


def by_stage(events: Sequence[Event], scopes: Scopes) -> dict[str, float]:
    """Seconds by stage."""
    stages: dict[str, float] = defaultdict(float)
    for event, stage in zip(events, stages_of(events, scopes), strict=True):
        stages[stage] += event.seconds
    return dict(stages)


Interval = tuple[str, float, float]
"""Stage, begin and length in microseconds."""

NEAR = 3.0
"""Microseconds between kernels of one stage that are drawn as one."""


def timeline(events: Sequence[Event], scopes: Scopes, runs: int = 2) -> list[Interval]:
    """What some successive runs of the program with the most GPU time did when, from the middle.

    A run begins with the kernel that the program's first run began with.
    """
    spent: dict[str, float] = defaultdict(float)
    for event in events:
        spent[event.kernel.program] += event.seconds
    program = max(spent, key=spent.__getitem__, default="")
    mine = [event for event in events if event.kernel.program == program]
    starts = [event.begin for event in mine if event.kernel == mine[0].kernel]
    if len(starts) <= runs:
        return []
    first = (len(starts) - runs) // 2
    begin, end = starts[first], starts[first + runs]
    found: list[Interval] = []
    for event, stage in zip(events, stages_of(events, scopes), strict=True):
        if not begin <= event.begin < end:
            continue
        at, length = 1e6 * (event.begin - begin), 1e6 * event.seconds
        if found and found[-1][0] == stage and at - sum(found[-1][1:]) < NEAR:
            at, length = found[-1][1], at + length - found.pop()[1]
        found.append((stage, round(at, 1), round(length, 1)))
    return found
