"""Prompt files and default prompts."""

import pytest

from dhisparse_jax.cli.prompts import cut_after_head, cut_at_line_end, default_prompts, short_names
from dhisparse_jax.errors import UserError
from dhisparse_jax.models.train.corpus import EVALUATION_MODULES


def test_names_lose_their_folders_where_they_stay_distinct():
    assert short_names(["x/a", "y/b", "-"]) == ["a", "b", "stdin"]
    assert short_names(["x/a", "y/a"]) == ["x/a", "y/a"]


def test_cut_keeps_whole_lines_where_it_can():
    assert cut_at_line_end(b"one\ntwo\nthree", 10) == b"one\ntwo\n"
    assert cut_at_line_end(b"one line", 3) == b"one"
    assert cut_at_line_end(b"a\n", 99) == b"a\n"


def test_cut_ends_with_the_head_of_a_function():
    text = b"import x\n\ndef f(a):\n    pass\n\nclass C:\n    def g(self):\n        pass\n"
    assert cut_after_head(text, len(text)).endswith(b"    def g(self):\n")
    assert cut_after_head(text, 40).endswith(b"def f(a):\n")
    assert cut_after_head(text, 12) == b"import x\n\n"


def test_default_prompts_begin_left_out_modules():
    prompts = default_prompts(8000)
    lengths = [len(item.data) for item in prompts]
    assert lengths == sorted(lengths, reverse=True)
    assert len({item.name for item in prompts}) == 4
    assert {item.name.removesuffix(".py") for item in prompts} <= set(EVALUATION_MODULES)
    assert all(item.data.endswith(b"\n") for item in prompts)


def test_default_prompts_are_no_longer_than_asked():
    assert max(len(item.data) for item in default_prompts(700)) <= 700


def test_a_library_without_sources_is_an_error(tmp_path):
    with pytest.raises(
        UserError, match=r"no default prompts: .* has no argparse\.py.*; give --prompt-file FILE"
    ):
        default_prompts(8000, tmp_path)
