"""Tokenizers: bytes, and tokenizer.json files made here."""

import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

from dhisparse_jax.errors import UserError
from dhisparse_jax.models.tokenizer import (
    ByteTokenizer,
    FileTokenizer,
    byte_alphabet,
    load_tokenizer,
)

TEXT = "héllo wörld €\n\ttabs  and\x00zero"


def byte_level_file(path, *, special=True):
    """A byte-level vocabulary with one merge ("ll") and a start token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {token: number for number, token in enumerate([*alphabet, "ll"])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[("l", "l")]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    (tokenizer.add_special_tokens if special else tokenizer.add_tokens)(["<start>"])
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<start> $A", special_tokens=[("<start>", tokenizer.token_to_id("<start>"))]
        )
    tokenizer.save(str(path / "tokenizer.json"))
    return tokenizer


def test_bytes_are_their_own_tokens():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode(b"\x00a\xff") == (0, 97, 255)
    assert tokenizer.decode([0, 97, 255]) == b"\x00a\xff"
    assert tokenizer.decode([97, 256, 1000]) == b"a"


def test_start_token_has_no_text():
    tokenizer = ByteTokenizer(start=0)
    assert tokenizer.encode(b"a") == (0, 97)
    assert tokenizer.decode([0, 97, 0]) == b"a"


def test_alphabet_is_that_of_the_tokenizers_package():
    alphabet = byte_alphabet()
    assert set(alphabet) == set(pre_tokenizers.ByteLevel.alphabet())
    assert sorted(alphabet.values()) == list(range(256))


def test_byte_level_file_decodes_every_token_to_its_bytes(tmp_path):
    byte_level_file(tmp_path)
    tokenizer = load_tokenizer(tmp_path, 300)
    tokens = tokenizer.encode(TEXT.encode())
    assert b"".join(tokenizer.decode([token]) for token in tokens) == TEXT.encode()
    assert len(tokens) == len(TEXT.encode())  # one merge less, one start token more
    assert tokenizer.decode(tokens[:1]) == b""


def test_added_tokens_that_are_not_special_have_text(tmp_path):
    backend = byte_level_file(tmp_path, special=False)
    tokenizer = load_tokenizer(tmp_path, 300)
    assert tokenizer.decode([backend.token_to_id("<start>"), 299]) == b"<start>"


def test_other_files_decode_through_their_own_decoder(tmp_path):
    backend = Tokenizer(models.WordLevel({"one": 0, "two": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "tokenizer.json"))
    tokenizer = load_tokenizer(tmp_path, 3)
    assert tokenizer.encode(b"two one") == (1, 0)
    assert tokenizer.decode([1, 0]) == b"two one"


def test_text_that_is_not_utf8_is_refused(tmp_path):
    byte_level_file(tmp_path)
    with pytest.raises(UserError, match="not UTF-8 text at byte 2"):
        load_tokenizer(tmp_path, 300).encode(b"ab\xff")


def test_tokens_outside_the_vocabulary_are_refused(tmp_path):
    byte_level_file(tmp_path)
    with pytest.raises(UserError, match="gives token 257, but the model's vocabulary has 257"):
        load_tokenizer(tmp_path, 257).encode(b"a")


def test_a_damaged_file_is_refused(tmp_path):
    (tmp_path / "tokenizer.json").write_text(json.dumps({"model": 1}))
    with pytest.raises(UserError, match=r"not a usable tokenizer\.json"):
        load_tokenizer(tmp_path, 300)


def test_no_file_means_bytes_where_they_fit(tmp_path):
    assert load_tokenizer(tmp_path, 256).encode(b"a") == (97,)
    with pytest.raises(UserError, match="vocabulary of 255 is too small for bytes"):
        load_tokenizer(tmp_path, 255).encode(b"a")
    with pytest.raises(UserError, match=r"no tokenizer\.json, .* 154880 is not one of bytes"):
        load_tokenizer(tmp_path, 154_880).encode(b"a")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    byte_level_file(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match="pip install"):
        FileTokenizer(tmp_path / "tokenizer.json", 300)
