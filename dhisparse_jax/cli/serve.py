"""`dhisparse serve`: replay requests that arrive over time, and say how they were served."""

import contextlib
import dataclasses
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from dhisparse_jax.cli import format_options as fmt
from dhisparse_jax.cli import mesh_options as many
from dhisparse_jax.cli import options as opt
from dhisparse_jax.cli import sampling_options as draws
from dhisparse_jax.cli import serve_options as own
from dhisparse_jax.cli.interrupt import interrupts
from dhisparse_jax.cli.prompts import Prompt
from dhisparse_jax.cli.report import OutputFile, Setting, on_standard_output, output_files
from dhisparse_jax.cli.selections import recorded
from dhisparse_jax.cli.trace_file import TraceLine, read_trace
from dhisparse_jax.errors import UserError

if TYPE_CHECKING:
    from dhisparse_jax.cli.serving import ServingRecord
    from dhisparse_jax.engine.engine import Engine
    from dhisparse_jax.engine.replay import Arrival
    from dhisparse_jax.engine.request import Request
    from dhisparse_jax.models.registry import LoadedModel


@dataclass(frozen=True)
class ServeOptions:
    """Everything that `dhisparse serve` was asked for."""

    model: str
    dtype: opt.DtypeName
    formats: fmt.FormatOptions
    trace: Path
    virtual: bool
    tpot_ms: float | None
    interval: float
    hierarchy: opt.HierarchyOptions
    draft: opt.DraftOptions
    sampling: draws.SamplingOptions
    json: Path | None
    record_selections: Path | None
    devices: many.MeshOptions = many.NO_MESH_OPTIONS


def serve(  # noqa: PLR0913  # one parameter an option
    trace: own.Trace,
    model: opt.Model = opt.BUNDLED_MODEL,
    dtype: opt.Dtype = opt.DtypeName.FLOAT32,
    kv_format: fmt.KvFormat = None,
    index_format: fmt.IndexFormat = None,
    time: own.Time = own.TimeName.VIRTUAL,
    tpot_ms: own.TpotMs = None,
    interval: own.Interval = 1.0,
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
    json: opt.Json = None,
    record_selections: opt.RecordSelections = None,
    mesh: many.MeshText = None,
) -> None:
    """Replay a trace of requests against the engine.

    A line of the trace is a JSON object: arrival (seconds), prompt_file or prompt_tokens (a length:
    library source is cut to it), output_tokens (as many, also after an end-of-text id: the load is
    the trace's, whatever the model writes), and seed (0 where it is left out). While it runs, a
    table shows a line a sample; at the end, another one the whole. Ctrl-C stops early and keeps
    what was measured.
    """
    run(
        ServeOptions(
            model=model,
            dtype=dtype,
            formats=fmt.FormatOptions(kv_format, index_format),
            trace=trace,
            virtual=time is own.TimeName.VIRTUAL,
            tpot_ms=tpot_ms,
            interval=interval,
            hierarchy=opt.HierarchyOptions(
                policy=policy,
                hot_rows=hot_rows,
                batch=batch,
                record=record_selections is not None,
                host_memory=host_memory,
                dispatch_steps=dispatch_steps,
            ),
            draft=opt.DraftOptions.of(model, draft, draft_length),
            sampling=draws.SamplingOptions(temperature, top_k, top_p, 0),
            json=json,
            record_selections=record_selections,
            devices=many.MeshOptions(mesh),
        )
    )


def run(options: ServeOptions) -> None:
    """Do what `options` say.

    Raises:
        UserError: an input or the machine does not allow it.
        KeyboardInterrupt, BrokenPipeError: after the document and, where it can be, the table.
    """
    options.devices.check(options.hierarchy.batch, options.record_selections)
    lines = read_trace(options.trace)
    read = [line.prompt_file for line in lines if line.prompt_file]
    written = {"--json": options.json, "--record-selections": options.record_selections}
    with output_files(written, [options.trace, *read]) as (output, selected):
        work(options, lines, output, selected)


