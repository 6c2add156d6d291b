"""Where the time of a step goes, from a profile: GPU time of its kernels by stage.

XLA names a kernel after the instruction that it computes, and an instruction knows the named scopes
that it was traced in. Kernels of other streams may run at the same time, so stages may add up to
more than the step; what is left of the step is launch gaps.
"""

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
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

_LIBRARY = 'custom_call_target="__cublas'
_INSTRUCTION = re.compile(r"^\s*(?:ROOT )?%([\w.\-]+) = ", re.MULTILINE)
_SCOPE = re.compile(r'metadata=\{[^}]*?op_name="([^"]*)"')


class Traced(NamedTuple):
    """What a compiled program says of its kernels.

    Attributes:
        scopes: of its instructions, by what their kernels are called.
        calls: of the calls of a library, in the order in which they run.
    """

    scopes: Mapping[str, str]
    calls: tuple[str, ...] = ()


def traced(text: str) -> Traced:
    """What the text of a compiled program says, whose instructions are in the order of a run."""
    found, calls = dict[str, str](), list[str]()
    for line in text.splitlines():
        name, scope = _INSTRUCTION.match(line), _SCOPE.search(line)
        if name and scope:
            found[re.sub(r"\W", "_", name.group(1))] = scope.group(1)
        if _LIBRARY in line:
            calls.append(scope.group(1) if scope else "")
    return Traced(found, tuple(calls))


class Kernel(NamedTuple):
    """A kernel in a profile.

    Attributes:
        program: name of the jitted function that launched it, if the profile says so.
        name: its own.
        instruction: the one that it computes, as `Traced` has it; a library's kernel is not
            called after it.
    """

    program: str
    name: str
    instruction: str


def stage_of(kernel: Kernel, scopes: Mapping[str, str]) -> str:
    """Stage of a kernel of a program with these scopes."""
    scope = scopes.get(kernel.instruction, scopes.get(kernel.name, ""))
    if _stage(scope) == "draft":
        return "draft"
    for start, stage in KERNELS.items():
        if start in kernel.name:
            return stage
    return _stage(scope)


def _stage(scope: str) -> str:
    """Stage of what was traced in a scope."""
    words = scope.split("/")
    if "propose" in words or "draft" in words:
        return "draft"
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


Programs = Mapping[str, Traced]
"""What programs say of their kernels, by name."""


def stages_of(events: Sequence[Event], programs: Programs) -> list[str]:
    """Stage of each kernel, in the order in which they ran.

    One of a library may come from no instruction that the program's text has. Where a run has as
    many of them as the text has calls, they are those calls, in order. Else each has the stage of
    the program's kernel before it, which may have gathered or rounded what it multiplies.
    """
    stages = [""] * len(events)
    for program, places in _places(events).items():
        known = programs.get(program, Traced({}))
        for run in _runs(events, places):
            for place, stage in zip(run, _of_run([events[p] for p in run], known), strict=True):
                stages[place] = stage
    return stages


def _places(events: Sequence[Event]) -> dict[str, list[int]]:
    """Where the kernels of each program are."""
    found: dict[str, list[int]] = defaultdict(list)
    for place, event in enumerate(events):
        found[event.kernel.program].append(place)
    return found


def _runs(events: Sequence[Event], places: Sequence[int]) -> list[list[int]]:
    """Runs of a program: each begins with the kernel that the first one began with."""
    runs: list[list[int]] = []
    for place in places:
        if not runs or events[place].kernel == events[places[0]].kernel:
            runs.append([])
        runs[-1].append(place)
    return runs


def _of_run(run: Sequence[Event], known: Traced) -> list[str]:
    """Stages of the kernels of a run; see `stages_of`."""
    stages = [stage_of(event.kernel, known.scopes) for event in run]
    named = [
        stage != "other" or kernel.instruction in known.scopes or kernel.name in known.scopes
        for stage, kernel in zip(stages, (event.kernel for event in run), strict=True)
    ]
    of_library = [
        place
        for place, event in enumerate(run)
        if not named[place] and not event.kernel.name.lower().startswith(("memcpy", "memset"))
    ]
    if len(of_library) == len(known.calls):
        for place, scope in zip(of_library, known.calls, strict=True):
            stages[place], named[place] = _stage(scope), True
    before = "other"
    for place, has in enumerate(named):
        before = stages[place] = stages[place] if has else before
    return stages


def by_stage(events: Sequence[Event], programs: Programs) -> dict[str, float]:
    """Seconds by stage."""
    stages: dict[str, float] = defaultdict(float)
    for event, stage in zip(events, stages_of(events, programs), strict=True):
        stages[stage] += event.seconds
    return dict(stages)


Interval = tuple[str, float, float]
"""Stage, begin and length in microseconds."""

NEAR = 3.0
"""Microseconds between kernels of one stage that are drawn as one."""


def timeline(events: Sequence[Event], programs: Programs, runs: int = 2) -> list[Interval]:
    """What some successive runs of the program with the most GPU time did when, from the middle.

    A run begins with the kernel that the program's first run began with.
    """
    spent: dict[str, float] = defaultdict(float)
    for event in events:
        spent[event.kernel.program] += event.seconds
    program = max(spent, key=spent.__getitem__, default="")
    starts = [events[run[0]].begin for run in _runs(events, _places(events).get(program, []))]
    if len(starts) <= runs:
        return []
    first = (len(starts) - runs) // 2
    begin, end = starts[first], starts[first + runs]
    found: list[Interval] = []
    for event, stage in zip(events, stages_of(events, programs), strict=True):
        if not begin <= event.begin < end:
            continue
        at, length = 1e6 * (event.begin - begin), 1e6 * event.seconds
        if found and found[-1][0] == stage and at - sum(found[-1][1:]) < NEAR:
            at, length = found[-1][1], at + length - found.pop()[1]
        found.append((stage, round(at, 1), round(length, 1)))
    return found
