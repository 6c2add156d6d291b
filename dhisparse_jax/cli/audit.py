"""`dhisparse audit`: do the promises E0 to E3 hold on this machine, with this model?"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.console import Console

from dhisparse_jax.cli import checking_options as own
from dhisparse_jax.cli import format_options as fmt
from dhisparse_jax.cli import options as opt
from dhisparse_jax.cli.decode import longest_prompt
from dhisparse_jax.cli.interrupt import interrupts
from dhisparse_jax.cli.prompts import Prompt, default_prompts, read_prompts
from dhisparse_jax.cli.report import OutputFile, Setting, on_standard_output, output_files
from dhisparse_jax.errors import UserError

if TYPE_CHECKING:
    from dhisparse_jax.audit.levels import Levels, Subjects
    from dhisparse_jax.audit.lockstep import Text
    from dhisparse_jax.engine.request import Request
    from dhisparse_jax.models.registry import LoadedModel

NEW_TOKENS = 32
REHEARSED = 3
"""Tokens per proposal of the draft that knows the texts."""

SELECTIONS = 8
"""A default prompt is at most as long as so many selections: enough that most is not selected."""


@dataclass(frozen=True)
class AuditOptions:
    """Everything that `dhisparse audit` was asked for."""

    model: str
    dtype: opt.DtypeName
    formats: fmt.FormatOptions
    prompt_files: tuple[str, ...]
    new_tokens: int
    hierarchy: opt.HierarchyOptions
    draft: opt.DraftOptions


def audit(  # noqa: PLR0913  # one parameter an option
    model: own.AuditedModel = opt.BUNDLED_MODEL,
    prompt_file: opt.PromptFiles = None,
    new_tokens: opt.MaxNewTokens = NEW_TOKENS,
    dtype: opt.Dtype = opt.DtypeName.FLOAT32,
    kv_format: fmt.KvFormat = None,
    index_format: fmt.IndexFormat = None,
    policy: opt.Policy = opt.PolicyName.ADAPTIVE,
    hot_rows: own.HotRows = None,
    batch: opt.Batch = None,
    draft: own.Draft = None,
    draft_length: own.DraftLength = None,
    json: own.Json = None,
) -> None:
    """Prove or refute, here and with this model, that the hierarchy changes nothing.

    E0: every fetched record equals its host bytes, and the plan covers exactly the selection. E1:
    outputs are bit for bit those of resident. E2: greedy tokens with speculation are those without
    it. E3: sampled tokens have the model's distribution. The texts are continued greedily, then
    read again under the policy and under resident in steps that are compared, with some tokens of
    every step rejected where there is a draft; logits are compared with a prefill of the whole text
    as well.

    A line for each level, with what was compared and the first difference: its request, step, layer
    and position. Exit code: 0 nothing was refuted, 1 something was, 2 could not be run.
    """
    hierarchy = opt.HierarchyOptions(policy, hot_rows, batch, dispatch_steps=1)
    length = None if draft_length is None else str(draft_length)
    options = AuditOptions(
        model=model,
        dtype=dtype,
        formats=fmt.FormatOptions(kv_format, index_format),
        prompt_files=tuple(prompt_file or ()),
        new_tokens=new_tokens,
        hierarchy=hierarchy,
        draft=opt.DraftOptions.of(model, draft, length),
    )
    run(options, json)


def run(options: AuditOptions, json: Path | None) -> None:
    """Do what `options` say.

    Raises:
        UserError: an input or the machine does not allow it.
        KeyboardInterrupt: after the document.
        typer.Exit: a promise does not hold.
    """
    prompts = read_prompts(options.prompt_files)
    with output_files({"--json": json}, options.prompt_files) as (output,):
        levels = work(options, prompts, output)
    if any(level.verdict == "REFUTED" for level in levels):
        raise typer.Exit(1)


def work(options: AuditOptions, prompts: Sequence[Prompt], output: OutputFile | None) -> "Levels":
    """Load, compare, and report, also when interrupted. Raises as `run`."""
    from dhisparse_jax.audit.levels import Levels
    from dhisparse_jax.audit.levels import audit as compare
    from dhisparse_jax.cli.session import setting_of

    begin = time.monotonic()
    levels = Levels.empty()
    stopped: BaseException | None = None
    with interrupts() as check_interrupt:
        with progress(levels, check_interrupt) as check:
            loaded, requests = prepare(options, prompts)
            setting = setting_of(loaded, options.hierarchy.policy, options.draft.name)
            try:
                subjects, texts = subjects_of(options, loaded, requests, check)
                compare(subjects, requests, texts, levels, check)
            except UserError:
                raise  # it could not be run
            except BaseException as error:  # whatever it was, what was found so far is kept
                stopped = error
        # A signal from here on waits until what was found is written.
        seconds = time.monotonic() - begin
        if output:
            output.write(document(setting, levels, complete=stopped is None, seconds=seconds))
        show(Console(stderr=on_standard_output(output)), setting, levels, complete=stopped is None)
        if stopped is not None:
            raise stopped
        check_interrupt()
    return levels


@contextlib.contextmanager
def progress(
    levels: "Levels", check: Callable[[], None]
) -> Generator[Callable[[], None], None, None]:
    """Say on standard error how far it is: live on a terminal, elsewhere a line a stage.

    Args:
        levels: what is found so far.
        check: called between steps; may raise.

    Yields:
        What to call in its place.
    """
    err, said = Console(stderr=True), set[str]()
    status = err.status("loading")

    def look() -> None:
        name, count = stage(levels)
        if err.is_terminal:
            status.update(f"{name}: {count:,}" if count else name)
        elif name not in said:
            said.add(name)
            err.print(name, highlight=False, soft_wrap=True)
        check()

    with status if err.is_terminal else contextlib.nullcontext():
        yield look


def stage(levels: "Levels") -> tuple[str, int]:
    """What is being done, and how much of it is."""
    if compared := levels.e1.counts["tokens"]:
        return "E0, E1, E3: tokens read under the policy and under resident", compared
    if steps := levels.e0.counts["steps of the engine"]:
        return "E0, E2: steps of the engine", steps
    return "continuing the texts without a draft", 0


def prepare(
    options: AuditOptions, prompts: Sequence[Prompt]
) -> tuple["LoadedModel", list["Request"]]:
    """Load the model, and encode the prompts as greedy requests."""
    from dhisparse_jax.cli.session import encode, load_model
    from dhisparse_jax.engine.request import Request

    loaded = load_model(options.model, options.dtype, options.formats, draft=options.draft.name)
    if not prompts:
        geometry = loaded.model.geometry
        enough = SELECTIONS * geometry.top_k * geometry.whole
        room = longest_prompt(loaded, options.new_tokens) // 2  # and for what a draft adds
        prompts = default_prompts(max(1, min(enough, room)))
    requests = [
        Request(
            name=prompt.name,
            prompt=encode(loaded, prompt),
            max_new_tokens=options.new_tokens,
            stop=loaded.eos,
        )
        for prompt in prompts
    ]
    return loaded, requests


def subjects_of(
    options: AuditOptions,
    loaded: "LoadedModel",
    requests: Sequence["Request"],
    check: Callable[[], None],
) -> tuple["Subjects", list["Text"]]:
    """The engines that are compared, and the texts on which they are.

    Raises:
        UserError: a text does not fit into the context, with what a step may reach beyond it.
    """
    from dhisparse_jax.audit.levels import Subjects, written_texts
    from dhisparse_jax.audit.observe import Subject
    from dhisparse_jax.audit.rehearsed import rehearsed
    from dhisparse_jax.cli.session import load_draft, make_engine

    draft = load_draft(options.draft, loaded)
    positions = max(len(request.prompt) for request in requests) + options.new_tokens
    reach = positions + (draft.drafter.length or REHEARSED)
    if reach > loaded.context:
        raise UserError(
            f"the longest text and what a step reaches beyond it take {reach:,} positions; "
            f"{loaded.name} has a context of {loaded.context:,}: shorten it, or lower "
            "--max-new-tokens"
        )
    make = lambda hierarchy, queries, draft: make_engine(
        loaded,
        hierarchy,
        requests=len(requests),
        positions=positions,
        queries=queries,
        draft=draft,
    )
    resident = dataclasses.replace(options.hierarchy, policy=opt.PolicyName.RESIDENT, hot_rows=None)
    few = options.hierarchy.hot_rows or max(1, loaded.model.geometry.top_k // 2)
    audited = dataclasses.replace(options.hierarchy, hot_rows=few)
    plain = make(resident, 1, None)
    texts = written_texts(plain, requests, check)
    queries = draft.drafter.length + 1
    subject = Subject(make(audited, queries, draft))
    drafted, like = subject.engine, plain
    if queries == 1:
        known = rehearsed(loaded.model.vocabulary, [text.tokens for text in texts], REHEARSED)
        drafted = make(audited, REHEARSED + 1, known)
    else:
        like = make(resident, queries, None)
    return Subjects(plain, subject, Subject(like), drafted), texts


def document(
    setting: Setting, levels: "Levels", *, complete: bool, seconds: float
) -> dict[str, Any]:
    """The JSON document."""
    return {
        **dataclasses.asdict(setting),
        "rehearsed": REHEARSED if setting.draft == opt.NO_DRAFT else 0,
        "complete": complete,
        "seconds": seconds,
        "levels": [level.document() for level in levels],
    }


def show(console: Console, setting: Setting, levels: "Levels", *, complete: bool) -> None:
    """A line for each level, what was compared, and the first difference."""
    line = lambda text: console.print(text, highlight=False, markup=False, soft_wrap=True)
    line(
        f"{setting.model}, policy {setting.policy}, draft {setting.draft}, rows in "
        f"{setting.kv_format}, {setting.backend}" + ("" if complete else "; not finished")
    )
    if setting.draft == opt.NO_DRAFT:
        line(
            "E0 and E1 with one query a step, as without a draft; E2 and E3 with a draft of "
            f"{REHEARSED} tokens that knows the texts, and errs now and then"
        )
    for level in levels:
        line(f"{level.name} {level.verdict}: {level.promise}")
        if level.first is not None:
            line(f"   first of {level.differences:,}: {level.first}")
        if level.untried is not None:
            line(f"   {level.untried}")
        counts = [f"{count:,} {name}" for name, count in level.counts.items()]
        figures = [f"{name} {value:.3g}" for name, value in level.figures.items()]
        if counts or figures:
            line(f"   {'; '.join(counts + figures)}")
    if complete and setting.policy != "resident" and not levels.e0.counts["fetched records"]:
        line("nothing was fetched: lower --hot-rows, or give longer texts")
