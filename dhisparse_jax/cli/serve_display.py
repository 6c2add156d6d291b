"""What a person sees while a trace is replayed: a live table, or a line a sample elsewhere."""

from typing import Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from dhisparse_jax.cli.serving import Sample, ServingRecord

REFRESHES_PER_SECOND = 4
# Lines that the live table uses beside its rows: head, rules, the line below.
TABLE_LINES = 6

_COLUMNS = (
    *("s", "running", "waiting", "tokens/s", "TPOT p50", "p95 ms"),
    *("resident", "fetched", "link GB/s", "accepted"),
)


class ServeDisplay:
    """Shows samples as they come. Entered before the first event, left after the last."""

    def __init__(self, record: ServingRecord, total: int, console: Console) -> None:
        """`total` requests are to come; `console` is standard error."""
        self._record, self._total, self._console = record, total, console
        self._printed = 0
        self._live = Live(
            get_renderable=self._render,
            console=console,
            refresh_per_second=REFRESHES_PER_SECOND,
            transient=True,
        )

    def __enter__(self) -> Self:
        if self._console.is_terminal:
            self._live.start()
        return self

    def __exit__(self, *_error: object) -> None:
        if self._console.is_terminal:
            self._live.stop()

    def show(self) -> None:
        """Print new samples where there is no terminal; the live table redraws itself."""
        if self._console.is_terminal:
            return
        for sample in self._record.samples[self._printed :]:
            named = zip(_COLUMNS, cells(sample), strict=True)
            line = ", ".join(f"{name} {value}" for name, value in named)
            self._console.print(Text(line), soft_wrap=True)
        self._printed = len(self._record.samples)

    def _render(self) -> RenderableType:
        room = max(1, self._console.height - TABLE_LINES)
        return Group(samples_table(self._record.samples[-room:]), Text(self._progress()))

    def _progress(self) -> str:
        served = self._record.requests.values()
        ended = sum(item.finish_reason is not None for item in served)
        tokens = sum(item.tokens for item in served)
        return f"{ended} of {self._total} requests ended, {tokens:,} tokens"


def samples_table(samples: list[Sample]) -> Table:
    """A line a sample."""
    table = Table(title="Serving", title_justify="left")
    for name in _COLUMNS:
        table.add_column(name, justify="right", no_wrap=True)
    for sample in samples:
        table.add_row(*cells(sample))
    return table


def cells(sample: Sample) -> list[str]:
    """The values of a sample, by column."""
    milliseconds = lambda value: "-" if value is None else f"{value:.1f}"
    return [
        f"{sample.seconds:.1f}",
        f"{sample.running}",
        f"{sample.waiting}",
        f"{sample.tokens_per_s:.1f}",
        milliseconds(sample.tpot_p50_ms),
        milliseconds(sample.tpot_p95_ms),
        f"{sample.resident_share:.1%}",
        f"{sample.fetched_share:.2%}",
        f"{sample.link_gb_per_s:.3f}",
        f"{sample.accept_length:.2f}",
    ]


def summary_table(summary: dict[str, object], bound: float | None) -> Table:
    """What the whole replay did; `bound` in milliseconds."""
    table = Table(title="Replay", title_justify="left", show_header=False)
    table.add_column("quantity", style="cyan", no_wrap=True)
    table.add_column("value", justify="right")
    for name, value in summary.items():
        text = f"{value:,.1f}" if isinstance(value, float) else str(value)
        table.add_row(name.replace("_", " "), Text("-" if value is None else text))
    if bound is not None:
        table.add_row("bound on TPOT, ms", Text(f"{bound:,.1f}"))
    return table
