"""Generated tokens as text: streamed, shortened, made safe."""

import io

from dhisparse_jax.cli.text import CONTEXT, TextOutput, TokenStream, last_line, safe_text


class Terminal(io.StringIO):
    def isatty(self):
        return True


def spaced(tokens):
    """A decoder that joins words: what a token gives depends on the one before it."""
    return " ".join(str(token) for token in tokens).encode()


def test_stream_gives_what_each_token_adds():
    stream = TokenStream(spaced)
    pieces = [stream.feed([n]) for n in range(40)]
    assert b"".join(pieces) == spaced(range(40))
    assert pieces[:3] == [b"0", b" 1", b" 2"]


def test_stream_takes_several_tokens_at_once():
    stream = TokenStream(spaced)
    assert stream.feed([1, 2]) + stream.feed([]) + stream.feed(range(50)) == spaced(
        [1, 2, *range(50)]
    )


def test_stream_does_not_decode_everything_again():
    longest = []
    stream = TokenStream(lambda tokens: longest.append(len(tokens)) or bytes(tokens))
    for _ in range(100):
        stream.feed([65])
    assert max(longest) == CONTEXT + 1


def test_terminal_waits_for_whole_characters():
    screen = Terminal()
    output = TextOutput(screen)
    euro = "€".encode()
    output.write(euro[:1])
    assert screen.getvalue() == ""
    output.write(euro[1:])
    output.end()
    assert screen.getvalue() == "€\n"


def test_terminal_gets_one_line_end_and_no_control_characters():
    screen = Terminal()
    output = TextOutput(screen)
    output.write(b"a\x1b[31m\x07b\r\n")
    output.end()
    assert screen.getvalue() == "a\ufffd[31m\ufffdb\n"


def test_terminal_shows_an_unfinished_character_at_the_end():
    screen = Terminal()
    output = TextOutput(screen)
    output.write("€".encode()[:2])
    output.end()
    assert screen.getvalue() == "\ufffd\n"


def test_safe_text_replaces_what_is_no_text():
    assert safe_text(b"a\xff\x9b\tb\n") == "a\ufffd\ufffd\tb\n"


def test_last_line_is_the_end_on_one_line():
    assert last_line(bytes, list(b"one\ntwo\tthree"), 9) == "two three"
    assert last_line(bytes, list(b"a\nb"), 9) == "a↵b"
    assert last_line(bytes, [], 9) == ""
