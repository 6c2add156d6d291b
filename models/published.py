"""Tensors of a published checkpoint as numbers, whatever they are stored as.

Between the files (`models.tensor_files`) and the models, which say which tensors they are made of:
here a tensor has one name, transformers', and quantised ones are seen as what they stand for.
"""

from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import jax.numpy as jnp
import numpy as np

from dhisparse_jax.errors import UserError
from dhisparse_jax.models.entries import refuse_unknown
from dhisparse_jax.models.quantised import (
    QuantisedTensor,
    dequantise,
    format_of,
    is_quantised,
    scale_names,
)
from dhisparse_jax.models.tensor_files import (
    DTYPES,
    FLOATS,
    INTEGERS,
    Header,
    Shape,
    check_header,
    check_names,
    read_headers,
    read_rows,
    renamed,
)

DEFAULT_BLOCK = (128, 128)
_QUANTISATION = {
    "quant_method", "fmt", "weight_block_size", "activation_scheme", "modules_to_not_convert",
    "ignored_layers", "modules_to_convert", "scale_fmt", "expert_dtype", "dequantize",
}  # fmt: skip
"""Entries of a `quantization_config` that are read, or that tensors themselves show."""
NO_INTEGERS: Mapping[str, int] = MappingProxyType({})
NO_BLOCKS: Mapping[str, tuple[int, int]] = MappingProxyType({})
_ALL = slice(None)


