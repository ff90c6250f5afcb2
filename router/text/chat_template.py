"""Renders the model's own chat template in a sandbox. Templates never come from requests."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from shared.core.errors import ConfigError, InvalidRequest


def _reject(message: str) -> NoReturn:
    """`raise_exception` of a template: it does not take these messages."""
    raise InvalidRequest(f"the model's chat template refuses these messages: {message}", param="messages")


def _to_json(value: object, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


class NoTemplate:
    """Of a model that brings none and does not go on with what it reads: it could not tell turns from a text."""

    def render(self, messages: Sequence[Mapping[str, object]]) -> str:
        raise InvalidRequest("this model has an encoder and no chat template: ask /v1/completions", param="messages")


class JinjaTemplate:
    """A template from GGUF or Hugging Face metadata, compiled once."""

    def __init__(self, source: str, *, bos_token: str, eos_token: str) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals.update(raise_exception=_reject, strftime_now=_strftime_now)
        self._names = {"bos_token": bos_token, "eos_token": eos_token, "add_generation_prompt": True}
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ConfigError(f"the model's chat template can't be read: {error}") from error

    def render(self, messages: Sequence[Mapping[str, object]]) -> str:
        try:
            return self._template.render(messages=list(messages), **self._names)
        except jinja2.TemplateError as error:
            raise InvalidRequest(f"the chat template fails on these messages: {error}", param="messages") from error