def work(
    options: ServeOptions,
    lines: list[TraceLine],
    output: OutputFile | None,
    selections: OutputFile | None,
) -> None:
    """Load, replay, and report, also when interrupted. Raises as `run`."""
    from dhisparse_jax.cli.serve_display import ServeDisplay, summary_table
    from dhisparse_jax.cli.serving import ServingRecord
    from dhisparse_jax.cli.session import setting_of
    from dhisparse_jax.engine.fleet import resident_share
    from dhisparse_jax.engine.replay import Clock, replay, warm_up

    out, err = Console(stderr=on_standard_output(output)), Console(stderr=True)
    with interrupts() as check_interrupt:
        loading = err.status(f"loading {options.model}")
        with loading if err.is_terminal else contextlib.nullcontext():
            loaded, arrivals, engine = prepare(options, lines)
            warm_up(engine)
        check_interrupt()
        clock = Clock(options.virtual)
        state = lambda: (*engine.counts, resident_share(engine.machines))
        record = ServingRecord(clock.now, state, options.interval)
        stopped: BaseException | None = None
        try:
            showing = ServeDisplay(record, len(arrivals), err)
            with recorded(engine, selections), showing as display:
                for event in replay(engine, arrivals, clock):
                    record.add(event)
                    display.show()
                    check_interrupt()
        except BaseException as error:  # whatever it was, what was measured is kept
            stopped = error
        # A signal from here on waits until what was measured is written.
        record.sample(ask=stopped is None)  # an interrupt or an error does not wait for the device
        if output:
            setting = setting_of(loaded, options.hierarchy.policy, options.draft.name)
            output.write(serve_document(setting, options, record, engine.pace.times.table()))
        out.print(summary_table(record.summary(), options.tpot_ms))
        if stopped is not None:
            raise stopped
        check_interrupt()


def prepare(
    options: ServeOptions, lines: list[TraceLine]
) -> tuple["LoadedModel", list["Arrival"], "Engine"]:
    """Load the model, encode the prompts, and make an engine that every request fits into."""
    from dhisparse_jax.cli.session import load_draft, load_model, make_engine
    from dhisparse_jax.engine.pace import Limits
    from dhisparse_jax.engine.replay import Arrival

    mesh, draft = many.start(options.devices, {}), options.draft.name
    loaded = load_model(options.model, options.dtype, options.formats, draft=draft, mesh=mesh)
    bound = None if options.tpot_ms is None else options.tpot_ms / 1e3
    asked = options.draft
    if bound is not None and asked.name != opt.NO_DRAFT:
        asked = dataclasses.replace(asked, auto=True)  # as many tokens as pay keep time short
    draft = load_draft(asked, loaded)
    text = library_tokens(loaded) if any(line.prompt is None for line in lines) else ()
    arrivals = [Arrival(line.arrival, make_request(options, loaded, line, text)) for line in lines]
    positions = max(len(a.request.prompt) + a.request.max_new_tokens for a in arrivals)
    engine = make_engine(
        loaded,
        options.hierarchy,
        requests=len(arrivals),
        positions=min(positions, loaded.context),
        queries=draft.drafter.length + 1,
        draft=draft,
        auto=asked.auto,
        limits=Limits(tpot=bound),
    )
    return loaded, arrivals, engine


def make_request(
    options: ServeOptions, loaded: "LoadedModel", line: TraceLine, text: tuple[int, ...]
) -> "Request":
    """The request of a line. Raises UserError, with the line, where it can never run."""
    from dhisparse_jax.cli.session import encode
    from dhisparse_jax.engine.request import Request
    from dhisparse_jax.sampling import Sampling

    if line.prompt is None:
        first = line.seed % len(text)
        repeated = text * (1 + (first + line.prompt_tokens) // len(text))
        tokens = repeated[first : first + line.prompt_tokens]
    else:
        tokens = encode(loaded, Prompt(line.where, line.prompt))
    if len(tokens) + line.output_tokens > loaded.context:
        raise UserError(
            f"{line.where}: {len(tokens):,} prompt and {line.output_tokens:,} output tokens can "
            f"never fit: {loaded.name} has a context of {loaded.context:,}; shorten them"
        )
    sampling = options.sampling
    return Request(  # without `stop`: what a trace is replayed for are its lengths
        name=line.where,
        prompt=tokens,
        max_new_tokens=line.output_tokens,
        sampling=Sampling(sampling.temperature, sampling.top_k, sampling.top_p, line.seed),
    )


def library_tokens(loaded: "LoadedModel") -> tuple[int, ...]:
    """What prompts of a given length are cut from: library source, from the seed's place on."""
    from dhisparse_jax.cli.prompts import default_prompts
    from dhisparse_jax.cli.session import encode

    text = b"\n".join(prompt.data for prompt in default_prompts(loaded.context))
    return encode(loaded, Prompt("library source", text))


def serve_document(
    setting: Setting, options: ServeOptions, record: "ServingRecord", steps: list[dict[str, Any]]
) -> dict[str, Any]:
    """The document of `dhisparse serve --json`. Times in seconds or as their names say.

    Args:
        setting: what the run ran with.
        options: what was asked for.
        record: what was served.
        steps: what a step took, by requests and verify length.
    """
    head = dataclasses.asdict(setting)
    requests = [
        dataclasses.asdict(item) | {"tpot": item.tpot, "ttft": item.ttft}
        for _, item in sorted(record.requests.items())
    ]
    return {
        **head,
        "time": "virtual" if options.virtual else "real",
        "tpot_bound_ms": options.tpot_ms,
        "summary": record.summary(),
        "steps": steps,
        "series": [dataclasses.asdict(sample) for sample in record.samples],
        "requests": requests,
    }
