"""The same in plain jnp."""

from jaxtyping import Array, Float

from pallas_kernels.common.scaled_rows import rescaled, scales_of


def round_rows(x: Float[Array, "*n width"]) -> tuple[Float[Array, "*n width"], Float[Array, "*n"]]:
    """See `api.round_rows`."""
    wide = x.astype("float32")
    scales = scales_of(wide)
    return rescaled(wide, scales), scales
