"""fp8 formats by hand, in NumPy: what the library must store, byte for byte."""

import jax.numpy as jnp
import numpy as np


def scaled_numbers(groups, power_scales=False):
    """The e4m3 numbers of groups of float32 numbers (the last axis), and a scale for each group."""
    inverse = np.float32(1 / 448)
    scales = np.maximum(np.abs(groups).max(axis=-1) * inverse, np.float32(2.0**-120))
    if power_scales:
        fraction, exponent = np.frexp(scales)  # scale = fraction * 2**exponent, 0.5 <= fraction < 1
        scales = np.ldexp(np.float32(1), exponent - (fraction == 0.5))
    numbers = np.clip(groups / scales[..., None], -448, 448)
    return numbers.astype(jnp.float8_e4m3fn), scales


def kept_keys(keys, geometry):
    """The float32 numbers that stored index keys stand for."""
    if geometry.index_format != "fp8":
        return np.asarray(keys).astype(geometry.index_dtype).astype(np.float32)
    numbers, scales = scaled_numbers(np.asarray(keys), geometry.index_power_scales)
    return numbers.astype(np.float32) * scales[..., None]


def kept_rows(values, row):
    """The float32 numbers that stored rows stand for."""
    values, form = np.asarray(values), row.dtype
    if isinstance(form, str):
        return values.astype(form).astype(np.float32)
    head, rest = values[..., : form.quantised], values[..., form.quantised :]
    groups = head.reshape(*head.shape[:-1], -1, form.group)
    numbers, scales = scaled_numbers(groups, form.power_scales)
    kept = (numbers.astype(np.float32) * scales[..., None]).reshape(head.shape)
    return np.concatenate([kept, rest.astype(jnp.bfloat16).astype(np.float32)], axis=-1)


def row_words(values, row):
    """Rows in FlashMLA's layout as int32 words: e4m3, float32 scales, bfloat16."""
    groups = values[..., : row.quantised].reshape(*values.shape[:-1], -1, row.group)
    numbers, scales = scaled_numbers(groups, row.power_scales)
    parts = [numbers, scales[..., None], values[..., row.quantised :].astype(jnp.bfloat16)]
    raw = [np.ascontiguousarray(part).view(np.uint8) for part in parts]
    whole = np.concatenate([part.reshape(*values.shape[:-1], -1) for part in raw], axis=-1)
    fill = -whole.shape[-1] % 8
    return np.pad(whole, [(0, 0)] * (whole.ndim - 1) + [(0, fill)]).view(np.int32)
