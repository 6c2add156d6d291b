"""TPU kernels in interpret mode, and compiled for TPUs that are not there."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu

from dhisparse_jax.hierarchy.state import host_sharding
from pallas_kernels.common.backends import targeting
from pallas_kernels.common.record_layout import TILES, as_records, as_words


def tiled(pool):
    """A pool of words as one of tiles, with zeros after the words of each record."""
    return as_records(jnp.asarray(pool), TILES)


def tiled_host(pool):
    """The same in host memory: on a TPU, since interpreted kernels cannot have it there."""
    with targeting("tpu"):
        return jax.device_put(tiled(pool), host_sharding())


def words_in(pool, width):
    """The first words of each record of a pool of tiles."""
    return np.asarray(as_words(pool, TILES))[:, :width]


ON_TPU = jax.default_backend() == "tpu"

only_interpreted = pytest.mark.skipif(ON_TPU, reason="only the interpreter looks")


@pytest.fixture
def no_races():
    """The test fails if copies of an interpreted kernel race; what one left behind is gone."""
    pltpu.reset_tpu_interpret_mode_state()
    yield
    # The detector's verdict has no public name (jax 0.10.2, 0.11.2).
    races = interpret_pallas_call.races
    found = races is not None and races.races_found
    pltpu.reset_tpu_interpret_mode_state()
    assert not found
