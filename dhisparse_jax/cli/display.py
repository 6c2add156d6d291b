"""What a person sees while requests run. Knows nothing about engines, files or JSON.

One request streams its text. Several show a live table on a terminal, and elsewhere each text
whole, when it is finished. Prefill shows a progress bar on standard error.
"""

import abc
from collections.abc import Sequence
from typing import Self

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.live import Live
from rich.progress import (
    BarColumn,
    Progress,
    TaskID,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from dhisparse_jax.cli.record import RequestRecord, RunRecord
from dhisparse_jax.cli.text import Decode, TextOutput, TokenStream, last_line, safe_text
from dhisparse_jax.engine.events import Event, Finished, NewTokens, PrefillProgress

REFRESHES_PER_SECOND = 8
# Lines that the live table uses beside its rows: title, head, rules, the count of the rest.
TABLE_LINES = 7


class Display(abc.ABC):
    """Shows a run: entered before the first event, left after the last or on an interrupt."""

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_error: object) -> None:
        self.stop()

    @abc.abstractmethod
    def start(self) -> None:
        """Begin to draw."""

    @abc.abstractmethod
    def show(self, event: Event) -> None:
        """Show one event, which the record already holds."""

    @abc.abstractmethod
    def stop(self) -> None:
        """Stop drawing; print what is not printed yet."""


def make_display(record: RunRecord, decode: Decode, out: Console, err: Console) -> Display:
    """The display that fits the number of requests and the kind of standard output."""
    if len(record.requests) == 1:
        return StreamDisplay(record, decode, out, err)
    if out.is_terminal:
        return LiveDisplay(record, decode, out)
    return PlainDisplay(record, decode, out, err)


class PrefillBar:
    """A progress bar for the request in prefill; a line per request where there is no terminal."""

    def __init__(self, requests: Sequence[RequestRecord], console: Console) -> None:
        """`console` is standard error."""
        self._requests = requests
        self._console = console
        self._progress = Progress(
            TextColumn("prefill {task.description}", markup=False),
            BarColumn(),
            TaskProgressColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            redirect_stdout=False,  # it would end up on standard error
            disable=not console.is_terminal,
        )
        self._tasks: dict[int, TaskID] = {}
        self._drawing = False

    def start(self) -> None:
        """Begin to draw."""
        self._progress.start()
        self._drawing = True

    def show(self, event: PrefillProgress) -> None:
        """Move the request's bar, and take it away at its end."""
        if event.request not in self._tasks:
            self._tasks[event.request] = self._announce(event.request)
        task = self._tasks[event.request]
        self._progress.update(task, completed=event.done, total=event.total)
        if event.done >= event.total:
            self._progress.update(task, visible=False)

    def _announce(self, number: int) -> TaskID:
        """Add a request's bar; a line instead where there is no terminal to draw on."""
        request = self._requests[number]
        text = f"{request.name}, {request.prompt_tokens:,} tokens"
        if not self._console.is_terminal:
            place = f"{number + 1}/{len(self._requests)} " if len(self._requests) > 1 else ""
            line = Text(f"prefill {place}{text}")
            self._console.print(line, soft_wrap=True)
        return self._progress.add_task(text)

    def stop(self) -> None:
        """Take the bar away; nothing where it is gone."""
        if self._drawing:
            self._progress.stop()
        self._drawing = False


class StreamDisplay(Display):
    """One request: its text on standard output as it comes, and nothing else there."""

    def __init__(self, record: RunRecord, decode: Decode, out: Console, err: Console) -> None:
        """`record` has one request."""
        self._bar = PrefillBar(record.requests, err)
        self._tokens = TokenStream(decode)
        self._output = TextOutput(out.file)

    def start(self) -> None:
        """Start the bar."""
        self._bar.start()

    def stop(self) -> None:
        """Leave the cursor on a line of its own."""
        self._bar.stop()
        self._output.end()

    def show(self, event: Event) -> None:
        """Write new text at once."""
        match event:
            case PrefillProgress():
                self._bar.show(event)
            case NewTokens(_, tokens):
                self._bar.stop()  # both share the terminal: no bar while text streams
                self._output.write(self._tokens.feed(tokens))


