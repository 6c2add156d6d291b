"""TPU kernels in interpret mode, and compiled for TPUs that are not there."""

import contextlib

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


@contextlib.contextmanager
def races():
    """One detector for every interpreted kernel of the body; what one left behind is gone.

    The interpreter makes a new one for each kernel, under no public name (jax 0.10.2, 0.11.2).
    """
    detectors, make = [], interpret_pallas_call.RaceDetectionState

    def remember(**sizes):
        detectors.append(make(**sizes))
        return detectors[-1]

    pltpu.reset_tpu_interpret_mode_state()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(interpret_pallas_call, "RaceDetectionState", remember)
        yield detectors
    pltpu.reset_tpu_interpret_mode_state()


@contextlib.contextmanager
def without_races():
    """Fails if copies of an interpreted kernel race in the body."""
    with races() as detectors:
        yield
    assert not any(detector.races_found for detector in detectors)


@pytest.fixture
def no_races():
    """The test fails if copies of an interpreted kernel race."""
    with without_races():
        yield
