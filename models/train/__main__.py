"""Command: `python -m dhisparse_jax.models.train --preset tiny --out DIR`."""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

import jax

from dhisparse_jax.configs import GLM_PRESETS
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.train.config import TrainConfig, smoke_config
from dhisparse_jax.models.train.corpus import load_corpus
from dhisparse_jax.models.train.loop import Trainer
from dhisparse_jax.models.train.progress import Clock


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m dhisparse_jax.models.train", description=__doc__
    )
    parser.add_argument("--preset", choices=["tiny"], default="tiny", help="model to train")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to")
    parser.add_argument(
        "--corpus", type=Path, help="folder of Python sources; the standard library if left out"
    )
    parser.add_argument(
        "--budget-seconds", type=float, default=500.0, help="wall time of the whole run"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--attention",
        choices=["auto", "cudnn", "xla"],
        default="auto",
        help="kernel of dense attention",
    )
    parser.add_argument("--dropout", type=float, default=0.1, help="of residual updates")
    parser.add_argument("--smoke", action="store_true", help="three short steps of each phase")
    return parser.parse_args(arguments)


def configure(options: argparse.Namespace) -> TrainConfig:
    """Settings of the run that the options describe."""
    model = GLM_PRESETS[options.preset]
    if options.smoke:
        return smoke_config(model, seed=options.seed)
    return TrainConfig(
        model=model,
        seed=options.seed,
        budget_seconds=options.budget_seconds,
        compute_dtype="bfloat16" if jax.default_backend() == "gpu" else "float32",
        attention=options.attention,
        dropout=options.dropout,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the training; returns the exit code: 2 for an error that the user can act on."""
    options = parse_arguments(arguments)
    # Imported packages may have set up the root logger already.
    logging.basicConfig(
        stream=sys.stdout, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", force=True
    )
    logging.getLogger("dhisparse_jax").setLevel(logging.INFO)
    try:
        config = configure(options)
        clock = Clock(config.budget_seconds)
        options.out.mkdir(parents=True, exist_ok=True)
        Trainer(config, load_corpus(options.corpus), options.out, clock).run()
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
