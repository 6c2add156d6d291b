"""Chat templates of checkpoints: where they are, what they see, and what they may not do."""

import json

import pytest

from dhisparse_jax.errors import UserError
from dhisparse_jax.models.chat import load_chat_template

pytest.importorskip("jinja2")

TEMPLATE = """\
{{- bos_token -}}
{%- for message in messages %}
    {%- if message.role not in ["user", "assistant"] %}
        {{- raise_exception("no such role: " + message.role) }}
    {%- endif %}
    <|{{ message.role }}|>
    {{- "\\n" + message.content | trim }}
{%- endfor %}
{%- if add_generation_prompt %}
    <|assistant|>
{% endif %}
"""
USER = [{"role": "user", "content": " a <b> "}]
RENDERED = "[s]    <|user|>\na <b>    <|assistant|>\n"
"""A line's end behind a block is part of the block, as in transformers."""


def settings(path, **entries):
    (path / "tokenizer_config.json").write_text(json.dumps(entries))


@pytest.mark.parametrize("token", ["[s]", {"content": "[s]", "special": True}])
def test_in_the_settings_of_the_tokenizer(tmp_path, token):
    settings(tmp_path, bos_token=token, chat_template=TEMPLATE)
    assert load_chat_template(tmp_path).render(USER) == RENDERED


def test_a_file_of_its_own_comes_first(tmp_path):
    settings(tmp_path, bos_token="[s]", chat_template="no")
    (tmp_path / "chat_template.jinja").write_text(TEMPLATE)
    assert load_chat_template(tmp_path).render(USER) == RENDERED


def test_the_default_of_several(tmp_path):
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    settings(tmp_path, chat_template=named)
    assert load_chat_template(tmp_path).render(USER) == "yes"


@pytest.mark.parametrize("entries", [None, {}, {"chat_template": [{"name": "x"}]}])
def test_a_checkpoint_without_one_is_refused(tmp_path, entries):
    if entries is not None:
        settings(tmp_path, **entries)
    with pytest.raises(UserError, match=r"has no chat template, neither .* leave out --chat"):
        load_chat_template(tmp_path)


def test_json_is_not_escaped_for_the_web(tmp_path):
    settings(tmp_path, chat_template="{{ messages | tojson }}")
    found = load_chat_template(tmp_path).render([{"role": "user", "content": "é<'"}])
    assert found == '[{"role": "user", "content": "é<\'"}]'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{% if %}", "is not usable: Expected an expression"),
        ("{{ raise_exception('only once') }}", "failed: only once"),
        ("{{ ''.__class__.__mro__ }}", "failed: access to attribute '__class__'"),
        ("{{ messages.append(1) }}", "failed: access to attribute 'append'"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "failed: Range too big"),
        ("{{ 1 // 0 }}", "failed: "),
    ],
)
def test_what_goes_wrong_is_one_line(tmp_path, source, message):
    settings(tmp_path, chat_template=source)
    with pytest.raises(UserError, match=r"the chat template in .*tokenizer_config.json") as error:
        load_chat_template(tmp_path).render(USER)
    assert message in str(error.value)


def test_without_jinja(tmp_path, monkeypatch):
    settings(tmp_path, chat_template="x")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'dhisparse-jax\[chat\]'"):
        load_chat_template(tmp_path)
