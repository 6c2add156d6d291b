"""Generated tokens as text: streamed, shortened, and made safe to show. No tables, no JSON."""

import codecs
from collections.abc import Callable, Sequence
from typing import IO

Decode = Callable[[Sequence[int]], bytes]

# Tokens that a decoder sees before the new ones: one that joins words looks back a few.
CONTEXT = 16
# Control characters would move the cursor or recolour a terminal: models write anything.
_CONTROLS = {
    code: "\N{REPLACEMENT CHARACTER}"
    for code in [*range(0x20), *range(0x7F, 0xA0)]
    if chr(code) not in "\n\t"
} | {ord("\r"): None}
_ONE_LINE = {ord("\n"): "\N{DOWNWARDS ARROW WITH CORNER LEFTWARDS}", ord("\t"): " "}


class TokenStream:
    """Gives the bytes that each batch of new tokens adds."""

    def __init__(self, decode: Decode) -> None:
        """`decode` turns token ids into bytes."""
        self._decode = decode
        self._window: list[int] = []

    def feed(self, tokens: Sequence[int]) -> bytes:
        """The bytes of `tokens`, given all that came before."""
        before = self._decode(self._window)
        self._window.extend(tokens)
        added = self._decode(self._window)[len(before) :]
        self._window = self._window[-CONTEXT:]
        return added


class TextOutput:
    """Writes text as it comes: exact bytes to a file or pipe, safe characters to a terminal."""

    def __init__(self, stream: IO[str]) -> None:
        """`stream` is standard output, or stands for it."""
        self._stream = stream
        # A terminal gets characters; so does what has no bytes behind it, such as a StringIO.
        self._bytes: IO[bytes] | None = None if stream.isatty() else getattr(stream, "buffer", None)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_line_start = True

    def write(self, data: bytes) -> None:
        """Write and flush; an unfinished character waits for its other bytes on a terminal."""
        if self._bytes is None:
            self._stream.write(self._decoder.decode(data).translate(_CONTROLS))
        else:
            self._bytes.write(data)
        self._stream.flush()
        self._at_line_start = data.endswith(b"\n") if data else self._at_line_start

    def end(self) -> None:
        """End the line on a terminal; elsewhere the bytes stay exactly the generated ones."""
        if self._bytes is None:
            self._stream.write(self._decoder.decode(b"", final=True))
            self._stream.write("" if self._at_line_start else "\n")
            self._stream.flush()


def safe_text(data: bytes) -> str:
    """`data` as characters that a terminal shows and does not obey."""
    return data.decode("utf-8", "replace").translate(_CONTROLS)


def last_line(decode: Decode, tokens: Sequence[int], width: int) -> str:
    """The last `width` characters of the text on one line, with line ends as arrows."""
    # A token gives a byte at least, and a character takes four at most.
    text = safe_text(decode(tokens[-4 * width :])) if tokens else ""
    return text.translate(_ONE_LINE)[-width:]
