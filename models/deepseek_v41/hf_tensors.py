"""Published tensors of DeepSeek-V4.1: names, shapes, and where they go in our weights.

Knows nothing about files. Names of the parts that are as in DeepSeek-V4 are in its module.
"""

from dhisparse_jax.configs.deepseek_v41 import V41Config
from dhisparse_jax.configs.quantised import FORMATS
from dhisparse_jax.models.deepseek_v4.hf_tensors import (
    IN_LAYER,
    TOP,
    indexer_shapes,
    layer_shapes,
    moe_shapes,
    pieces_of,
)
from dhisparse_jax.models.params import Flat
from dhisparse_jax.models.stream import Piece, Pieces
from dhisparse_jax.models.tensor_files import Shape

WORDS = "word_of"
"""Our name of the ids that tables of n-grams know tokens by; no tensor, the tokenizer says it."""

_TABLE = "engram.embed.weight"
_IN_LAYER = IN_LAYER | {
    "attention.source.latents.wkv": "attn.compressor.wkv.weight",
    "attention.source.latents.wgate": "attn.compressor.wgate.weight",
    "attention.source.latents.norm.weight": "attn.compressor.norm.weight",
    "attention.source.wk.kernel": "attn.indexer.wk.weight",
    "attention.source.k_norm.weight": "attn.indexer.k_norm.weight",
    "engram.table.weight": _TABLE,
    "engram.wkv.kernel": "engram.wkv.weight",
    "engram.q_weight": "engram.q_weight",
    "engram.k_weight": "engram.k_weight",
}

_OTHER_STARTS = ("vision.", "aligner.", "image_")
_OTHER_ENDS = (".ffn.gate.bias_vl",)


def is_other_part(name: str) -> bool:
    """Whether a tensor is for images alone."""
    return name.startswith(_OTHER_STARTS) or name.endswith(_OTHER_ENDS)


def published_v41_shapes(config: V41Config) -> dict[str, Shape]:
    """Name and shape of every tensor of the text path, without the drafter's."""
    shapes: dict[str, Shape] = {
        "embed.weight": (config.vocab_size, config.hidden_size),
        "norm.weight": (config.hidden_size,),
        "head.weight": (config.vocab_size, config.hidden_size),
    }
    for layer in range(config.num_layers):
        parts = {
            **layer_shapes(config),
            **_source_shapes(config, layer),
            **(indexer_shapes(config) if layer in config.index_sources else {}),
            **_engram_shapes(config, layer),
            **moe_shapes(config),
        }
        shapes |= {f"layers.{layer}.{name}": shape for name, shape in parts.items()}
    return shapes


def table_names(config: V41Config) -> list[str]:
    """Published names of the tables of n-grams."""
    return [f"layers.{layer}.{_TABLE}" for layer in config.engram_layers]


def table_blocks(config: V41Config) -> dict[str, tuple[int, int]]:
    """Blocks of the tables of n-grams where they are quantised: parts of a row."""
    return dict.fromkeys(table_names(config), FORMATS["fp8-rows"].block)


def v41_pieces(config: V41Config, like: Flat) -> dict[str, Pieces]:
    """What each of our arrays is made of but what the tokenizer says, by the names of `like`."""
    return {name: _pieces(name, tuple(leaf.shape)) for name, leaf in like.items() if name != WORDS}


def _pieces(name: str, shape: Shape) -> Pieces:
    match name.split("."):
        case ["layers", layer, "engram", "table", "numbers" | "scales" as kind]:
            suffix = "_scale_inv" if kind == "scales" else ""
            return (Piece(f"layers.{layer}.{_TABLE}{suffix}", (0, 0), shape, stored=True),)
    return pieces_of(name, shape, TOP, _IN_LAYER)


def _source_shapes(config: V41Config, layer: int) -> dict[str, Shape]:
    """What makes entries and their index keys."""
    if layer not in config.entry_sources:
        return {}
    shapes: dict[str, Shape] = {
        "attn.compressor.wkv.weight": (config.head_dim, config.hidden_size),
        "attn.compressor.norm.weight": (config.head_dim,),
        "attn.indexer.wk.weight": (config.index_dim, config.head_dim),
        "attn.indexer.k_norm.weight": (config.index_dim,),
    }
    if config.rates[layer] > 1:
        shapes["attn.compressor.wgate.weight"] = (config.head_dim, config.hidden_size)
    return shapes


def _engram_shapes(config: V41Config, layer: int) -> dict[str, Shape]:
    """The memory before a layer."""
    if layer not in config.engram_layers:
        return {}
    streams, width = config.streams, config.hidden_size
    return {
        _TABLE: (config.engram_rows[config.engram_layers.index(layer)], config.engram_dim),
        "engram.wkv.weight": (
            (streams + 1) * width,
            config.engram_columns * config.engram_dim,
        ),
        "engram.q_weight": (streams, width),
        "engram.k_weight": (streams, width),
    }