class PlainDisplay(Display):
    """Several requests, no terminal: each text whole, under a heading, when it is finished."""

    def __init__(self, record: RunRecord, decode: Decode, out: Console, err: Console) -> None:
        """`out` gets the texts, `err` the progress."""
        self._record = record
        self._decode = decode
        self._stream = out.file
        self._bar = PrefillBar(record.requests, err)
        self._printed: set[int] = set()

    def start(self) -> None:
        """Start the bar."""
        self._bar.start()

    def stop(self) -> None:
        """Print what was generated for requests that did not finish."""
        self._bar.stop()
        for index, request in enumerate(self._record.requests):
            if request.tokens:
                self._print(index)

    def show(self, event: Event) -> None:
        """Print a request's text at its end."""
        match event:
            case PrefillProgress():
                self._bar.show(event)
            case Finished(request):
                self._print(request)

    def _print(self, index: int) -> None:
        if index in self._printed:
            return
        self._printed.add(index)
        request = self._record.requests[index]
        output = TextOutput(self._stream)
        output.write(f"{heading(request)}\n".encode())
        output.write(self._decode(request.tokens) + b"\n\n")


class LiveDisplay(Display):
    """Several requests on a terminal: a table of those at work, finished texts above it."""

    def __init__(self, record: RunRecord, decode: Decode, out: Console) -> None:
        """`out` is a terminal."""
        self._record = record
        self._decode = decode
        self._console = out
        self._printed: set[int] = set()
        self._live = Live(
            get_renderable=self._render,
            console=out,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
        )

    def start(self) -> None:
        """Start to draw."""
        self._live.start()

    def stop(self) -> None:
        """Take the table away, and print what was generated for unfinished requests."""
        self._live.stop()
        for index, request in enumerate(self._record.requests):
            if request.tokens:
                self._print(index)

    def show(self, event: Event) -> None:
        """Print a text at its end; the table redraws itself from the record."""
        match event:
            case Finished(request):
                self._print(request)

    def _print(self, index: int) -> None:
        if index in self._printed:
            return
        self._printed.add(index)
        request = self._record.requests[index]
        self._console.print(Text(heading(request), style="bold cyan"))
        self._console.print(Text(safe_text(self._decode(request.tokens)) + "\n"))

    def _render(self) -> RenderableType:
        """The table of requests that are not printed yet; the waiting ones may be cut off."""
        requests = self._record.requests
        open_requests = [requests[i] for i in range(len(requests)) if i not in self._printed]
        # At work first: what waits has nothing to show.
        open_requests.sort(key=lambda request: request.stage == "waiting")
        room = max(1, self._console.height - TABLE_LINES)
        table = Table(title=self._title(), title_justify="left", expand=True)
        table.add_column("request", no_wrap=True, overflow="ellipsis", ratio=2)
        table.add_column("prompt", justify="right", no_wrap=True)
        table.add_column("new", justify="right", no_wrap=True)
        table.add_column("text", no_wrap=True, overflow="ignore", ratio=5)
        for request in open_requests[:room]:
            table.add_row(
                Text(request.name),
                f"{request.prompt_tokens:,}",
                f"{len(request.tokens):,}",
                self._progress_of(request),
            )
        hidden = len(open_requests) - room
        return Group(table, Text(f"and {hidden} more" if hidden > 0 else "", style="dim"))

    def _title(self) -> str:
        record = self._record
        return (
            f"{len(self._printed)} of {len(record.requests)} done, "
            f"step {record.steps:,}, {record.output_tokens:,} new tokens"
        )

    def _progress_of(self, request: RequestRecord) -> RenderableType:
        """A bar in prefill, the end of the text while decoding."""
        if request.stage == "prefill":
            return ProgressBar(total=request.prefill_total, completed=request.prefill_done)
        if request.stage == "waiting":
            return Text("waiting", style="dim")
        return TextEnd(self._decode, request.tokens)


class TextEnd:
    """As much of the end of a text as its table cell is wide."""

    def __init__(self, decode: Decode, tokens: Sequence[int]) -> None:
        """`tokens` is the whole text so far."""
        self._decode = decode
        self._tokens = tokens

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """One line."""
        yield Text(last_line(self._decode, self._tokens, options.max_width), no_wrap=True)


def heading(request: RequestRecord) -> str:
    """One line that says whose text follows, and why it ended."""
    return (
        f"==> {request.name}: {request.prompt_tokens:,} prompt tokens, "
        f"{len(request.tokens):,} new, {request.finish_reason or 'interrupted'} <=="
    )
