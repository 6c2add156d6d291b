"""--kv-format and --index-format reach the model from every command that runs one."""

import json

import numpy as np
import pytest

from dhisparse_jax.cli import session
from dhisparse_jax.cli.format_options import FormatName, FormatOptions
from dhisparse_jax.configs.formats import check_history_formats
from dhisparse_jax.errors import UserError
from dhisparse_jax.models import registry


@pytest.fixture
def commands(tmp_path):
    """Arguments of each command."""
    text, trace = tmp_path / "a", tmp_path / "trace"
    text.write_bytes(b"abc")
    trace.write_text(json.dumps({"arrival": 0, "prompt_tokens": 3, "output_tokens": 2}))
    np.save(tmp_path / "inputs.npy", np.zeros((1, 4), np.int64))
    np.save(tmp_path / "logits.npy", np.zeros((1, 4, 9), np.float32))
    return {
        "decode": ["decode", "-p", text],
        "serve": ["serve", "--trace", trace],
        "evaluate": ["evaluate", text],
        "verify-hf": ["verify-hf", tmp_path],
    }


@pytest.fixture
def asked(monkeypatch):
    """What the command asks the registry for; no model is loaded."""
    found = {}

    def load(name, dtype, **options):
        found.update(options)
        raise UserError("that is all")

    monkeypatch.setattr(registry, "load", load)
    return found


@pytest.mark.parametrize("command", ["decode", "serve", "evaluate", "verify-hf"])
def test_formats_are_passed_on(run, commands, asked, command):
    arguments = commands[command]
    assert run(*arguments).error == "that is all"
    assert (asked["kv_format"], asked["index_format"]) == (None, None)
    assert run(*arguments, "--kv-format", "fp8", "--index-format", "bfloat16").code == 2
    assert (asked["kv_format"], asked["index_format"]) == ("fp8", "bfloat16")


def test_other_formats_are_refused(run, commands, asked):
    error = run(*commands["decode"], "--kv-format", "fp6").error
    assert "'fp6' is not one of 'float32', 'bfloat16', 'fp8', 'fp4'" in error
    assert asked == {}


def test_a_format_that_the_model_has_not_is_refused_by_its_option(run, commands, monkeypatch):
    def load(name, dtype, *, kv_format, **_):
        check_history_formats(kv_format, "float32", 64)

    monkeypatch.setattr(registry, "load", load)
    error = run(*commands["decode"], "--kv-format", "fp4").error
    assert error.startswith("--kv-format is 'fp4', for which other models were trained; leave it")


def test_documents_and_settings_name_the_formats():
    loaded = session.load_model("tiny", formats=FormatOptions(FormatName.FP8, FormatName.BFLOAT16))
    setting = session.setting_of(loaded, session.PolicyName.FIXED)
    assert (setting.kv_format, setting.index_format) == ("fp8", "bfloat16")
