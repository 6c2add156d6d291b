"""The mesh of every preset: its experts divide, and the weights of a device fit an H200."""

import dataclasses
import json

import pytest

from dhisparse_jax.configs import GLM_5_3, PRESETS, TINY, config_from_values
from dhisparse_jax.errors import UserError
from dhisparse_jax.mesh import ONE_DEVICE

H200_BYTES = 141e9

PUBLISHED = {
    "glm-5.3": (743.4e9, 1.0),
    "deepseek-v3.2": (671.9e9, 1.0),
    "deepseek-v4-flash": (284.3e9, 0.5 + 1 / 32),
    "deepseek-v4-pro": (1573e9, 0.5 + 1 / 32),
    "deepseek-v4.1-flash": (552e9, 0.5 + 1 / 32),
}
"""Parameters, without MTP layers, drafters and Engram tables; bytes of a number of an expert."""


def expert_layers(config):
    """Layers with experts: all but the first dense ones."""
    layers = getattr(config, "num_layers", None) or len(config.layer_kinds)
    return layers - getattr(config, "num_dense_layers", 0)


@pytest.mark.parametrize("name", PUBLISHED)
def test_weights_of_a_device_leave_room_for_history(name):
    config, (total, size) = PRESETS[name], PUBLISHED[name]
    config.mesh.check_experts(config.num_experts)
    assert config.mesh.expert > 1
    expert = 3 * config.hidden_size * config.expert_intermediate_size
    experts = expert_layers(config) * config.num_experts * expert
    assert 0.9 * total < experts < total
    # What is not an expert is in bfloat16, on every device.
    weights = size * experts / config.mesh.expert + 2 * (total - experts)
    assert weights < 0.92 * H200_BYTES


def test_small_models_need_no_mesh():
    assert TINY.mesh == ONE_DEVICE


def test_a_mesh_is_kept_with_the_configuration():
    values = json.loads(json.dumps(dataclasses.asdict(GLM_5_3)))
    assert config_from_values(values).mesh == GLM_5_3.mesh
    with pytest.raises(UserError, match="which describes none"):
        config_from_values(values | {"mesh": {"rows": 2}})
