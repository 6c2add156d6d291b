"""`dhisparse decode`: continue texts over the hierarchy, and say what it did."""

import contextlib
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from dhisparse_jax.cli import format_options as fmt
from dhisparse_jax.cli import mesh_options as many
from dhisparse_jax.cli import options as opt
from dhisparse_jax.cli import sampling_options as draws
from dhisparse_jax.cli.interrupt import interrupts
from dhisparse_jax.cli.meeting import together
from dhisparse_jax.cli.prompts import Prompt, default_prompts, read_prompts
from dhisparse_jax.cli.report import OutputFile, decode_document, on_standard_output, output_files
from dhisparse_jax.cli.selections import recorded
from dhisparse_jax.errors import UserError

if TYPE_CHECKING:
    from dhisparse_jax.cli.record import RunRecord
    from dhisparse_jax.engine.engine import Engine
    from dhisparse_jax.engine.request import Request
    from dhisparse_jax.models.registry import LoadedModel

NEW_TOKENS = 128


@dataclass(frozen=True)
class DecodeOptions:
    """Everything that `dhisparse decode` was asked for."""

    model: str
    dtype: opt.DtypeName
    formats: fmt.FormatOptions
    prompt_files: tuple[str, ...]
    chat: bool
    max_new_tokens: int
    hierarchy: opt.HierarchyOptions
    draft: opt.DraftOptions
    sampling: draws.SamplingOptions
    json: Path | None
    record_selections: Path | None
    trace_dir: Path | None
    devices: many.MeshOptions = many.NO_MESH_OPTIONS


def decode(  # noqa: PLR0913  # one parameter an option
    model: opt.Model = opt.BUNDLED_MODEL,
    prompt_file: opt.PromptFiles = None,
    chat: opt.Chat = False,
    max_new_tokens: opt.MaxNewTokens = NEW_TOKENS,
    dtype: opt.Dtype = opt.DtypeName.FLOAT32,
    kv_format: fmt.KvFormat = None,
    index_format: fmt.IndexFormat = None,
    policy: opt.Policy = opt.PolicyName.ADAPTIVE,
    hot_rows: opt.HotRows = None,
    batch: opt.Batch = None,
    host_memory: opt.HostMemory = None,
    dispatch_steps: opt.DispatchSteps = None,
    draft: opt.Draft = None,
    draft_length: opt.DraftLength = None,
    temperature: draws.Temperature = 0.0,
    top_k: draws.TopK = 0,
    top_p: draws.TopP = 1.0,
    seed: draws.Seed = 0,
    json: opt.Json = None,
    record_selections: opt.RecordSelections = None,
    trace_dir: opt.TraceDir = None,
    mesh: many.MeshText = None,
    coordinator: many.Coordinator = None,
    process: many.Process = None,
) -> None:
    """Continue texts over the KV hierarchy.

    One prompt: its continuation streams to standard output, which holds nothing else. Several: a
    live table on a terminal, else each text under a heading when it is finished. At the end, a
    table says what the hierarchy did. Ctrl-C stops early and keeps what was generated.
    """
    run(
        DecodeOptions(
            model=model,
            dtype=dtype,
            formats=fmt.FormatOptions(kv_format, index_format),
            prompt_files=tuple(prompt_file or ()),
            chat=chat,
            max_new_tokens=max_new_tokens,
            hierarchy=opt.HierarchyOptions(
                policy=policy,
                hot_rows=hot_rows,
                batch=batch,
                record=record_selections is not None,
                host_memory=host_memory,
                dispatch_steps=dispatch_steps,
            ),
            draft=opt.DraftOptions.of(model, draft, draft_length),
            sampling=draws.SamplingOptions(temperature, top_k, top_p, seed),
            json=json,
            record_selections=record_selections,
            trace_dir=trace_dir,
            devices=many.MeshOptions(mesh, coordinator, process),
        )
    )


def run(options: DecodeOptions) -> None:
    """Do what `options` say.

    Raises:
        UserError: an input or the machine does not allow it.
        KeyboardInterrupt, BrokenPipeError: after the document and, where it can be, the table.
    """
    # What can be refused without a model is refused before one is loaded.
    options.devices.check(options.hierarchy.batch, options.record_selections)
    prompts = read_prompts(options.prompt_files)
    check_trace_dir(options.trace_dir)
    written = {"--json": options.json, "--record-selections": options.record_selections}
    with (
        output_files(written, options.prompt_files) as (output, selected),
        together(options.devices.coordinator, options.devices.process),
    ):
        work(options, prompts, output, selected)


