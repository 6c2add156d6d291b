"""Published tensors of an attached drafter: names, shapes, and where they go in our weights.

Knows nothing about files. Stage N is `mtp.N`; what comes before all stages is in the first of them,
and what comes after them in the last.
"""

from dhisparse_jax.configs.attached import AttachedConfig, stage_sizes
from dhisparse_jax.configs.deepseek_v4 import V4Config
from dhisparse_jax.configs.deepseek_v41 import SinceV4
from dhisparse_jax.models.deepseek_v4.hf_tensors import (
    HYPER_HEAD,
    IN_LAYER,
    canonical_v4_name,
    expert_names,
    hyper_head_shapes,
    layer_shapes,
    moe_shapes,
    pieces_of,
)
from dhisparse_jax.models.params import Flat
from dhisparse_jax.models.stream import Pieces
from dhisparse_jax.models.tensor_files import Shape

ROOT = "mtp"

_FIRST = {"main_proj.kernel": "main_proj.weight", "main_norm.weight": "main_norm.weight"}
_LAST = HYPER_HEAD | {
    "norm.weight": "norm.weight",
    "markov_head.markov_w1.weight": "markov_head.markov_w1.weight",
    "markov_head.markov_w2.kernel": "markov_head.markov_w2.weight",
    "confidence_head.proj.kernel": "confidence_head.proj.weight",
}
# DeepSeek-V4.1's names, and those of DeepSeek-V4.
_RENAMED = {
    ".markov_head.embed.": ".markov_head.markov_w1.",
    ".markov_head.head.": ".markov_head.markov_w2.",
}


def canonical_attached_name(name: str) -> str:
    """The name that DeepSeek-V4 gives a tensor; see `canonical_v4_name` for scales.

    In: `mtp.2.markov_head.embed.weight`. Out: `mtp.2.markov_head.markov_w1.weight`.
    """
    name = canonical_v4_name(name)
    for other, own in _RENAMED.items():
        name = name.replace(other, own, 1)
    return name


def attached_shapes(config: AttachedConfig, target: SinceV4) -> dict[str, Shape]:
    """Name and shape of every tensor of a drafter."""
    sizes, width = stage_sizes(config, target), target.hidden_size
    parts: dict[str, Shape] = {**layer_shapes(sizes), **moe_shapes(sizes)}
    shapes = {
        f"{ROOT}.{stage}.{name}": shape
        for stage in range(config.stages)
        for name, shape in parts.items()
    }
    first, last = f"{ROOT}.0", f"{ROOT}.{config.stages - 1}"
    shapes |= {
        f"{first}.main_proj.weight": (width, len(config.taps) * width),
        f"{first}.main_norm.weight": (width,),
        f"{last}.norm.weight": (width,),
        f"{last}.markov_head.markov_w1.weight": (target.vocab_size, config.markov_rank),
        f"{last}.markov_head.markov_w2.weight": (target.vocab_size, config.markov_rank),
        f"{last}.confidence_head.proj.weight": (1, width + config.markov_rank),
    }
    if isinstance(target, V4Config):
        shapes |= {f"{last}.{name}": shape for name, shape in hyper_head_shapes(target).items()}
    return shapes


def attached_expert_names(config: AttachedConfig) -> list[str]:
    """Published names of the matrices of all routed experts."""
    return expert_names(ROOT, config.stages, config.num_experts)


def attached_pieces(config: AttachedConfig, like: Flat) -> dict[str, Pieces]:
    """What each of our arrays is made of, by the names of `like`, which has their shapes."""
    top = {name: f"{ROOT}.0.{published}" for name, published in _FIRST.items()}
    top |= {name: f"{ROOT}.{config.stages - 1}.{own}" for name, own in _LAST.items()}
    return {
        name: pieces_of(name, tuple(leaf.shape), top, IN_LAYER, root=ROOT)
        for name, leaf in like.items()
    }
