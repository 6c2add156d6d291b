"""The tables at the end of a run. Knows nothing about engines or terminals."""

from rich.table import Table
from rich.text import Text

from dhisparse_jax.cli.record import RunRecord
from dhisparse_jax.cli.report import Setting
from dhisparse_jax.engine.memory import Sizes

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def hierarchy_table(setting: Setting, record: RunRecord, sizes: Sizes) -> Table:
    """What the hierarchy held, selected and fetched, and how fast that was."""
    table = Table(title="What the hierarchy did", title_justify="left", show_header=False)
    table.add_column("quantity", style="cyan", no_wrap=True)
    table.add_column("value", justify="right")
    rows = _what(setting) + _held(sizes) + _moved(record) + _speed(record)
    for name, value in rows:
        table.add_row(name, Text(value))
    return table


def request_table(record: RunRecord) -> Table:
    """One line a request: its lengths, and why it ended."""
    table = Table(title="Requests", title_justify="left")
    table.add_column("request", no_wrap=True, overflow="ellipsis")
    table.add_column("prompt tokens", justify="right")
    table.add_column("new tokens", justify="right")
    table.add_column("ended by")
    for request in record.requests:
        table.add_row(
            Text(request.name),
            f"{request.prompt_tokens:,}",
            f"{len(request.tokens):,}",
            request.finish_reason or "",
        )
    return table


def size_text(count: int) -> str:
    """Bytes in the largest binary unit that leaves at least 1. In: 2560, out: "2.5 KiB"."""
    value, unit = float(count), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    return f"{value:.1f} {_UNITS[unit]}" if unit else f"{count} B"


def _what(setting: Setting) -> list[tuple[str, str]]:
    return [
        ("model", setting.model),
        ("policy", setting.policy),
        ("draft", setting.draft),
        ("rows", setting.kv_format),
        ("index keys", setting.index_format),
        ("mesh", setting.mesh),
        ("backend", f"{setting.backend}, jax {setting.jax_version}"),
    ]


def _held(sizes: Sizes) -> list[tuple[str, str]]:
    return [
        ("host pools", size_text(sizes.host_bytes)),
        ("hot pools", size_text(sizes.hot_bytes)),
        ("tails", size_text(sizes.tail_bytes)),
    ]


def _moved(record: RunRecord) -> list[tuple[str, str]]:
    return [
        ("selected rows", f"{record.totals.selected_rows:,}"),
        ("fetched rows", f"{record.totals.fetched_rows:,}"),
        ("fetched share", f"{record.fetched_share:.2%}"),
        ("host bytes read", size_text(record.totals.host_bytes_read)),
    ]


def _speed(record: RunRecord) -> list[tuple[str, str]]:
    return [
        ("steps", f"{record.steps:,}"),
        ("tokens per step and request", f"{record.acceptance.length:.2f}"),
        ("output tokens", f"{record.output_tokens:,}"),
        ("seconds", f"{record.seconds:.1f}"),
        ("  in prefill", f"{record.prefill_seconds:.1f}"),
        ("  in decode", f"{record.decode_seconds:.1f}"),
        ("    of it by the draft", f"{record.draft_seconds or 0.0:.1f}"),
        ("tokens/s", f"{record.tokens_per_s:.1f}"),
        ("  after the first step", f"{record.steady_tokens_per_s:.1f}"),
    ]
