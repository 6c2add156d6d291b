"""Trace files: what they say, and which lines are refused."""

import json

import pytest

from dhisparse_jax.cli.trace_file import read_trace
from dhisparse_jax.errors import UserError

GOOD = {"arrival": 0.5, "prompt_tokens": 40, "output_tokens": 7, "seed": 3}


def trace(folder, *lines):
    path = folder / "t.jsonl"
    path.write_text(
        "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
    )
    return path


def test_reads_lines(tmp_path):
    (tmp_path / "p.txt").write_bytes(b"hello")
    path = trace(tmp_path, GOOD, "", {"arrival": 2, "prompt_file": "p.txt", "output_tokens": 1})
    one, other = read_trace(path)
    assert (one.arrival, one.prompt, one.prompt_tokens) == (0.5, None, 40)
    assert (one.output_tokens, one.seed) == (7, 3)
    assert (other.arrival, other.prompt, other.prompt_tokens) == (2.0, b"hello", 0)
    assert (other.output_tokens, other.seed) == (1, 0)
    assert other.where == f"{path}:3"


@pytest.mark.parametrize(
    "line, message",
    [
        ("{", "not JSON"),
        ("[1]", "not a JSON object but list"),
        (GOOD | {"promt": 1}, "unknown field promt; there are arrival,"),
        (GOOD | {"prompt_file": "x"}, "either prompt_file or prompt_tokens"),
        ({"arrival": 0, "output_tokens": 1}, "either prompt_file or prompt_tokens"),
        (GOOD | {"arrival": -1}, "arrival is -1; it must be seconds, 0 or more"),
        (GOOD | {"arrival": "soon"}, "arrival is soon"),
        ('{"arrival": NaN, "prompt_tokens": 1, "output_tokens": 1}', "arrival is nan"),
        ({"prompt_tokens": 1, "output_tokens": 1}, "arrival is None"),
        (GOOD | {"prompt_tokens": 0}, "prompt_tokens is 0; it must be a whole number of 1 to"),
        (GOOD | {"output_tokens": 2.5}, r"output_tokens is 2\.5"),
        (GOOD | {"output_tokens": True}, "output_tokens is True"),
        (GOOD | {"seed": -1}, "seed is -1; it must be a whole number of 0 to 4294967295"),
        ({"arrival": 0, "prompt_file": 3, "output_tokens": 1}, "prompt_file is 3"),
        (
            {"arrival": 0, "prompt_file": "-", "output_tokens": 1},
            "prompt_file is -: standard input",
        ),
        ({"arrival": 0, "prompt_file": "no.txt", "output_tokens": 1}, r"no\.txt: no such file"),
    ],
)
def test_bad_lines_are_refused_with_their_number(tmp_path, line, message):
    with pytest.raises(UserError, match=rf"t\.jsonl:2: .*{message}"):
        read_trace(trace(tmp_path, GOOD, line))


def test_files_without_requests(tmp_path):
    with pytest.raises(UserError, match="has no request"):
        read_trace(trace(tmp_path, "", " "))
    with pytest.raises(UserError, match="no such file"):
        read_trace(tmp_path / "none.jsonl")
    (tmp_path / "b").write_bytes(b"\xff{}")
    with pytest.raises(UserError, match=r"not UTF-8 text: .* at byte 0"):
        read_trace(tmp_path / "b")
