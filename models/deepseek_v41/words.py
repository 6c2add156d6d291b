"""Ids of words: tokens that differ in case, accents or spaces alone have the same one.

Tables of n-grams know tokens by these ids, which follow from the tokenizer and are in no tensor of
a published checkpoint. Source: DeepSeek-V4.1, and Cheng et al. (2026), "Conditional Memory via
Scalable Lookup".
"""

import importlib.util
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Int

from dhisparse_jax.configs.deepseek_v41 import V41Config
from dhisparse_jax.errors import UserError

FILE = "tokenizer.json"

_SPACE = "\ue000"
"""Stands for a token that is a space and nothing else, which would be cut off."""
_BROKEN = "\N{REPLACEMENT CHARACTER}"
"""In the text of a token that is a part of a character."""


def read_words(directory: Path, config: V41Config) -> Int[np.ndarray, " vocab"]:
    """Id of every token, by the tokenizer in a checkpoint's folder.

    Without one, if as many words as tokens are published, every token is a word of its own.

    Raises:
        UserError: There is no tokenizer, or it has another number of words than is published.
    """
    path = directory / FILE
    if not path.is_file():
        if config.engram_vocab == config.vocab_size:
            return np.arange(config.vocab_size, dtype=np.int32)
        raise UserError(f"{path} is missing; tables of n-grams need it to know words by their ids")
    if importlib.util.find_spec("tokenizers") is None:
        raise UserError(
            f"{path} needs the tokenizers package: pip install 'dhisparse-jax[tokenizers]'"
        )
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the package raises bare Exception for a bad file
        raise UserError(f"{path} is not a usable tokenizer.json: {error}") from error
    words = word_ids(tokenizer)
    count = int(words.max(initial=-1)) + 1
    if count != config.engram_vocab or len(words) > config.vocab_size:
        raise UserError(
            f"{path} has {len(words)} tokens that spell {count} words, but the tables of n-grams "
            f"are for {config.vocab_size} tokens and {config.engram_vocab} words"
        )
    # What the tokenizer does not know is in no text.
    return np.pad(words, (0, config.vocab_size - len(words)))


def word_ids(tokenizer: Any) -> Int[np.ndarray, " tokens"]:  # noqa: ANN401  # `tokenizers` has no types
    """Ids in the order in which words appear among the tokens."""
    normalizer, ids = _normalizer(), dict[str, int]()
    count = tokenizer.get_vocab_size(with_added_tokens=True)
    found = np.empty(count, np.int32)
    for token in range(count):
        text = tokenizer.decode([token], skip_special_tokens=False)
        key = text
        if _BROKEN in text:
            key = tokenizer.id_to_token(token)
        elif normalizer.normalize_str(text):
            key = normalizer.normalize_str(text)
        found[token] = ids.setdefault(key, len(ids))
    return found


def _normalizer() -> Any:  # noqa: ANN401  # `tokenizers` has no types
    """Composed and decomposed again, without accents, in lower case, in single inner spaces."""
    from tokenizers import Regex, normalizers

    return normalizers.Sequence(
        [
            normalizers.NFKC(),
            normalizers.NFD(),
            normalizers.StripAccents(),
            normalizers.Lowercase(),
            normalizers.Replace(Regex(r"[ \t\r\n]+"), " "),
            normalizers.Replace(Regex(r"^ $"), _SPACE),
            normalizers.Strip(),
            normalizers.Replace(_SPACE, " "),
        ]
    )
