"""Command: `python -m dhisparse_jax.models.train_draft --draft dflash2 --out DIR`."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from dhisparse_jax.errors import UserError
from dhisparse_jax.models.checkpoint import load_checkpoint
from dhisparse_jax.models.glm.model import GlmModel
from dhisparse_jax.models.registry import BUNDLED
from dhisparse_jax.models.train.corpus import load_corpus
from dhisparse_jax.models.train_draft.config import (
    DraftTrainConfig,
    bundled_draft,
    smoke_config,
)
from dhisparse_jax.models.train_draft.loop import DraftTrainer


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m dhisparse_jax.models.train_draft", description=__doc__
    )
    parser.add_argument("--draft", choices=["dflash", "dflash2", "dspark"], required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder to write to, or go on in")
    parser.add_argument(
        "--data", type=Path, help="file of continuations, shared by drafts; OUT's own if left out"
    )
    parser.add_argument(
        "--begin-with", type=Path, help="checkpoint of another draft, such as a DFlash's"
    )
    parser.add_argument(
        "--corpus", type=Path, help="folder of Python sources; the standard library if left out"
    )
    parser.add_argument("--minutes", type=float, default=6.0, help="wall time of the whole run")
    parser.add_argument("--rate", type=float, default=2e-3, help="highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--smoke", action="store_true", help="two short updates")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the training; returns the exit code: 2 for an error that the user can act on."""
    options = parse_arguments(arguments)
    # Imported packages may have set up the root logger already.
    logging.basicConfig(
        stream=sys.stdout, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", force=True
    )
    logging.getLogger("dhisparse_jax").setLevel(logging.INFO)
    try:
        _, target = load_checkpoint(BUNDLED["tiny"])
        assert isinstance(target, GlmModel)  # what is bundled
        draft = bundled_draft(options.draft, target.config)
        if options.smoke:
            config = smoke_config(draft, seed=options.seed)
        else:
            config = DraftTrainConfig(
                draft=draft,
                seed=options.seed,
                seconds=60 * options.minutes,
                rate=options.rate,
                compute_dtype="bfloat16" if jax.default_backend() == "gpu" else "float32",
            )
        data = options.data or options.out / "continuations.npz"
        corpus = load_corpus(options.corpus)
        DraftTrainer(config, target, corpus, options.out, data, options.begin_with).run()
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
