"""The same in plain jnp."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from pallas_kernels.common.scaled_rows import rescaled, scales_of


def round_rows(x: Float[Array, "*n width"]) -> tuple[Float[Array, "*n width"], Float[Array, "*n"]]:
    """See `api.round_rows`."""
    wide = x.astype("float32")
    scales = scales_of(wide)
    return rescaled(wide, scales), scales


def round_gated(
    sums: Float[Array, "E M twice"], rows: Float[Array, "E M"], columns: Float[Array, "E twice"]
) -> tuple[Float[Array, "E M width"], Float[Array, "E M"]]:
    """See `api.round_gated`."""
    gate, up = jnp.split(sums.astype("float32") * rows[..., None] * columns[:, None], 2, axis=-1)
    return round_rows(jax.nn.silu(gate) * up)
