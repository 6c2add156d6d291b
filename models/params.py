"""Weights of a model as plain dictionaries, and back.

Nested: what JAX transformations and optimizers see. Flat: `layers.0.attention.q_a.kernel` to array,
the names used on disk.
"""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar, overload

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from dhisparse_jax.configs.deepseek_v4 import V4Config
from dhisparse_jax.configs.deepseek_v41 import V41Config
from dhisparse_jax.configs.glm import GlmConfig
from dhisparse_jax.models.deepseek_v4.model import V4Model
from dhisparse_jax.models.deepseek_v41.model import V41Model
from dhisparse_jax.models.glm.model import GlmModel

Nested = dict[Any, Any]  # str or layer number -> Nested or array
Flat = dict[str, Any]
AnyConfig = GlmConfig | V4Config | V41Config
AnyModel = GlmModel | V4Model | V41Model

_Model = TypeVar("_Model", bound=nnx.Module)


def params_of(model: nnx.Module) -> Nested:
    """The nested weights of a model."""
    return nnx.to_pure_dict(nnx.state(model, nnx.Param))


def new_model(config: AnyConfig, dtype: jnp.dtype | type = jnp.float32) -> AnyModel:
    """A model with initial weights."""
    if isinstance(config, V4Config):
        return V4Model(config, rngs=nnx.Rngs(0), dtype=dtype)
    if isinstance(config, V41Config):
        return V41Model(config, rngs=nnx.Rngs(0), dtype=dtype)
    return GlmModel(config, rngs=nnx.Rngs(0), dtype=dtype)


def abstract_params(config: AnyConfig) -> Nested:
    """Shapes and dtypes of the nested weights; nothing is allocated."""
    return params_of(nnx.eval_shape(lambda: new_model(config)))


@overload
def build_model(config: GlmConfig, params: Nested, dtype: jnp.dtype | type) -> GlmModel: ...
@overload
def build_model(config: V4Config, params: Nested, dtype: jnp.dtype | type) -> V4Model: ...
@overload
def build_model(config: V41Config, params: Nested, dtype: jnp.dtype | type) -> V41Model: ...
def build_model(config: AnyConfig, params: Nested, dtype: jnp.dtype | type) -> AnyModel:
    """A model with the given nested weights, computing in `dtype`. May be traced."""
    return fill(lambda: new_model(config, dtype), params)


def fill(make: Callable[[], _Model], params: Nested) -> _Model:
    """The model that `make` would give, with other weights; its own are never allocated."""
    graph, state = nnx.split(nnx.eval_shape(make))
    nnx.replace_by_pure_dict(state, params)
    return nnx.merge(graph, state)


def cast_like(params: Nested, like: Nested) -> Nested:
    """Arrays with the dtypes of `like`."""
    return jax.tree.map(lambda x, target: jnp.asarray(x, target.dtype), params, like)


def flatten(params: Nested) -> Flat:
    """Nested to flat names."""
    flat, _ = jax.tree_util.tree_flatten_with_path(params)
    return {".".join(str(entry.key) for entry in path): leaf for path, leaf in flat}


def unflatten(flat: Mapping[str, Any], like: Nested) -> Nested:
    """Flat names to the nesting of `like`, which must have the same names."""
    structure = jax.tree.structure(like)
    return jax.tree.unflatten(structure, [flat[name] for name in flatten(like)])


def loses_nothing(kind: np.dtype, other: np.dtype) -> bool:
    """Whether all numbers of a dtype are numbers of another; those of no floats are of no other."""
    if kind == other or not all(jnp.issubdtype(each, jnp.floating) for each in (kind, other)):
        return kind == other
    own, theirs = jnp.finfo(kind), jnp.finfo(other)
    return own.nmant <= theirs.nmant and own.maxexp <= theirs.maxexp
