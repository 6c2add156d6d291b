"""What the published configuration of a checkpoint says of the drafter that it has attached."""

from collections.abc import Mapping
from typing import Any

from dhisparse_jax.configs.attached import AttachedConfig
from dhisparse_jax.configs.deepseek_v41 import SinceV4
from dhisparse_jax.configs.values import config_of
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.deepseek_v4.hf_config import DRAFTER
from dhisparse_jax.models.deepseek_v41.hf_config import flat_config
from dhisparse_jax.models.entries import integer, refuse_other, refuse_unknown

# Our name: the published name.
_SIZES = {
    "block_size": "dspark_block_size",
    "noise_token_id": "dspark_noise_token_id",
    "markov_rank": "dspark_markov_rank",
}
_TAPS = "dspark_target_layer_ids"
_EXPERTS = "dspark_n_routed_experts"
_CHOSEN = ("dspark_num_experts_per_tok", "dspark_n_activated_experts")
"""Two names of one entry: of the configuration, and of DeepSeek's own implementation."""
_FIXED = {"dspark_markov_head_type": "vanilla"}


def has_attached(raw: Mapping[str, Any]) -> bool:
    """Whether a published configuration speaks of a drafter."""
    entries = flat_config(raw)
    return any(value for name, value in entries.items() if name.startswith(DRAFTER))


def parse_attached(raw: Mapping[str, Any], target: SinceV4, stages: int) -> AttachedConfig:
    """The sizes in a published configuration.

    Args:
        raw: the JSON object.
        target: sizes of the target; experts are as many as there where nothing else is said.
        stages: how many layers the drafter has, which only its tensors say.

    Raises:
        UserError: a missing or wrongly typed entry, one whose meaning is not known, or a drafter
            that does not fit the target.
    """
    raw = flat_config(raw)
    own = {name: value for name, value in raw.items() if name.startswith(DRAFTER)}
    refuse_other(own, _FIXED)
    refuse_unknown(own, {*_SIZES.values(), _TAPS, _EXPERTS, *_CHOSEN, *_FIXED})
    taps, rates = own.get(_TAPS), raw.get("compress_ratios")
    if not isinstance(taps, list) or not all(type(layer) is int for layer in taps):
        raise UserError(f"{_TAPS} is {taps!r}, expected a list of layers of the target")
    if isinstance(rates, list) and any(rates[target.num_layers :]):
        raise UserError("compress_ratios gives layers of the draft entries; they have none")
    chosen = next((name for name in _CHOSEN if name in own), _CHOSEN[0])
    found = config_of(
        AttachedConfig,
        {
            **{ours: integer(own, published) for ours, published in _SIZES.items()},
            "stages": stages,
            "taps": taps,
            "num_experts": integer(own, _EXPERTS, target.num_experts),
            "experts_per_token": integer(own, chosen, target.experts_per_token),
        },
    )
    found.check_target(target)
    return found
