"""Sizes of DeepSeek-V4.1: entries that layers share, selections that they share, Engram, mHC.

Knows what a valid model of the family is; knows nothing about arrays, files or devices.
"""

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from dhisparse_jax.configs.deepseek_v4 import V4Config, V4Sizes
from dhisparse_jax.configs.formats import HISTORY_FORMATS
from dhisparse_jax.configs.quantised import FLOAT, FORMATS
from dhisparse_jax.errors import UserError

LARGEST_BUCKETS = 2**24
"""Rows of a table that one n-gram can hit: what 32 bits leave of a number, 8 bits at a time."""


@dataclass(frozen=True, kw_only=True)
class V41Config(V4Sizes):
    """Sizes and constants of one model.

    A layer with entries attends to those of the last source at or before it, which is one of
    `entry_sources`; what it selects of them is what the last one of `index_sources` selected.

    Attributes:
        rates: Positions per entry that each layer attends to; 0: none, its window alone.
        entry_sources: Layers that make entries, and index keys.
        index_sources: Layers that select; all sources of entries are among them.
        candidate_source: The layer whose scores leave blocks of entries to the sources of
            selections that follow it; None: there is none.
        candidate_blocks: How many.
        candidate_block: Entries of a block.
        engram_layers: Layers before which n-grams of the text are looked up in a table.
        engram_order: Tokens of the longest n-gram; the shortest has two.
        engram_heads: Rows of the table that each n-gram is looked up in.
        engram_dim: Numbers of a row.
        engram_buckets: The numbers of rows that a head hits are the next primes from here on.
        engram_rows: Rows of the table of each of `engram_layers`: the sums of these primes.
        engram_vocab: Ids of the tokens after those that spell the same word are made one.
        engram_pad_id: Token that stands before a text.
        table_format: Format of these tables, if they stay quantised (`configs.quantised`).
        row_formats: Formats that its history can have.
        rotates_keys: Whether index keys in fp8 are multiplied by the Hadamard matrix.

    Raises:
        UserError: A size that no model of the family can have.
    """

    rates: tuple[int, ...]
    entry_sources: tuple[int, ...]
    index_sources: tuple[int, ...]
    candidate_source: int | None = None
    candidate_blocks: int = 2048
    candidate_block: int = 8

    engram_layers: tuple[int, ...] = ()
    engram_order: int = 4
    engram_heads: int = 8
    engram_dim: int = 256
    engram_buckets: int = 16_000_000
    engram_rows: tuple[int, ...] = ()
    engram_vocab: int = 99_092
    engram_pad_id: int = 2
    table_format: str = FLOAT

    row_formats: ClassVar[tuple[str, ...]] = HISTORY_FORMATS
    rotates_keys: ClassVar[bool] = False

    def __post_init__(self) -> None:
        """Checks every size; raises UserError on the first that cannot be."""
        self.check_sizes({"engram_pad_id", "candidate_source"})
        _check_layers(self)
        _check_sources(self)
        _check_engram(self)

    @property
    def num_layers(self) -> int:
        """Number of layers."""
        return len(self.rates)

    @property
    def groups(self) -> tuple[tuple[int, ...], ...]:
        """Runs of layers that attend to the same entries; those before the first belong to it."""
        ends = [*self.entry_sources[1:], self.num_layers]
        starts = [0, *self.entry_sources[1:]]
        return tuple(tuple(range(a, b)) for a, b in zip(starts, ends, strict=True))

    @property
    def engram_columns(self) -> int:
        """Rows of a table that are looked up per token."""
        return (self.engram_order - 1) * self.engram_heads

    def engram_primes(self) -> tuple[tuple[int, ...], ...]:
        """How many rows each head hits, for each of `engram_layers`: n-gram by n-gram.

        Primes that follow each other, none twice (Cheng et al., 2026, "Conditional Memory via
        Scalable Lookup", and DeepSeek-V4.1).
        """
        return table_primes(self.engram_buckets, self.engram_columns, len(self.engram_layers))


def table_primes(buckets: int, columns: int, tables: int) -> tuple[tuple[int, ...], ...]:
    """How many rows each head of several tables hits; see `V41Config.engram_primes`."""
    primes = _primes_from(buckets)
    return tuple(tuple(itertools.islice(primes, columns)) for _ in range(tables))


SinceV4 = V4Config | V41Config
"""What is known of any model since DeepSeek-V4."""


def _check_layers(config: V41Config) -> None:
    """Raises UserError where a list of layers names one that there is not, or is not ascending."""
    for name in ("entry_sources", "index_sources", "engram_layers"):
        layers: tuple[int, ...] = getattr(config, name)
        inside = all(0 <= layer < config.num_layers for layer in layers)
        if not inside or sorted(set(layers)) != list(layers):
            raise UserError(
                f"{name} is {list(layers)}; it must be ascending layers of {config.num_layers}"
            )


def _check_sources(config: V41Config) -> None:
    """Raises UserError where layers have entries without a source, or sources without a rate."""
    sources = config.entry_sources
    if not sources:
        raise UserError("entry_sources names no layer, so there is nothing to select")
    if set(sources) - set(config.index_sources):
        raise UserError(f"index_sources {list(config.index_sources)} lacks a source of entries")
    for source, layers in zip(sources, config.groups, strict=True):
        own, before = config.rates[source], [layer for layer in layers if layer < source]
        if own < 1 or any(config.rates[layer] != own for layer in layers if layer > source):
            raise UserError(
                f"rates of layers {source} to {layers[-1]}, which share entries, differ"
            )
        if any(config.rates[layer] for layer in before):
            raise UserError(f"a layer before {source} has a rate, but nothing makes its entries")
        if any(layer < source for layer in set(config.index_sources) & set(layers)):
            raise UserError(f"a layer before {source} selects, but nothing makes its entries")
    if config.candidate_source not in (None, sources[-1]):
        raise UserError(
            f"candidate_source is {config.candidate_source}; only the last source of entries, "
            f"{sources[-1]}, is supported"
        )
    room = config.candidate_blocks * config.candidate_block
    if config.candidate_source is not None and room < config.index_top_k:
        raise UserError(
            f"{config.candidate_blocks} blocks of {config.candidate_block} entries are fewer than "
            f"the {config.index_top_k} that a query selects"
        )


def _check_engram(config: V41Config) -> None:
    """Raises UserError where tables of n-grams cannot have these sizes."""
    if config.table_format not in (FLOAT, *FORMATS):
        raise UserError(f"table_format is {config.table_format!r}; use one of {', '.join(FORMATS)}")
    if not config.engram_layers:
        return
    if config.engram_order < 2:
        raise UserError(f"engram_order is {config.engram_order}; an n-gram has two tokens or more")
    if not config.engram_pad_id < config.vocab_size >= config.engram_vocab:
        raise UserError(
            f"engram_pad_id {config.engram_pad_id} and engram_vocab {config.engram_vocab} do not "
            f"fit {config.vocab_size} tokens"
        )
    primes = config.engram_primes()
    if max(map(max, primes)) > LARGEST_BUCKETS:
        raise UserError(
            f"engram_buckets is {config.engram_buckets}; heads of up to {LARGEST_BUCKETS} rows are "
            "supported"
        )
    if config.engram_rows != tuple(map(sum, primes)):
        raise UserError(
            f"engram_rows is {list(config.engram_rows)}, but heads with {config.engram_buckets} "
            f"rows or more hit {list(map(sum, primes))}"
        )


def _primes_from(first: int) -> Iterator[int]:
    """The primes from `first` on."""
    prime = lambda n: n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))
    return filter(prime, itertools.count(first))
