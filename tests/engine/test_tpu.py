"""A model is served with TPU kernels, interpreted: the same tokens as by the reference."""

import contextlib
import functools

import pytest

from dhisparse_jax.config import HierarchyConfig, Policy
from dhisparse_jax.engine.engine import Engine
from dhisparse_jax.engine.request import Request
from dhisparse_jax.models.glm.decode import serve
from dhisparse_jax.models.registry import load
from pallas_kernels.common.backends import decisions, targeting
from pallas_kernels.common.record_layout import TILES
from tests.support.serving import failed, run
from tests.support.small_glm import small_model
from tests.support.tpu import no_races

__all__ = ["no_races"]

KERNELS = {"retrieve", "backup", "index_scores", "top_k", "sparse_attention"}
"""Operations that have a TPU kernel."""

TEXT = b"The quick brown fox jumps over the lazy dog, and then it jumps over the dog again."


def engine(model, prompts, *, tpu, top_k, chunk, capacity):
    """An engine; on a TPU its decode steps are interpreted, and the reference prefills."""
    with targeting("tpu") if tpu else contextlib.nullcontext():
        cfg = HierarchyConfig(
            geometry=model[0].geometry,
            policy=Policy.ADAPTIVE,
            requests=len(prompts),
            capacity=capacity,
            hot_rows=top_k,
            tail=4,
        )
        served = Engine(*model, cfg, chunk=chunk)
    assert (cfg.record_layout is TILES) == tpu
    if tpu:
        compiled, reference = served.compiled, served.compiled.step

        @functools.wraps(reference)
        def step(*operands):
            with targeting("tpu"):
                return reference(*operands)

        compiled.step = step
    return served


def compare(model, prompts, new, **sizes):
    """Serve the same requests with and without TPU kernels."""
    asked = [
        Request(name=str(number), prompt=tuple(prompt), max_new_tokens=new)
        for number, prompt in enumerate(prompts)
    ]
    wanted = run(engine(model, prompts, tpu=False, **sizes), asked)
    served = engine(model, prompts, tpu=True, **sizes)
    with decisions() as found:
        mine = run(served, asked)
    assert mine.tokens == wanted.tokens
    assert mine.total.fetched_rows == wanted.total.fetched_rows > 0
    assert failed(served) == []
    assert {decision.operation for decision in found if decision.backend == "tpu"} == KERNELS


@pytest.mark.usefixtures("no_races")
def test_a_small_model_writes_the_same_tokens():
    one_group = small_model(num_layers=2, indexer_types=("full", "shared"))
    prompts = [[7 * n % 256 for n in range(30)]]
    compare(serve(one_group, "float32"), prompts, 3, top_k=6, chunk=32, capacity=48)


@pytest.mark.slow
@pytest.mark.usefixtures("no_races")
def test_the_bundled_model_writes_the_same_tokens():
    tiny = load("tiny")
    prompts = [(TEXT * 2)[:150], (TEXT * 2)[30:120]]
    compare((tiny.model, tiny.params), prompts, 4, top_k=64, chunk=64, capacity=192)
