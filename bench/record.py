"""What every benchmark result says about where it came from."""

import json
import sys
from pathlib import Path
from typing import Any

import jax

from dhisparse_jax.cli.machine import first_line
from dhisparse_jax.cli.report import document_text

RESULTS = Path(__file__).parent / "results"


def environment() -> dict[str, str]:
    """Device, driver, JAX version, commit and command of this run."""
    device = jax.devices()[0]
    return {
        "device": device.device_kind,
        "driver": first_line("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"),
        "jax": jax.__version__,
        "commit": first_line("git", "rev-parse", "--short", "HEAD"),
        "command": " ".join(["python", "-m", f"bench.{Path(sys.argv[0]).stem}", *_arguments()]),
    }


def _arguments() -> list[str]:
    """Arguments of the command; of a path that starts at the root, only the last part."""
    return [Path(word).name if Path(word).is_absolute() else word for word in sys.argv[1:]]


def write(document: dict[str, Any], path: Path | None) -> None:
    """Write a result where it was asked for, and print it as the last line."""
    save(document, path)
    print(json.dumps(document))


def save(document: dict[str, Any], path: Path | None) -> None:
    """Write a result, or as much of it as there is yet, where it was asked for."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(document_text(document, allow_nan=True))
