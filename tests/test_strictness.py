"""The suite's own strictness is on: shapes are checked, and JAX promotes nothing silently."""

import warnings

import jax.numpy as jnp
import pytest
from jaxtyping import TypeCheckError

from dhisparse_jax.hierarchy.commit import commit
from dhisparse_jax.models.glm.norms import RmsNorm
from pallas_kernels.top_k.api import top_k


def test_shapes_of_kernels_are_checked():
    pytest.importorskip("beartype")
    with pytest.raises(TypeCheckError):
        top_k(jnp.zeros(3, jnp.float32), 2)


@pytest.mark.parametrize("part", [commit, RmsNorm.__call__])
def test_packages_of_the_library_are_checked(part):
    pytest.importorskip("beartype")
    assert hasattr(part, "__wrapped__")


def test_ranks_are_not_promoted():
    with pytest.raises(ValueError, match="rank_promotion"):
        jnp.zeros(3) + jnp.zeros((2, 3))


def test_dtypes_are_not_promoted():
    with pytest.raises(ValueError, match="dtype_promotion"):
        jnp.zeros(3, jnp.int32) + jnp.zeros(3, jnp.float32)


def test_warnings_are_errors():
    with pytest.raises(UserWarning):
        warnings.warn("once", stacklevel=1)
