"""Sizes of the hierarchy that a command makes."""

from types import SimpleNamespace

import pytest

from dhisparse_jax.cli.options import HierarchyOptions, PolicyName
from dhisparse_jax.cli.session import config_for
from tests.support.serving import model


@pytest.mark.parametrize(("positions", "capacity"), [(56, 56), (57, 64), (63, 64), (90, 90)])
def test_capacity_is_in_whole_units_of_keys(positions, capacity):
    """A kernel takes a table of keys of any other length as a copy; 90 is the model's context."""
    loaded = SimpleNamespace(model=model()[0], mesh=None, context=90)
    options = HierarchyOptions(policy=PolicyName("fixed"), hot_rows=4)
    config = config_for(loaded, options, requests=2, positions=positions, queries=1)
    assert config.capacity == capacity
