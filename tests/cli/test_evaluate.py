"""`dhisparse evaluate` on a model whose probabilities are known."""

import contextlib
import math
import signal

import pytest

from dhisparse_jax.cli import session
from dhisparse_jax.cli.evaluate import TOKENS_PER_STEP, Window, window_length, windows
from dhisparse_jax.models.tokenizer import ByteTokenizer
from tests.cli.fake_engine import FakeLoaded, fake_teacher_force

# Of a byte after its predecessor in the alphabet, and of any other.
EXPECTED, OTHER = 1.0, 1.0 + math.log2(255)


def test_bits_per_byte_of_files_and_of_all(run, fake, prompt):
    a, b = prompt("a", b"abcd"), prompt("b", b"aaa")
    result = run("evaluate", a, b)
    bits_a, bits_b = 8 + 3 * EXPECTED, 8 + 2 * OTHER
    document = result.last_json
    assert result.code == 0
    assert list(document) == ["files", "bits_per_byte"]
    assert [(item["name"], item["bytes"]) for item in document["files"]] == [("a", 4), ("b", 3)]
    assert document["files"][0]["bits_per_byte"] == pytest.approx(bits_a / 4, rel=1e-6)
    assert document["files"][1]["bits_per_byte"] == pytest.approx(bits_b / 3, rel=1e-6)
    assert document["bits_per_byte"] == pytest.approx((bits_a + bits_b) / 7, rel=1e-6)
    assert result.out.decode().splitlines()[0] == f"{bits_a / 4:8.4f} bits per byte  a"


def test_a_start_token_predicts_the_first_byte(run, fake, prompt):
    fake.loaded = FakeLoaded(tokenizer=ByteTokenizer(start=0))
    document = run("evaluate", prompt("a", b"\x01\x02")).last_json
    assert document["bits_per_byte"] == pytest.approx(EXPECTED, rel=1e-6)


def test_a_file_longer_than_the_context_counts_every_byte_once(run, fake, prompt):
    data = bytes(ord("a") + i % 26 for i in range(300))
    document = run("evaluate", prompt("a", data)).last_json
    jumps = (len(data) - 1) // 26
    bits = 8 + (len(data) - 1 - jumps) * EXPECTED + jumps * OTHER
    assert document["bits_per_byte"] == pytest.approx(bits / 300, rel=1e-6)
    assert fake.asked["positions"] == window_length(64)
    assert fake.asked["queries"] == TOKENS_PER_STEP


def test_a_termination_ends_between_steps(run, fake, prompt, monkeypatch):
    """Also where a library swallows what a signal handler raises."""

    def swallowing(*arguments):
        for event in fake_teacher_force(*arguments):
            with contextlib.suppress(KeyboardInterrupt):
                signal.raise_signal(signal.SIGTERM)
            yield event

    monkeypatch.setattr(session, "teacher_force", swallowing)
    result = run("evaluate", prompt("a", b"abcd"))
    assert (result.code, result.out) == (130, b"")
    assert "stopping after this step" in result.err


def test_a_file_of_one_byte(run, fake, prompt):
    assert run("evaluate", prompt("a", b"a")).last_json["bits_per_byte"] == pytest.approx(8)


def test_windows_overlap_by_half_and_count_each_token_once():
    assert windows(10, 4) == [
        Window(0, 1, 4),
        Window(2, 4, 6),
        Window(4, 6, 8),
        Window(6, 8, 10),
    ]
    assert windows(1, 4) == []
    assert windows(4, 4) == [Window(0, 1, 4)]


@pytest.mark.parametrize("length", [2, 3, 7, 8, 9, 40, 41])
@pytest.mark.parametrize("longest", [2, 3, 8, 9])
def test_windows_cover_any_length(length, longest):
    found = windows(length, longest)
    counted = [token for window in found for token in range(window.first, window.end)]
    assert counted == list(range(1, length))
    assert all(0 <= w.start < w.first < w.end <= w.start + longest for w in found)


def test_bad_files_are_refused(run, fake, tmp_path, prompt):
    assert "no such file" in run("evaluate", tmp_path / "none").error
    assert "is empty" in run("evaluate", prompt("empty", b"")).error
    assert "Missing argument" in run("evaluate").error
    assert fake.asked == {}
