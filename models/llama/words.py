"""The byte-pair tokenizer that a GGUF file describes, run by the `tokenizers` package."""

import importlib.util
from collections.abc import Mapping, Sequence
from typing import Any

from dhisparse_jax.errors import UserError

_CONTROL = 3
"""The `tokenizer.ggml.token_type` of tokens that no text contains."""

_SPLITS = ("smollm",)
"""Ways to split a text before merging that are known: digits one by one, then as GPT-2 does."""


class Words:
    """Texts to token ids: byte-level BPE, nothing put around a text."""

    def __init__(
        self, tokens: Sequence[str], merges: Sequence[str], special: Sequence[str]
    ) -> None:
        """`merges` are pairs with a space between them; `special` ones match whole texts."""
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        pairs = [(left, right) for left, _, right in (merge.partition(" ") for merge in merges)]
        vocabulary = {token: number for number, token in enumerate(tokens)}
        self._backend = Tokenizer(models.BPE(vocabulary, pairs))
        self._backend.pre_tokenizer = pre_tokenizers.Sequence(
            [
                pre_tokenizers.Digits(individual_digits=True),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
            ]
        )
        self._backend.decoder = decoders.ByteLevel()
        self._backend.add_special_tokens([AddedToken(text, special=True) for text in special])

    def encode(self, text: str) -> list[int]:
        """Token ids of a text, in which the texts of special tokens are those tokens."""
        return self._backend.encode(text, add_special_tokens=False).ids

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of token ids, special ones included."""
        return self._backend.decode(list(tokens), skip_special_tokens=False)


def words_of(fields: Mapping[str, Any]) -> Words:
    """The tokenizer of a GGUF file.

    Args:
        fields: The file's metadata.

    Raises:
        UserError: the package is missing, or the tokenizer is of a kind that is not known.
    """
    if importlib.util.find_spec("tokenizers") is None:
        raise UserError("the tokenizer needs a package: pip install 'dhisparse-jax[tokenizers]'")
    kind = fields.get("tokenizer.ggml.model"), fields.get("tokenizer.ggml.pre")
    if kind[0] != "gpt2" or kind[1] not in _SPLITS:
        known = ", ".join(f"('gpt2', {name!r})" for name in _SPLITS)
        raise UserError(f"the file's tokenizer is {kind}; only {known} can be run")
    if fields.get("tokenizer.ggml.add_bos_token") or fields.get("tokenizer.ggml.add_space_prefix"):
        raise UserError("the file's tokenizer puts something before a text, which is not done here")
    tokens = fields["tokenizer.ggml.tokens"]
    types = fields["tokenizer.ggml.token_type"]
    special = [token for token, type_ in zip(tokens, types, strict=True) if type_ == _CONTROL]
    return Words(tokens, fields["tokenizer.ggml.merges"], special)
