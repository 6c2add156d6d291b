"""Opening a draft for a target, by name or folder."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.errors import UserError
from dhisparse_jax.models.draft import registry
from dhisparse_jax.models.draft.checkpoint import load_own_draft, make_draft, save_draft
from dhisparse_jax.models.draft.config import DraftConfig
from dhisparse_jax.models.draft.registry import load_draft
from dhisparse_jax.models.params import flatten, params_of
from dhisparse_jax.models.registry import load
from dhisparse_jax.sampling import greedy
from tests.support.checkpoints import CONTEXT, write_published
from tests.support.published_drafts import CONFIGS, tensors, write_draft
from tests.support.small_draft import CONFIGS as SMALL
from tests.support.toy_model import toy


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    directory = tmp_path_factory.mktemp("target")
    write_published(directory)
    return load(str(directory))


@pytest.mark.parametrize("kind", CONFIGS)
def test_a_published_draft_is_ready_to_propose(tmp_path, target, kind):
    drafter, params = load_draft(str(write_draft(tmp_path / "d", kind)), target, 2)
    assert (drafter.length, drafter.taps, drafter.dtype) == (2, (0, 2), "float32")
    own = tensors(kind).get("lm_head.weight")
    head = target.params["head"]["kernel"][...] if own is None else own.T
    np.testing.assert_array_equal(params["head"], head)
    state = drafter.init(3)
    assert state.keys.shape[2] == CONTEXT  # one of its layers has no window
    features = jnp.ones((3, 4, 64), jnp.float32)
    at, count = jnp.zeros(3, jnp.int32), jnp.full(3, 4, jnp.int32)
    state = jax.jit(drafter.commit)(params, state, features, at, count)
    got = jax.jit(drafter.propose)(params, state, at, count, greedy(3))
    assert got.tokens.shape == (3, 2)


def fitting(name="dflash2", **changes) -> DraftConfig:
    sizes = {"vocab_size": 256, "target_layers": 3, "mask_token_id": 255, "hidden_size": 32}
    return dataclasses.replace(SMALL[name], **sizes, **changes)


def write_own(directory, config):
    save_draft(directory, config, params_of(make_draft(config, jnp.float32, seed=2)))
    return str(directory)


@pytest.mark.parametrize("name", SMALL)
def test_what_training_writes_comes_back(tmp_path, target, name):
    config = fitting(name, param_dtype="bfloat16")
    directory = tmp_path / "d"
    write_own(directory, config)
    back, params = load_own_draft(directory)
    assert back == config
    expected = flatten(params_of(make_draft(config, jnp.float32, seed=2)))
    for key, array in flatten(params).items():
        assert array.dtype == jnp.bfloat16
        np.testing.assert_array_equal(array, expected[key])
    drafter, _ = load_draft(str(directory), target)
    assert (drafter.config, drafter.length) == (config, config.length)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 200, "mask_token_id": 1}, "a vocabulary of 200, but the target has 256"),
        ({"target_hidden_size": 64}, "hidden states of width 64, but the target has 32"),
        ({"target_layers": 5}, "a number of layers of 5, but the target has 3"),
        ({"hidden_size": 64}, "embeddings of width 64, but the target has 32"),
    ],
)
def test_a_draft_of_another_target_is_refused(tmp_path, target, changes, message):
    config = dataclasses.replace(fitting(), **changes)
    with pytest.raises(UserError, match=message) as error:
        load_draft(write_own(tmp_path / "d", config), target)
    assert "\n" not in str(error.value)


def test_impossible_requests_are_refused(tmp_path, target):
    directory = write_own(tmp_path / "d", fitting())
    for length in (0, 4):
        with pytest.raises(UserError, match=f"draft length {length} is not .* 1 to 3"):
            load_draft(directory, target, length)
    with pytest.raises(UserError, match="unknown draft nothing: neither bundled"):
        load_draft("nothing", target)
    other = dataclasses.replace(target, model=toy()[0])
    with pytest.raises(UserError, match="no layers that a draft can read"):
        load_draft(directory, other)
    (tmp_path / "d" / "draft.json").write_text('{"taps": [1]}')
    with pytest.raises(UserError, match=r"draft\.json does not describe a draft"):
        load_draft(directory, target)


def test_bundled_drafts_are_found_by_name(tmp_path, target, monkeypatch):
    write_own(tmp_path / "dflash2", fitting())
    monkeypatch.setitem(registry.BUNDLED_DRAFTS, "dflash2", tmp_path / "dflash2")
    assert load_draft("dflash2", target)[0].config.kind == "dflash2"
