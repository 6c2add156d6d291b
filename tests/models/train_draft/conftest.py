import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.models.params import params_of
from dhisparse_jax.models.train.corpus import EVALUATION_MODULES, load_corpus
from dhisparse_jax.models.train_draft.config import bundled_draft, smoke_config
from tests.support.small_glm import SMALL, small_model


@pytest.fixture(scope="session")
def target():
    return small_model()


@pytest.fixture(scope="session")
def weights(target):
    return params_of(target)


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    root = tmp_path_factory.mktemp("library")
    text = "def double(x):\n    return 2 * x\n\n\n" * 8
    for name in (*EVALUATION_MODULES, "first", "second"):
        (root / f"{name}.py").write_text(text)
    return load_corpus(root)


@pytest.fixture(scope="session")
def config_of():
    def make(kind, **changes):
        draft = bundled_draft(kind, SMALL)
        draft = dataclasses.replace(draft, num_layers=1, windows=(20,), causal=(False,))
        config = smoke_config(draft, seed=0, context=48)
        return dataclasses.replace(config, **changes)

    return make


@pytest.fixture(scope="session")
def text():
    rng = np.random.default_rng(0)
    return jnp.asarray(rng.integers(0, 256, (4, 48)), jnp.uint8)
