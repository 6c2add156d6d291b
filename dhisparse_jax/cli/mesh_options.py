"""The options of several devices and processes, as `options` has the others."""

import dataclasses
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from dhisparse_jax.cli.meeting import STARTING_SECONDS
from dhisparse_jax.cli.prompts import Prompt
from dhisparse_jax.errors import UserError
from dhisparse_jax.mesh import MeshShape

if TYPE_CHECKING:
    from jax.sharding import Mesh

DEVICES = "Devices"


@dataclass(frozen=True)
class MeshOptions:
    """Devices and processes, as given.

    Attributes:
        mesh: of the devices; None: the first one alone.
        coordinator: address of the first process; None: there is no other.
        process: number of this process and of all, as in 0/2; None likewise.
    """

    mesh: str | None = None
    coordinator: str | None = None
    process: str | None = None

    def check(self, batch: int | None, recording: Path | None) -> None:
        """Whether what is asked for can be, as far as nobody has looked at devices.

        Args:
            batch: requests at the same time.
            recording: where selections are to be recorded.

        Raises:
            UserError: there is no such mesh, it does not divide the batch or cannot be recorded,
                or the options of processes do not go together.
        """
        if (self.coordinator is None) != (self.process is None):
            raise UserError("--coordinator and --process go together; give both, or none")
        if self.mesh is None:
            if self.coordinator is not None:
                raise UserError("several processes need --mesh, as in --mesh data=2")
            return
        shape = MeshShape.parse(self.mesh)
        if batch is not None:
            shape.rows(batch)
        if recording is not None:
            raise UserError("--record-selections records one device; leave --mesh out")

    @property
    def number(self) -> int:
        """Number of this process."""
        return 0 if self.process is None else int(self.process.partition("/")[0])


NO_MESH_OPTIONS = MeshOptions()


def process(value: str | None) -> str | None:
    """Refuse what is not a number, a slash, and a number above it."""
    if value is not None:
        number, _, count = value.partition("/")
        if not (number.isdecimal() and count.isdecimal() and int(number) < int(count)):
            raise typer.BadParameter(f"{value} is not the number of a process and of all, as 0/2")
    return value


def address(value: str | None) -> str | None:
    """Refuse what is no host with a port."""
    if value is not None:
        host, _, port = value.rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
            raise typer.BadParameter(f"{value} is no address with a port, as in localhost:1234")
    return value


MeshText = Annotated[
    str | None,
    typer.Option(
        "--mesh",
        metavar="data=N,expert=N",
        help="Devices to spread the work over. Requests go to all of them, each with pools of its "
        "own; routed experts are spread over the devices of axis expert, and every place of axis "
        "data has all weights. Tokens are the same. Default: one device.",
        rich_help_panel=DEVICES,
    ),
]
Coordinator = Annotated[
    str | None,
    typer.Option(
        "--coordinator",
        metavar="HOST:PORT",
        callback=address,
        help="Where process 0 listens, if the devices of the mesh are those of several processes. "
        "All are given the same options; process 0 prints the texts.",
        rich_help_panel=DEVICES,
    ),
]
Process = Annotated[
    str | None,
    typer.Option(
        "--process",
        metavar="I/N",
        callback=process,
        help="Which of how many processes this one is.",
        rich_help_panel=DEVICES,
    ),
]


def start(options: MeshOptions, told: Mapping[str, object]) -> "Mesh | None":
    """Meet the other processes, if there are any, see that all were told the same; the devices.

    Args:
        options: who and where they are.
        told: what they were told, by name.

    Raises:
        UserError: they do not come, or were told otherwise, or there are too few devices.
    """
    if options.process is not None:
        _meet(options, told)
    return None if options.mesh is None else MeshShape.parse(options.mesh).mesh()


OWN = ("json", "record_selections", "trace_dir", "devices", "prompt_files")
"""Fields of a command's options that every process may have to itself."""

OPTIONS = {
    "rows": "kv-format",
    "keys": "index-format",
    "record": "record-selections",
    "name": "draft",
    "length": "draft-length",
    "auto": "draft-length auto",
}
"""The options that fields have other names than."""


def told(options: object, devices: MeshOptions, prompts: Sequence[Prompt]) -> dict[str, object]:
    """What all processes have to be told alike, by option; as many items whatever they are told.

    Args:
        options: of the command, with parts that are options too.
        devices: what is said of devices.
        prompts: what they continue.
    """
    found: dict[str, object] = {
        "--mesh": devices.mesh,
        "the number of prompts": len(prompts),
        "prompts": [prompt.data for prompt in prompts],
    }
    for name, value in vars(options).items():
        parts = vars(value) if dataclasses.is_dataclass(value) else {name: value}
        known = {part: given for part, given in parts.items() if name not in OWN}
        found |= {
            f"--{OPTIONS.get(part, part.replace('_', '-'))}": given for part, given in known.items()
        }
    return found


def _meet(options: MeshOptions, told: Mapping[str, object]) -> None:
    import jax

    from dhisparse_jax.engine.agree import agree

    number, count = (int(part) for part in str(options.process).split("/"))
    try:
        jax.distributed.initialize(
            options.coordinator, count, number, initialization_timeout=STARTING_SECONDS
        )
    except (RuntimeError, ValueError) as error:
        reason = str(error).splitlines()[0]
        raise UserError(f"process {options.process} at {options.coordinator}: {reason}") from error
    agree(told)


def consoles(options: MeshOptions) -> tuple[Console, Console]:
    """Of standard output and of standard error; only the first process prints."""
    if options.number:
        silent = open(os.devnull, "w")  # noqa: SIM115  # as long as the process
        return Console(file=silent), Console(file=silent)
    return Console(), Console(stderr=True)
