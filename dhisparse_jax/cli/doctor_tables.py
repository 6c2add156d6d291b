"""What `dhisparse doctor` prints. Knows only the document."""

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from dhisparse_jax.cli.tables import size_text

Document = Mapping[str, Any]


def print_document(console: Console, document: Document) -> None:
    """Everything that was found, then what to change."""
    for table in (_machine(document), _kernels(document), _reads(document)):
        console.print(table)
    console.print(document["meaning"], highlight=False)
    for line in document["advice"] or ["nothing to change"]:
        console.print(f"- {line}", highlight=False, markup=False)


def _machine(document: Document) -> Table:
    table = Table(title="The machine", title_justify="left", show_header=False)
    table.add_column("what", style="cyan", no_wrap=True)
    table.add_column("value")
    for name, version in document["versions"].items():
        table.add_row(name, version or "none")
    for device in document["devices"]:
        limit = device["memory_limit_bytes"]
        known = f", {size_text(limit)} for JAX" if limit else ""
        kinds = ", ".join(device["memory_kinds"])
        table.add_row(f"device {device['id']}", f"{device['kind']}{known}; memory kinds {kinds}")
    host = document["host"]
    table.add_row("host memory", f"{size_text(host['free_bytes'])} free of {_total(host)}")
    table.add_row("host pools in", host["pools_memory_kind"])
    if host["pinned_limit_bytes"] is not None:
        table.add_row("pinned memory", f"at most {size_text(host['pinned_limit_bytes'])}")
    for name, value in (document["rates"] or {}).items():
        table.add_row(*_rate(name, value))
    return table


def _total(host: Document) -> str:
    return size_text(host["memory_bytes"])


def _rate(name: str, value: float) -> tuple[str, str]:
    label, unit = {
        "hbm_gbps": ("device memory", "GB/s, read and written"),
        "h2d_gbps": ("link, one copy", "GB/s, host to device"),
        "bf16_tflops": ("matrix product", "TFLOP/s, bfloat16"),
        "launch_us": ("kernel launch", "us"),
    }[name]
    return label, f"{value:,.4g} {unit}"


def _kernels(document: Document) -> Table:
    """A line for each operation and implementation, with the formats that get it."""
    table = Table(title="What runs each operation", title_justify="left")
    for name in ("operation", "history in", "runs", "why"):
        table.add_column(name)
    formats: dict[tuple[str, str, str], list[str]] = {}
    for choice in document["kernels"]:
        key = choice["operation"], choice["backend"], choice["why"]
        formats.setdefault(key, []).append(choice["format"])
    for (operation, backend, why), stored in sorted(formats.items()):
        table.add_row(operation, ", ".join(stored), backend, why)
    return table


def _reads(document: Document) -> Table:
    """Rates of reading random records, a line for each size."""
    spans = sorted({rate["span_bytes"] for rate in document["reads"]})
    table = Table(title="Random records of host memory, GB/s", title_justify="left")
    table.add_column("record")
    for span in spans:
        table.add_column(f"over {size_text(span)}", justify="right")
    found = {(rate["record_bytes"], rate["span_bytes"]): rate for rate in document["reads"]}
    for size in sorted({rate["record_bytes"] for rate in document["reads"]}):
        cells = [f"{found[size, span]['gbps']:.1f}" for span in spans]
        table.add_row(f"{size:,} B", *cells)
    for left in document["spans_left_out"]:
        table.caption = f"not over {size_text(left['span_bytes'])}: {left['why']}"
    return table