class Published:
    """The tensors that a model is made of, checked from their headers; values are read on demand.

    Attributes:
        headers: of the tensors by their names in `expected`, those of scales included.
        quantised: how the quantised ones of them are stored.
        scales: shapes of their scales by name.
        unused: sorted names, as in the files, of tensors that the model does not use.
    """

    def __init__(
        self,
        directory: Path,
        expected: Mapping[str, Shape],
        *,
        block: tuple[int, int] = DEFAULT_BLOCK,
        blocks: Mapping[str, tuple[int, int]] = NO_BLOCKS,
        canonical: Callable[[str], str] = lambda name: name,
        ignored: Callable[[Collection[str]], Collection[str]] = lambda names: (),
        integers: Mapping[str, int] = NO_INTEGERS,
    ) -> None:
        """Reads the headers of a directory and compares them with what the model needs.

        Args:
            directory: holds the files.
            expected: name and shape of every tensor of the model; scales are found beside them.
            block: rows and columns of a block of 8-bit numbers.
            blocks: the same of tensors that have another one, by name.
            canonical: the name in `expected` of a tensor by its name in the files.
            ignored: which of all tensors, by their names in `expected`, are none of the model's.
            integers: names in `expected` of tensors of whole numbers from 0 on, and how many
                there are of these.

        Raises:
            UserError: Missing or damaged files, or tensors that are missing, left over, wrongly
                shaped, or of an unsupported type.
        """
        found = renamed(read_headers(directory), canonical)
        unused = frozenset(ignored(found.keys()))
        self.unused = tuple(sorted(found[name].name for name in unused))
        self.headers = {name: header for name, header in found.items() if name not in unused}
        self._integers = integers
        self.quantised: dict[str, QuantisedTensor] = {}
        for name, shape in expected.items():
            header = self.headers.get(name)
            if header is None:
                continue
            if is_quantised(header.dtype, shape):
                self.quantised[name] = self._describe(name, header, shape, blocks.get(name, block))
            else:
                check_header(header, shape, INTEGERS if name in integers else FLOATS)
        self.scales = {t.scale: self.headers[t.scale].shape for t in self.quantised.values()}
        check_names({**expected, **self.scales}, self.headers)

    def rows(self, name: str, rows: slice = _ALL, stored: bool = False) -> np.ndarray:
        """Rows of a tensor: quantised ones as float32 numbers, others as they are stored.

        Args:
            name: of the tensor.
            rows: which of its rows.
            stored: whether quantised numbers are meant as they are stored too.

        Raises:
            UserError: They cannot be read, or are scales that nothing can be multiplied with, or
                numbers of what there is not.
        """
        values = read_rows(self.headers[name], rows)
        tensor = self.quantised.get(name)
        if name in self.scales:
            self._check_scales(name, values)
        if name in self._integers:
            self._check_integers(name, values)
        if tensor is None or stored:
            return values
        first = rows.indices(tensor.shape[0])[0]
        return dequantise(values, self.rows(tensor.scale), tensor.weights, first)

    def exact_dtype(self, name: str) -> np.dtype:
        """The least dtype of floats that loses nothing of a tensor, from its header."""
        tensor = self.quantised.get(name)
        if tensor is None:
            return DTYPES[self.headers[name].dtype]
        return np.dtype(jnp.bfloat16 if tensor.weights.scales_are_powers else np.float32)

    def _check_scales(self, name: str, values: np.ndarray) -> None:
        """Raises UserError where a scale is negative, infinite or not a number."""
        wide, header = values.astype(np.float32), self.headers[name]
        bad = ~(np.isfinite(wide) & (wide >= 0))
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            raise UserError(f"{header.file}: {header.name} is {wide[at]} at {list(at)}")

    def _check_integers(self, name: str, values: np.ndarray) -> None:
        """Raises UserError where a number is negative or too large."""
        count, header = self._integers[name], self.headers[name]
        bad = (values < 0) | (values >= count)
        if bad.any():
            at = tuple(int(i) for i in np.argwhere(bad)[0])
            raise UserError(
                f"{header.file}: {header.name} is {values[at]} at {list(at)}; it can be 0 to "
                f"{count - 1}"
            )

    def _describe(
        self, name: str, header: Header, shape: Shape, block: tuple[int, int]
    ) -> QuantisedTensor:
        """How a quantised matrix is stored, from the headers of its numbers and its scales."""
        scale = next((own for own in scale_names(name) if own in self.headers), None)
        if scale is None:
            names = " nor ".join(scale_names(header.name))
            raise UserError(
                f"{header.file}: {header.name} is {header.dtype} without scales; neither {names} "
                "is in the checkpoint"
            )
        found, (rows, columns) = self.headers[scale], shape
        try:
            weights = format_of(header.dtype, found.dtype, block)
        except UserError as error:
            raise UserError(f"{found.file}: {found.name}: {error}") from error
        check_header(header, weights.stored_shape(rows, columns), {header.dtype})
        check_header(found, weights.scale_shape(rows, columns), {found.dtype})
        return QuantisedTensor(scale, (rows, columns), weights)


def weight_block(quantisation: object) -> tuple[int, int]:
    """Rows and columns of a block, from the `quantization_config` of a configuration.

    Raises:
        UserError: A method or a form of it that is not supported.
    """
    if quantisation is None:
        return DEFAULT_BLOCK
    if not isinstance(quantisation, Mapping):
        raise UserError(f"quantization_config is {quantisation!r}, expected an object")
    method = quantisation.get("quant_method")
    if method != "fp8":
        raise UserError(f"quantization_config: quant_method is {method!r}; only 'fp8' is supported")
    form = quantisation.get("fmt", "e4m3")
    if form not in ("e4m3", "float8_e4m3fn"):
        raise UserError(f"quantization_config: fmt is {form!r}; only 'e4m3' is supported")
    try:
        refuse_unknown(quantisation, _QUANTISATION)
    except UserError as error:
        raise UserError(f"quantization_config: {error}") from error
    block = quantisation.get("weight_block_size", list(DEFAULT_BLOCK))
    sizes: list[Any] = block if isinstance(block, list) else []
    if len(sizes) != 2 or not all(type(size) is int and size > 0 for size in sizes):
        raise UserError(f"quantization_config: weight_block_size is {block!r}, expected two sizes")
    return sizes[0], sizes[1]
