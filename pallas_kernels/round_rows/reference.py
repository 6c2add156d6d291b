"""The same in plain jnp."""

from jaxtyping import Array, Float

from pallas_kernels.common.scaled_rows import rescaled, scales_of


def round_rows(x: Float[Array, "*n width"]) -> tuple[Float[Array, "*n width"], Float[Array, "*n"]]:
    """See `api.round_rows`."""
    scales = scales_of(x.astype("float32"))
    return rescaled(x.astype("float32"), scales), scales
