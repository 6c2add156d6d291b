"""`dhisparse convert`: a published checkpoint as one that loads faster, and without its files."""

import os
from pathlib import Path

import typer

from dhisparse_jax.cli import checkpoint_options as own
from dhisparse_jax.cli import options as opt
from dhisparse_jax.cli.interrupt import INTERRUPTED
from dhisparse_jax.cli.report import json_line


def convert(
    source: own.SourceDir,
    target: own.TargetDir,
    dtype: own.ConvertDtype = None,
    experts: opt.Experts = opt.ExpertsName.STORED,
) -> None:
    """Write a Hugging Face checkpoint as an Orbax checkpoint, which every command takes as --model.

    The target appears when it is whole: an interrupted conversion leaves only a folder with
    .partial at the end of its name, which no command loads and the next conversion replaces.

    The last line of standard output is one JSON object with arrays, bytes, expert_format and
    unused_tensors, the names of the tensors that the model has no use for.
    """
    import jax.numpy as jnp

    from dhisparse_jax.models.convert import convert as run

    try:
        written = run(
            Path(source),
            Path(target),
            dtype=None if dtype is None else jnp.dtype(dtype.value),
            stored_experts=experts is opt.ExpertsName.STORED,
        )
    except KeyboardInterrupt:
        # Threads of Orbax that still write would abort the process, and say so, where it ends.
        os._exit(INTERRUPTED)
    typer.echo(
        f"{target}: {written.arrays} weights, {written.bytes / 2**30:.2f} GiB, experts "
        f"{written.expert_format}; {len(written.unused)} tensors are not used"
    )
    document = written._asdict()
    document["unused_tensors"] = document.pop("unused")
    typer.echo(json_line(document))
