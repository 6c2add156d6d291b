"""Command: `python -m dhisparse_jax.models.train_indexer --model smollm2 --out DIR`.

Fits lightning indexers to a model that attends to everything. The model itself stays as it is.
"""

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from dhisparse_jax.configs.llama import FittedConfig, LlamaConfig, grouped
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.llama.load import PACKAGED, load_gguf, packaged
from dhisparse_jax.models.train_indexer.config import FitConfig
from dhisparse_jax.models.train_indexer.loop import Fit
from dhisparse_jax.models.train_indexer.texts import load_texts


def parse_arguments(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m dhisparse_jax.models.train_indexer", description=__doc__
    )
    model = parser.add_mutually_exclusive_group(required=True)
    model.add_argument("--gguf", type=Path, help="file of a Llama-like model")
    model.add_argument("--model", choices=sorted(PACKAGED), help="one that a package carries")
    parser.add_argument("--out", type=Path, required=True, help="folder to write to, or go on in")
    parser.add_argument("--layers", type=int, default=5, help="layers that share a selection")
    parser.add_argument("--heads", type=int, default=4, help="heads of index queries")
    parser.add_argument("--width", type=int, default=64, help="numbers of an index key")
    parser.add_argument("--length", type=int, help="tokens of a text; the full context if left out")
    parser.add_argument("--texts", type=int, default=5, help="texts to fit on")
    parser.add_argument("--queries", type=int, default=256, help="kept of each text")
    parser.add_argument("--batch", type=int, default=64, help="queries of an update")
    parser.add_argument("--steps", type=int, default=300, help="updates of every indexer")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(arguments)


def configure(options: argparse.Namespace, model: LlamaConfig) -> FitConfig:
    """Settings of the run that the options describe."""
    length = options.length or model.context
    if not 0 < length <= model.context:
        raise UserError(f"texts of {length} tokens; the model's context is {model.context}")
    return FitConfig(
        fitted=FittedConfig(
            hidden_size=model.hidden_size,
            layers_per_group=grouped(model.num_layers, options.layers),
            index_heads=options.heads,
            index_dim=options.width,
            qk_rope_dim=options.width // 2,
            rope_theta=model.rope_theta,
        ),
        length=length,
        seed=options.seed,
        texts=options.texts,
        queries=options.queries,
        batch=options.batch,
        steps=options.steps,
    )


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the fit; returns the exit code: 2 for an error that the user can act on."""
    options = parse_arguments(arguments)
    # Imported packages may have set up the root logger already.
    logging.basicConfig(
        stream=sys.stdout, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", force=True
    )
    logging.getLogger("dhisparse_jax").setLevel(logging.INFO)
    try:
        path = options.gguf or packaged(options.model)
        loaded = load_gguf(path)
        config = configure(options, loaded.model.config)
        texts = load_texts(loaded.words, count=config.texts, length=config.length, seed=config.seed)
        Fit(config, loaded, path.name, texts, options.out).run()
    except UserError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
