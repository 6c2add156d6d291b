"""Float32 stays float32, whatever a device does by default."""

from functools import partial

import jax
import jax.numpy as jnp

from dhisparse_jax.precision import full_precision
from tests.support.serving import POLICIES, engine, request, run


def product(scale, left, right):
    return scale * jnp.matmul(left, right)


def test_products_are_marked():
    traced = jax.jit(full_precision(partial(product, 2.0)))
    text = traced.lower(jnp.ones((2, 3)), jnp.ones((3, 4))).as_text()
    assert "precision = [HIGHEST, HIGHEST]" in text
    assert "jit_product" in text


def test_without_it_they_are_not():
    text = jax.jit(product).lower(2.0, jnp.ones((2, 3)), jnp.ones((3, 4))).as_text()
    assert "HIGHEST" not in text


def test_an_engine_rounds_no_operand(monkeypatch):
    """All products of float32 in its decode step and in its prefill."""
    served, texts = engine(*POLICIES["fixed"]), []

    def lowering(program):
        def call(*args):
            texts.append(program.lower(*args).as_text())
            return program(*args)

        return call

    for name in ("step", "prefill"):
        monkeypatch.setattr(served.compiled, name, lowering(getattr(served.compiled, name)))
    run(served, [request(9, 4)])
    products = [
        line
        for text in texts
        for line in text.splitlines()
        if "dot_general" in line and "f32" in line and "bf16" not in line
    ]
    assert len(texts) > 1 and products
    assert all("precision = [HIGHEST, HIGHEST]" in line for line in products)
