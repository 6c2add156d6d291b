"""Text to token ids and back, as bytes. Knows nothing about models, prompts or display.

Everything here speaks bytes: a byte-level model has no other unit, and a token of a byte-pair
vocabulary may end in the middle of a character.
"""

import importlib.util
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from dhisparse_jax.errors import UserError

BYTE_VALUES = 256
MOST_BYTE_TOKENS = 512
"""Of a vocabulary of bytes: these and some special tokens; others have a tokenizer."""


@runtime_checkable
class Tokenizer(Protocol):
    """What the command needs of a tokenizer."""

    def encode(self, data: bytes) -> tuple[int, ...]:
        """Token ids of `data`. Raises UserError where the vocabulary cannot hold it."""
        ...

    def decode(self, tokens: Sequence[int]) -> bytes:
        """The bytes that `tokens` stand for; ids without text (padding, controls) give none."""
        ...


class ByteTokenizer:
    """Token ids 0 to 255 are bytes; ids above them have no text."""

    def __init__(self, start: int | None = None) -> None:
        """`start` is put before every text and has no text itself; None: nothing is."""
        self._start = start

    def encode(self, data: bytes) -> tuple[int, ...]:
        """The start token, if any, and the values of the bytes."""
        return tuple(data) if self._start is None else (self._start, *data)

    def decode(self, tokens: Sequence[int]) -> bytes:
        """The bytes of the ids below 256, without the start token's."""
        return bytes(token for token in tokens if token < BYTE_VALUES and token != self._start)


class NoTokenizer:
    """In place of the one that a checkpoint lacks: token ids can be used, texts cannot."""

    def __init__(self, reason: str) -> None:
        """`reason` says what is missing."""
        self._reason = reason

    def encode(self, data: bytes) -> tuple[int, ...]:
        """Raises UserError."""
        raise UserError(self._reason)

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Raises UserError."""
        raise UserError(self._reason)


class FileTokenizer:
    """A `tokenizer.json`, run by the `tokenizers` package.

    Byte-level vocabularies (GLM's, DeepSeek's, Qwen's) decode to the exact bytes of each token, so
    a stream never waits for the rest of a character. Others decode through the file's decoder.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        """Reads `path`. Raises UserError where it is not a usable `tokenizer.json`."""
        if importlib.util.find_spec("tokenizers") is None:
            raise UserError(
                f"{path} needs the tokenizers package: pip install 'dhisparse-jax[tokenizers]'"
            )
        from tokenizers import Tokenizer as Backend

        try:
            text = path.read_text(encoding="utf-8")
            self._backend = Backend.from_str(text)
            document = json.loads(text)
        except Exception as error:  # the package raises bare Exception for a bad file
            raise UserError(f"{path} is not a usable tokenizer.json: {error}") from error
        self._path = path
        self._vocab_size = vocab_size
        self._byte_of = byte_alphabet() if _is_byte_level(document.get("decoder")) else None
        added = document.get("added_tokens") or []
        self._added = {
            entry["id"]: b"" if entry.get("special") else entry["content"].encode()
            for entry in added
        }

    def encode(self, data: bytes, *, bare: bool = False) -> tuple[int, ...]:
        """Token ids, with the special tokens that the file puts around a text.

        Args:
            data: UTF-8 text, in which the texts of special tokens are those tokens.
            bare: put nothing around it, since it has its special tokens already.

        Raises:
            UserError: `data` is not UTF-8, or the file gives ids that the model does not have.
        """
        text = text_of(data, str(self._path))
        tokens = tuple(self._backend.encode(text, add_special_tokens=not bare).ids)
        largest = max(tokens, default=0)
        if largest >= self._vocab_size:
            raise UserError(
                f"{self._path} gives token {largest}, but the model's vocabulary has "
                f"{self._vocab_size}: the tokenizer belongs to another checkpoint"
            )
        return tokens

    def decode(self, tokens: Sequence[int]) -> bytes:
        """Exact bytes for a byte-level vocabulary, else the decoder's text as UTF-8."""
        if self._byte_of is None:
            return self._backend.decode(list(tokens)).encode()
        return b"".join(self._token_bytes(token, self._byte_of) for token in tokens)

    def _token_bytes(self, token: int, byte_of: dict[str, int]) -> bytes:
        if token in self._added:
            return self._added[token]
        text = self._backend.id_to_token(token) or ""
        return bytes(byte_of[character] for character in text if character in byte_of)


def text_of(data: bytes, reader: str) -> str:
    """UTF-8 bytes as text. Raises UserError where they are none, which `reader` needs."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"not UTF-8 text at byte {error.start}, which {reader} needs") from error


def byte_alphabet() -> dict[str, int]:
    """The printable character that byte-level vocabularies write for each byte, inverted.

    Printable Latin-1 bytes stand for themselves; the other 68 take the code points from 256 up,
    in order. In: "Ġ" (code point 288), out: 32, the space. Source: GPT-2's byte-pair encoder.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(BYTE_VALUES) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(BYTE_VALUES + i): byte for i, byte in enumerate(others)}


def load_tokenizer(directory: Path, vocab_size: int) -> Tokenizer:
    """The tokenizer of a checkpoint: its `tokenizer.json`, or bytes where it has none.

    A vocabulary that is too small for bytes, or too large to be one, gets a `NoTokenizer`.

    Args:
        directory: a checkpoint's folder.
        vocab_size: number of token ids that the model has.

    Raises:
        UserError: the file is unusable.
    """
    path = directory / "tokenizer.json"
    if path.exists():
        return FileTokenizer(path, vocab_size)
    if not BYTE_VALUES <= vocab_size <= MOST_BYTE_TOKENS:
        size = "too small for" if vocab_size < BYTE_VALUES else "not one of"
        return NoTokenizer(
            f"{directory} has no tokenizer.json, and its vocabulary of {vocab_size} is {size} "
            f"bytes (256): add the checkpoint's tokenizer.json"
        )
    return ByteTokenizer()


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    """Whether a `decoder` entry of tokenizer.json is, or contains, the byte-level one."""
    if not decoder:
        return False
    parts = decoder.get("decoders") or [decoder]
    return any(part.get("type") == "ByteLevel" for part in parts)
