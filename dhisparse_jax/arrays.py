"""Named host arrays in a folder, through Orbax. Knows nothing about what they are."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Sharding

DATA_FILE_BYTES = 4 * 2**20
"""Orbax fills data files up to about this size; small enough for hosts that limit file sizes."""

Shapes = Mapping[str, tuple[int, ...]]
"""The shape of each array, by its name."""

Place = Callable[[str, tuple[int, ...]], Sharding]
"""Where an array goes, from its name and shape."""


def save_arrays(path: Path, arrays: Mapping[str, Any], file_bytes: int = DATA_FILE_BYTES) -> None:
    """Writes arrays as an Orbax folder, replacing the one at `path`.

    Args:
        path: the folder.
        arrays: by name.
        file_bytes: about how large a file of it becomes at most.
    """
    import orbax.checkpoint as ocp  # takes longer to import than everything else together

    path = path.absolute()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Host arrays, so that the files say nothing about devices.
    hosts = {name: np.asarray(array) for name, array in arrays.items()}
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        checkpointer.save(
            path,
            args=ocp.args.PyTreeSave(hosts, ocdbt_target_data_file_size=file_bytes),
            force=True,
        )


def load_arrays(
    path: Path,
    check: Callable[[Shapes], None] = lambda _: None,
    place: Place | None = None,
    cast: Callable[[str, np.dtype], np.dtype] = lambda name, stored: stored,
) -> dict[str, Any]:
    """The arrays of a folder.

    Args:
        path: what `save_arrays` wrote.
        check: told all shapes before anything is read; may refuse them.
        place: where each array goes; None: they are NumPy's.
        cast: what an array becomes that goes somewhere, from its name and stored dtype.

    Raises:
        FileNotFoundError: there is no folder.
        ValueError: it is damaged; says why in one line.
    """
    import orbax.checkpoint as ocp

    path = path.absolute()
    if not path.is_dir():
        raise FileNotFoundError(path)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        try:
            found = checkpointer.metadata(path).item_metadata.tree
            check({name: tuple(leaf.shape) for name, leaf in found.items()})
            args = {
                name: ocp.RestoreArgs(restore_type=np.ndarray)
                if place is None
                else ocp.ArrayRestoreArgs(
                    restore_type=jax.Array,
                    sharding=place(name, tuple(leaf.shape)),
                    dtype=cast(name, np.dtype(leaf.dtype)),
                )
                for name, leaf in found.items()
            }
            return checkpointer.restore(path, args=ocp.args.PyTreeRestore(restore_args=args))
        # Orbax and TensorStore have no error class for damaged files.
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            reason = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise ValueError(reason) from error
