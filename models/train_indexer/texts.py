"""Texts of the model's whole context: what indexers are fitted on, and what they are judged by.

Sources of the standard library without the modules that `models.train.corpus` leaves out, and the
help texts of `pydoc_data`, which are CPython's language reference as prose, without every fourth of
them. Every machine with Python has both.
"""

import importlib
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import numpy as np
from jaxtyping import Int

from dhisparse_jax.errors import UserError
from dhisparse_jax.models.llama.words import Words
from dhisparse_jax.models.train.corpus import SEPARATOR, load_corpus

PROSE = "language reference"
"""What the left-out help texts are called."""

_PROSE_EVERY = 4
"""One text in so many is prose; and one help text in so many is left out."""

Tokens = Int[np.ndarray, " length"]


class Texts(NamedTuple):
    """Token ids, texts of one length.

    Attributes:
        train: To fit on.
        left_out: By name: the beginnings of modules that have as many tokens, and prose.
        digest: SHA-256 of the sources.
    """

    train: list[Tokens]
    left_out: dict[str, Tokens]
    digest: str


def load_texts(words: Words, *, count: int, length: int, seed: int) -> Texts:
    """Texts of `length` tokens, `count` of them to fit on, the same ones for a seed.

    Raises:
        UserError: there is not enough text.
    """
    corpus = load_corpus()
    prose = importlib.import_module("pydoc_data.topics").topics
    documents = bytes(corpus.stream).decode().split(chr(SEPARATOR))[1:-1]
    kept = [text for place, text in enumerate(_in_order(prose)) if place % _PROSE_EVERY]
    rng = np.random.default_rng(seed)
    sources = {
        True: _filled(words, [kept[at] for at in rng.permutation(len(kept))], length),
        False: _filled(words, [documents[at] for at in rng.permutation(len(documents))], length),
    }
    try:
        train = [next(sources[at % _PROSE_EVERY == 1]) for at in range(count)]
    except StopIteration:
        raise UserError(f"there is no text for {count} times {length} tokens: take fewer") from None
    modules = {name: text.decode() for name, text in corpus.evaluation.items()}
    left_out = {
        name: np.asarray(tokens[:length], np.int32)
        for name, text in modules.items()
        if len(tokens := words.encode(text)) >= length
    }
    others = [text for place, text in enumerate(_in_order(prose)) if place % _PROSE_EVERY == 0]
    left_out[PROSE] = next(_filled(words, others, length))
    return Texts(train, left_out, corpus.digest)


def _in_order(prose: Mapping[str, str]) -> list[str]:
    return [prose[name] for name in sorted(prose)]


def _filled(words: Words, documents: list[str], length: int) -> Iterator[Tokens]:
    """Texts that begin where a document does, and go on with others until they are full."""
    text: list[int] = []
    for document in documents:
        text.extend(words.encode(document))
        if len(text) >= length:
            yield np.asarray(text[:length], np.int32)
            text = []
