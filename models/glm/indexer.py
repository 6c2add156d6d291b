"""The indexer: cheap scores that say which rows a query attends to."""

from typing import Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from dhisparse_jax.configs.glm import RopeStyle
from dhisparse_jax.configs.rope import Yarn
from dhisparse_jax.models.glm.linear import exact_dot, linear, weight_init
from dhisparse_jax.models.glm.norms import LayerNorm
from dhisparse_jax.models.glm.rope import rotate_first


@runtime_checkable
class IndexerSizes(Protocol):
    """What an indexer needs of a configuration."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""
        ...

    @property
    def q_lora_rank(self) -> int:
        """Width of what queries are made of."""
        ...

    @property
    def index_heads(self) -> int:
        """Heads of index queries."""
        ...

    @property
    def index_dim(self) -> int:
        """Width of a head, and of an index key."""
        ...

    @property
    def index_norm_eps(self) -> float:
        """Epsilon of the norm of index keys."""
        ...

    @property
    def index_rope_style(self) -> RopeStyle:
        """Which channels form a rotated pair."""
        ...

    @property
    def qk_rope_dim(self) -> int:
        """Leading channels that are rotated."""
        ...

    @property
    def rope_theta(self) -> float:
        """Base of their frequencies."""
        ...

    @property
    def yarn(self) -> Yarn | None:
        """How positions are stretched."""
        ...

    @property
    def param_dtype(self) -> str:
        """Dtype of the weights."""
        ...


class Indexer(nnx.Module):
    """Queries, keys and head weights of one selection group."""

    def __init__(self, config: IndexerSizes, *, dtype: jnp.dtype, rngs: nnx.Rngs) -> None:
        param_dtype = jnp.dtype(config.param_dtype)
        linear_args = {"dtype": dtype, "param_dtype": param_dtype, "rngs": rngs}
        self.wq = linear(config.q_lora_rank, config.index_heads * config.index_dim, **linear_args)
        self.wk = linear(config.hidden_size, config.index_dim, **linear_args)
        self.k_norm = LayerNorm(
            config.index_dim, epsilon=config.index_norm_eps, dtype=dtype, param_dtype=param_dtype
        )
        self.head_weights = nnx.Param(
            weight_init(config.hidden_size)(
                rngs.params(), (config.hidden_size, config.index_heads), param_dtype
            )
        )
        self.num_heads = config.index_heads
        self.rotated = config.qk_rope_dim
        self.theta = config.rope_theta
        self.style = config.index_rope_style
        self.yarn = config.yarn
        self.scale = (config.index_heads * config.index_dim) ** -0.5

    def queries(
        self, q_lora: Float[Array, "*batch q_lora"], positions: Int[Array, "*batch"]
    ) -> Float[Array, "*batch index_heads index_dim"]:
        """Index queries from the normalised query latent of the group's first layer."""
        q = self.wq(q_lora).reshape(*q_lora.shape[:-1], self.num_heads, -1)
        return self._rotate(q, positions[..., None])

    def keys(
        self, x: Float[Array, "*batch width"], positions: Int[Array, "*batch"]
    ) -> Float[Array, "*batch index_dim"]:
        """The index key to store for each token, from the normalised input of that layer."""
        k = self.k_norm(self.wk(x))
        return self._rotate(k, positions)

    def _rotate(
        self, x: Float[Array, "*batch index_dim"], positions: Int[Array, "*#batch"]
    ) -> Float[Array, "*batch index_dim"]:
        return rotate_first(
            x, positions, self.rotated, theta=self.theta, style=self.style, yarn=self.yarn
        )

    def weights(self, x: Float[Array, "*batch width"]) -> Float[Array, "*batch index_heads"]:
        """Float32 head weights, already multiplied by `index_heads^-0.5 * index_dim^-0.5`."""
        return exact_dot(x, self.head_weights[...]) * self.scale


def index_scores(
    queries: Float[Array, "*batch t index_heads index_dim"],
    keys: Float[Array, "*batch s index_dim"],
    weights: Float[Array, "*batch t index_heads"],
) -> Float[Array, "*batch t s"]:
    """Float32 scores `sum_h weights[h] * relu(queries[h] . keys)`; no mask is applied."""
    dots = jnp.einsum(
        "...thd,...sd->...ths",
        queries,
        keys,
        precision=jax.lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return jnp.sum(jax.nn.relu(dots) * weights[..., None], axis=-2)
