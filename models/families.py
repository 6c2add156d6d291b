"""The families of models that can be loaded: what is different about each, in one place."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dhisparse_jax.configs.deepseek_v4 import V4Config
from dhisparse_jax.configs.deepseek_v41 import V41Config
from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.configs.values import config_of
from dhisparse_jax.errors import UserError
from dhisparse_jax.model import Params, ServedModel
from dhisparse_jax.models import hf_tensors as glm_tensors
from dhisparse_jax.models.deepseek_v4 import decode as v4_decode
from dhisparse_jax.models.deepseek_v4 import hf_tensors as v4_tensors
from dhisparse_jax.models.deepseek_v4.hf_config import parse_v4_config
from dhisparse_jax.models.deepseek_v41 import decode as v41_decode
from dhisparse_jax.models.deepseek_v41 import hf_tensors as v41_tensors
from dhisparse_jax.models.deepseek_v41.hf_config import parse_v41_config
from dhisparse_jax.models.deepseek_v41.words import read_words
from dhisparse_jax.models.glm import decode as glm_decode
from dhisparse_jax.models.hf_config import MODEL_TYPES, parse_config
from dhisparse_jax.models.hf_names import canonical_name
from dhisparse_jax.models.params import AnyConfig, AnyModel, Flat
from dhisparse_jax.models.stream import Pieces
from dhisparse_jax.models.tensor_files import Shape

EXPERTS = "expert_format"
"""The entry of a configuration that says what format routed experts have."""


@dataclass(frozen=True)
class Family:
    """Models with one architecture.

    Attributes:
        name: in checkpoints of ours.
        model_types: in published configurations.
        config: class of the configurations.
        parse: reads a published one.
        canonical: the one name that a published tensor has here, whoever wrote it.
        shapes: of all published tensors, by that name.
        integers: names of those with whole numbers from 0 on, and how many there are of these.
        stored: names of tensors that may stay quantised, all in one format, by the entry of the
            configuration that says in which: first the matrices of routed experts.
        blocks: blocks of quantised tensors, where they are not those of the published
            configuration.
        unused: whether a tensor belongs to a part of the model that is not used here.
        derived: arrays by our names that are in no tensor, from the folder of a checkpoint.
        pieces: what each of our arrays is made of.
        serve: a model as pure functions and weights, from the dtype of its computation and the
            formats of rows and index keys, where they are not those of the configuration.
    """

    name: str
    model_types: tuple[str, ...]
    config: type[Any]
    parse: Callable[[Mapping[str, Any]], AnyConfig]
    canonical: Callable[[str], str]
    shapes: Callable[[Any], dict[str, Shape]]
    integers: Callable[[Any], dict[str, int]]
    stored: Callable[[Any], dict[str, list[str]]]
    pieces: Callable[[Any, Flat], dict[str, Pieces]]
    serve: Callable[[Any, str, str | None, str | None], tuple[ServedModel, Params]]
    blocks: Callable[[Any], dict[str, tuple[int, int]]] = lambda config: {}
    unused: Callable[[str], bool] = lambda name: False
    derived: Callable[[Any, Path], Flat] = lambda config, directory: {}


GLM = Family(
    name="glm",
    model_types=MODEL_TYPES,
    config=GlmConfig,
    parse=parse_config,
    canonical=canonical_name,
    shapes=glm_tensors.published_shapes,
    integers=lambda config: {},
    stored=lambda config: {EXPERTS: glm_tensors.expert_names(config)},
    pieces=glm_tensors.pieces_of,
    serve=glm_decode.serve,
)
DEEPSEEK_V4 = Family(
    name="deepseek_v4",
    model_types=("deepseek_v4",),
    config=V4Config,
    parse=parse_v4_config,
    canonical=v4_tensors.canonical_v4_name,
    shapes=v4_tensors.published_v4_shapes,
    integers=v4_tensors.v4_integers,
    stored=lambda config: {EXPERTS: v4_tensors.v4_expert_names(config)},
    pieces=v4_tensors.v4_pieces,
    serve=v4_decode.serve,
)
DEEPSEEK_V41 = Family(
    name="deepseek_v41",
    model_types=("deepseek_v41", "deepseek_v41_text"),
    config=V41Config,
    parse=parse_v41_config,
    canonical=v4_tensors.canonical_v4_name,
    shapes=v41_tensors.published_v41_shapes,
    integers=lambda config: {},
    stored=lambda config: {
        EXPERTS: v4_tensors.v4_expert_names(config),
        "table_format": v41_tensors.table_names(config),
    },
    pieces=v41_tensors.v41_pieces,
    serve=v41_decode.serve,
    blocks=v41_tensors.table_blocks,
    unused=v41_tensors.is_other_part,
    derived=lambda config, directory: (
        {v41_tensors.WORDS: read_words(directory, config)} if config.engram_layers else {}
    ),
)
FAMILIES = (GLM, DEEPSEEK_V4, DEEPSEEK_V41)

_FAMILY_ENTRY = "family"
"""In our configurations of all families but the first, which has none."""


def family_of(config: AnyConfig) -> Family:
    """The family of a configuration."""
    return next(family for family in FAMILIES if isinstance(config, family.config))


def published_family(raw: Mapping[str, Any]) -> Family:
    """The family of a published configuration.

    Raises:
        UserError: There is none of its type.
    """
    kind = raw.get("model_type")
    for family in FAMILIES:
        if kind in family.model_types:
            return family
    known = [repr(known) for family in FAMILIES for known in family.model_types]
    raise UserError(
        f"model_type is {kind!r}; only {', '.join(known[:-1])} and {known[-1]} are supported"
    )


def served(
    model: AnyModel, dtype: str, kv_format: str | None = None, index_format: str | None = None
) -> tuple[ServedModel, Params]:
    """Split a model into pure functions and its weights; see `models.glm.decode.serve`."""
    return family_of(model.config).serve(model, dtype, kv_format, index_format)


def own_values(config: AnyConfig, values: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint of ours says of a configuration, from its fields."""
    family = family_of(config)
    return dict(values) if family is FAMILIES[0] else {_FAMILY_ENTRY: family.name, **values}


def own_config(values: Mapping[str, Any]) -> AnyConfig:
    """The reverse of `own_values`.

    Raises:
        UserError: There is no such family, or see `configs.values.config_of`.
    """
    fields = dict(values)
    name = fields.pop(_FAMILY_ENTRY, FAMILIES[0].name)
    for family in FAMILIES:
        if family.name == name:
            return config_of(family.config, fields)
    raise UserError(f"the configuration is of a family {name!r}, which is not known")