def work(
    options: DecodeOptions,
    prompts: Sequence[Prompt],
    output: OutputFile | None,
    selections: OutputFile | None,
) -> None:
    """Load, decode, and report, also when interrupted. Raises as `run`."""
    from dhisparse_jax.cli.record import RunRecord
    from dhisparse_jax.cli.session import setting_of
    from dhisparse_jax.cli.tables import hierarchy_table, request_table

    out, err = many.consoles(options.devices)
    out = err if on_standard_output(output) else out
    with interrupts() as check_interrupt:
        loading = err.status(f"loading {options.model}")
        with loading if err.is_terminal else contextlib.nullcontext():
            loaded, requests, engine = prepare(options, prompts)
        if line := cut_short(loaded, requests, options.max_new_tokens):
            err.print(line, highlight=False, markup=False, soft_wrap=True)
        check_interrupt()
        setting = setting_of(loaded, options.hierarchy.policy, options.draft.name)
        record = RunRecord.of(requests)
        stopped: BaseException | None = None
        try:
            with trace(options.trace_dir), recorded(engine, selections):
                follow(engine, requests, record, loaded, (out, err), check_interrupt)
        except BaseException as error:  # whatever it was, the tokens so far are kept
            stopped = error
            record.interrupt()
        # A signal from here on waits until what was seen is written.
        if stopped is None:  # it takes a moment, which an interrupt does not give
            record.draft_seconds = record.steps * engine.draft_step_seconds()
        if output:
            output.write(decode_document(setting, record, engine.sizes))
        # A single text is alone on standard output, so that it can be piped.
        console = out if len(requests) > 1 else err
        if len(requests) > 1:
            console.print(request_table(record))
        console.print(hierarchy_table(setting, record, engine.sizes))
        if stopped is not None:
            raise stopped
        check_interrupt()


def prepare(
    options: DecodeOptions, prompts: Sequence[Prompt]
) -> tuple["LoadedModel", list["Request"], "Engine"]:
    """Load the model, encode the prompts, and make an engine that they fit into."""
    from dhisparse_jax.cli.session import load_draft, load_model, make_engine

    mesh = many.start(options.devices, many.told(options, options.devices, prompts))
    draft = options.draft.name
    loaded = load_model(options.model, options.dtype, options.formats, draft=draft, mesh=mesh)
    draft = load_draft(options.draft, loaded)
    if not prompts:
        prompts = default_prompts(longest_prompt(loaded, options.max_new_tokens))
    requests = [make_request(options, loaded, prompt) for prompt in prompts]
    positions = max(len(request.prompt) for request in requests) + options.max_new_tokens
    engine = make_engine(
        loaded,
        options.hierarchy,
        requests=len(requests),
        positions=min(positions, loaded.context),
        queries=draft.drafter.length + 1,
        draft=draft,
        auto=options.draft.auto,
    )
    return loaded, requests, engine


def make_request(options: DecodeOptions, loaded: "LoadedModel", prompt: Prompt) -> "Request":
    """Encode a prompt. Raises UserError where it does not fit the vocabulary or the context."""
    from dhisparse_jax.cli.session import encode
    from dhisparse_jax.engine.request import Request
    from dhisparse_jax.sampling import Sampling

    tokens = encode(loaded, prompt, chat=options.chat)
    if len(tokens) >= loaded.context:
        raise UserError(
            f"{prompt.name} has {len(tokens):,} tokens; {loaded.name} has a context of "
            f"{loaded.context:,}, new tokens included: shorten it to {loaded.context - 1:,} or less"
        )
    sampling = options.sampling
    return Request(
        name=prompt.name,
        prompt=tokens,
        max_new_tokens=options.max_new_tokens,
        sampling=Sampling(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            seed=sampling.seed,
        ),
        stop=loaded.eos,
    )


def cut_short(loaded: "LoadedModel", requests: Sequence["Request"], new_tokens: int) -> str:
    """A line if the context ends texts before they have all their new tokens, else nothing."""
    room = [loaded.context - len(request.prompt) for request in requests]
    if not (cut := [left for left in room if left < new_tokens]):
        return ""
    fit = " to ".join(f"{left:,}" for left in sorted({min(cut), max(cut)}))
    return (
        f"texts that end early: {len(cut)} of {len(room)}, after {fit} of {new_tokens:,} new "
        f"tokens; {loaded.name} has a context of {loaded.context:,}, prompt included"
    )


def longest_prompt(loaded: "LoadedModel", new_tokens: int) -> int:
    """Bytes that a default prompt may have, so that the new tokens still fit (a token each)."""
    return max(1, loaded.context - new_tokens)


def follow(
    engine: "Engine",
    requests: Sequence["Request"],
    record: "RunRecord",
    loaded: "LoadedModel",
    consoles: tuple[Console, Console],
    check_interrupt: Callable[[], None],
) -> None:
    """Run the requests: every event goes into the record, then onto the display.

    Args:
        engine: runs them.
        requests: what to run.
        record: takes in the events.
        loaded: the model, for its tokenizer.
        consoles: of standard output and of standard error.
        check_interrupt: raises KeyboardInterrupt if the run is to stop.
    """
    from dhisparse_jax.cli.display import make_display

    with make_display(record, loaded.tokenizer.decode, *consoles) as display:
        for event in engine.run(requests):
            record.add(event)
            display.show(event)
            check_interrupt()


def check_trace_dir(path: Path | None) -> None:
    """Make the folder. Raises UserError where the path is a file or cannot be made."""
    if path is None:
        return
    if path.exists() and not path.is_dir():
        raise UserError(f"--trace-dir {path} is a file; name a folder")
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--trace-dir {path} cannot be made: {error.strerror}") from None


@contextlib.contextmanager
def trace(path: Path | None) -> Generator[None, None, None]:
    """Write a profile of the body into `path`, whatever ends it; nothing for None."""
    if path is None:
        yield
        return
    import jax

    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # every Python call: large, slow, and not what is asked for
    jax.profiler.start_trace(path, profiler_options=options)
    try:
        yield
    finally:
        jax.profiler.stop_trace()
