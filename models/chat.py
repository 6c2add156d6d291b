"""Chat templates: a message as the text that a checkpoint was trained to answer.

A template is a program that came with the weights, so it runs in a sandbox and sees nothing but the
messages and the names of the special tokens.
"""

import datetime
import importlib.util
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dhisparse_jax.errors import UserError
from dhisparse_jax.models.hf_config import read_json

TEMPLATE_FILE, CONFIG_FILE = "chat_template.jinja", "tokenizer_config.json"
_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


class ChatTemplate:
    """Renders messages; see transformers' documentation of chat templates for the contract."""

    def __init__(self, source: str, tokens: Mapping[str, str], path: Path) -> None:
        """Reads a template.

        Args:
            source: of the template, in Jinja.
            tokens: texts of special tokens by their names in templates.
            path: of the file that it is from.

        Raises:
            UserError: the template is not usable, or jinja2 is missing.
        """
        if importlib.util.find_spec("jinja2") is None:
            raise UserError(f"{path} needs the jinja2 package: pip install 'dhisparse-jax[chat]'")
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _json
        calls: dict[str, Any] = {"raise_exception": _refuse, "strftime_now": _now}
        self._tokens, self._path = dict(tokens), path
        try:
            self._template = environment.from_string(source, globals=calls)
        except TemplateError as error:
            raise UserError(f"the chat template in {path} is not usable: {error}") from error

    def render(self, messages: Sequence[Mapping[str, str]]) -> str:
        """The text of a conversation up to where the answer begins.

        Raises:
            UserError: the template refuses the messages, or does what it must not.
        """
        try:
            return self._template.render(
                messages=list(messages), add_generation_prompt=True, **self._tokens
            )
        except Exception as error:  # whatever a program from elsewhere may do
            raise UserError(f"the chat template in {self._path} failed: {error}") from error


def load_chat_template(directory: Path) -> ChatTemplate:
    """The chat template of a checkpoint: its own file, else the entry of its tokenizer's settings.

    Raises:
        UserError: there is none, or it is not usable.
    """
    path, settings = directory / TEMPLATE_FILE, directory / CONFIG_FILE
    entries = read_json(settings) if settings.is_file() else {}
    tokens = {name: _text(entries[name]) for name in _TOKENS if entries.get(name)}
    if path.is_file():
        try:
            return ChatTemplate(path.read_text(encoding="utf-8"), tokens, path)
        except (OSError, ValueError) as error:
            raise UserError(f"cannot read {path}: {error}") from error
    source = _default(entries.get("chat_template"))
    if source is None:
        raise UserError(
            f"{directory} has no chat template, neither {TEMPLATE_FILE} nor chat_template in "
            f"{CONFIG_FILE}; leave out --chat"
        )
    return ChatTemplate(source, tokens, settings)


def _default(entry: object) -> str | None:
    """A template, or the default one of a list of named ones."""
    if isinstance(entry, list):
        named = {item.get("name"): item.get("template") for item in entry if isinstance(item, dict)}
        entry = named.get("default")
    return entry if isinstance(entry, str) else None


def _text(token: object) -> str:
    """A special token's text, published by itself or in an object."""
    return str(token["content"] if isinstance(token, dict) and "content" in token else token)


def _json(value: object, ensure_ascii: bool = False, **options: Any) -> str:  # noqa: ANN401
    """Jinja's own filter escapes HTML, which is no part of a prompt."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _refuse(message: str) -> NoReturn:
    """What templates call for messages that they do not take."""
    raise ValueError(message)


def _now(form: str) -> str:
    """The local time, as templates ask for it."""
    return datetime.datetime.now().strftime(form)
