"""History in fp8 through the GPU's kernels: a small model with the rows and heads of GLM-5.x."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.forced import forced_logits
from dhisparse_jax.models.glm.decode import serve
from dhisparse_jax.models.glm.model import GlmModel
from pallas_kernels.index_scores import mosaic as scores
from pallas_kernels.sparse_attention import mosaic as attention
from tests.support.small_glm import with_real_heads

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(jax.default_backend() != "gpu", reason="needs a CUDA device"),
]

TOKENS = np.random.default_rng(0).integers(0, 256, 500).tolist()


def engine(policy, queries):
    model = GlmModel(with_real_heads(), rngs=nnx.Rngs(0), dtype=jnp.bfloat16)
    served, params = serve(model, "bfloat16", "fp8", "fp8")
    cfg = HierarchyConfig(
        geometry=served.geometry,
        policy=Policy(policy),
        requests=2,
        capacity=512,
        queries=queries,
        hot_rows=96,
    )
    return Engine(served, params, cfg)


@pytest.mark.parametrize("queries", [1, 4])
def test_policies_give_the_same_bits(queries):
    found = {}
    for policy in Policy:
        pieces = forced_logits(engine(policy, queries), TOKENS, 300)
        found[policy] = np.concatenate([p for p in pieces if isinstance(p, np.ndarray)])
    assert np.isfinite(found[Policy.RESIDENT]).all()
    np.testing.assert_array_equal(found[Policy.FIXED], found[Policy.RESIDENT])
    np.testing.assert_array_equal(found[Policy.ADAPTIVE], found[Policy.RESIDENT])


def test_the_kernels_take_the_operands():
    """Else the test above would be one of the references."""
    served = engine("fixed", 1)
    row = served.cfg.geometry.row
    query = jnp.zeros((2, 1, 16, row.width), jnp.bfloat16)
    heads = jnp.zeros((2, 1, 32, 128), jnp.bfloat16)
    how = {"offset": row.words, "row_format": row.dtype, "value_width": row.value_width}
    assert attention.supports(query, served.state.hot[0].slots, **how) is None
    assert scores.supports(heads, served.state.pools[0].index_keys) is None
