"""Chat messages to a prompt, by the Jinja template that comes with a checkpoint.

A template is data of a stranger: it runs in Jinja's sandbox and cannot reach Python.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ouro_sgl.errors import ConfigError, RequestError
from ouro_sgl.models.config import read_json

SPECIAL_TOKENS = ("bos_token", "eos_token", "pad_token", "unk_token")


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.datetime.now().strftime(form)


def _to_json(value: Any, indent: int | None = None) -> str:
    """JSON as templates of chat models expect it: Jinja's own filter escapes HTML."""
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _source(folder: Path, settings: Mapping[str, Any], template_file: Path | None) -> str:
    if template_file is None and (folder / "chat_template.jinja").is_file():
        template_file = folder / "chat_template.jinja"
    if template_file is not None:
        try:
            return template_file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat template {template_file} cannot be read: {error}") from None
    source = settings.get("chat_template")
    if isinstance(source, list):  # several, by name
        source = next((t.get("template") for t in source if t.get("name") == "default"), None)
    if not isinstance(source, str):
        raise ConfigError(f"{folder} has no chat template; name a file with --chat-template")
    return source


class ChatTemplate:
    """The chat template of a checkpoint.

    Args:
        folder: holds ``tokenizer_config.json`` and perhaps ``chat_template.jinja``, which goes first.
        template_file: a template to use instead of the checkpoint's.

    Raises:
        ConfigError: there is no template, or it is not valid Jinja.
    """

    def __init__(self, folder: Path, template_file: Path | None = None) -> None:
        config = folder / "tokenizer_config.json"
        settings = read_json(config) if config.is_file() else {}
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.globals.update(raise_exception=_raise_exception, strftime_now=_strftime_now)
        environment.filters["tojson"] = _to_json
        self.source = _source(folder, settings, template_file)
        try:
            self._template = environment.from_string(self.source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the chat template of {folder} is not valid: {error}") from None
        self._special = {name: _text(settings.get(name)) for name in SPECIAL_TOKENS}
        self.eos_token = self._special["eos_token"]

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt that asks for the next message of the assistant.

        Args:
            messages: each with ``role`` and ``content``.
            tools: descriptions of the functions that the assistant may call.
            variables: further variables for the template.

        Raises:
            RequestError: the template refuses these messages.
        """
        scope = {
            **self._special,
            **(variables or {}),
            "messages": messages,
            "tools": tools,
            "add_generation_prompt": True,
        }
        try:
            return self._template.render(scope)
        except Exception as error:
            # A template is a program: a message that it was not written for can make it fail in any way.
            raise RequestError(f"the chat template refuses these messages: {error}") from None


def _text(token: Any) -> str:
    """Special tokens stand in tokenizer_config.json as strings or as objects with ``content``."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""
