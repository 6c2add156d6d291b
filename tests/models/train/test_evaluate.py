import math

import jax.numpy as jnp
import numpy as np
import pytest

from dhisparse_jax.models.glm.dense import forward
from dhisparse_jax.models.params import params_of
from dhisparse_jax.models.train.evaluate import Evaluator, cut_windows, xz_bits_per_byte
from tests.support.small_glm import small_model

FILES = {"long": bytes(range(1, 101)), "short": b"abc", "exact": b"x" * 32}


@pytest.mark.parametrize("context", [16, 32, 200])
def test_every_byte_is_scored_once_after_what_precedes_it(context):
    windows = cut_windows(FILES, context=context, batch=4)
    assert len(windows.file) % 4 == 0
    for number, text in enumerate(FILES.values()):
        mine = windows.file == number
        assert bytes(windows.targets[mine][windows.scored[mine]].tolist()) == text
    assert (windows.inputs[:, 1:] == windows.targets[:, :-1]).all()


def test_bytes_far_into_a_file_have_half_a_window_before_them():
    context = 16
    windows = cut_windows({"long": FILES["long"]}, context=context, batch=1)
    for row, (inputs, scored) in enumerate(zip(windows.inputs, windows.scored, strict=True)):
        assert row == 0 or np.flatnonzero(scored)[0] >= context // 2
        assert inputs.all() or row == 0  # no padding


@pytest.mark.slow
def test_figures_equal_a_plain_computation():
    model = small_model()
    files = {"a": b"def f(x):\n    return x\n", "b": b"import os"}
    evaluator = Evaluator(model.config, files, context=16, batch=2, dtype=jnp.dtype("float32"))
    figures = evaluator.bits_per_byte(params_of(model), evaluator.compile("dense"))
    bits = 0.0
    for window in range(len(evaluator._windows.file)):
        inputs, targets, scored = (part[window] for part in evaluator._windows[:3])
        logits = np.asarray(forward(model, jnp.asarray(inputs)[None], mode="dense"))[0]
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        bits -= (log_p[np.arange(16), targets] * scored).sum() / math.log(2)
    assert figures["all"] == pytest.approx(bits / 32, rel=1e-5)
    assert figures["all"] == pytest.approx((23 * figures["a"] + 9 * figures["b"]) / 32, rel=1e-6)


def test_xz_is_measured_both_ways():
    figures = xz_bits_per_byte({"a": b"spam " * 100, "b": b"spam " * 100})
    assert 0 < figures["concatenated"] < figures["per_file"] < 8
