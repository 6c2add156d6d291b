"""The benchmark of a dense model with indexers, on the small one."""

import math

import numpy as np
import pytest

from bench.dense_model import check, means
from tests.support.small_llama import indexers, model, tokens


def test_perplexity_is_over_all_tokens_of_all_texts():
    def told(first, last):
        return {"nats": (first + last) / 2, "quarters": [first, first, last, last]}

    found = means({"a": {"dense": told(1.0, 2.0)}, "b": {"dense": told(3.0, 4.0)}})
    assert found["dense"]["perplexity"] == pytest.approx(math.exp(2.5))
    assert found["dense"]["perplexity_last_half"] == pytest.approx(math.exp(3.0))


@pytest.mark.slow
def test_the_hierarchy_says_what_masked_attention_says():
    found = check(model(), indexers(), np.asarray(tokens()), 8, 16)
    assert found["policies_equal_bit_for_bit"]
    assert found["largest_difference"] < 1e-4
    assert found["fetched_records"]["fixed"] > found["fetched_records"]["resident"] == 0
