"""Render the model's own chat templates as Hugging Face does. Requests can't contain templates."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, TracebackType

import jinja2

from router.text.chat.conversation import Conversation, Scalar
from router.text.chat.interface import RenderingFailed
from router.text.chat.template_sandbox import BUDGET, RenderBudget, TemplateRefusal, TemplateSandbox, TemplateTooLong
from shared.core.errors import ConfigError, InvalidRequest

DEFAULT = "default"
TOOL_USE = "tool_use"  # name of the template for chats with tools
CPU_LIMIT_S = 2.0  # CPU seconds of one rendering
MAX_REASON_CHARS = 300
TOKEN_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
OWN_NAMES = frozenset({"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"})
HOPELESS = (TemplateTooLong, MemoryError)  # no other form of the messages may cost as much again
TEMPLATE_TEXT = frozenset({"chat_template", "tokenize"})  # arguments that change the template or the result's type


class NoTemplate:
    """Refuses all chats: an encoder-decoder model without a template can't tell turns from plain text."""

    sources: Mapping[str, str] = MappingProxyType({})

    def render(self, conversation: Conversation) -> str:
        raise InvalidRequest("this model has an encoder and no chat template: ask /v1/completions", param="messages")


class JinjaTemplate:
    """A model's named templates, compiled once.

    `tokens`: special tokens that a template may write. `defaults`: kwargs that requests may override.
    """

    def __init__(
        self,
        sources: Mapping[str, str],
        tokens: Mapping[str, str],
        defaults: Mapping[str, Scalar],
        *,
        cpu_limit_s: float = CPU_LIMIT_S,
    ) -> None:
        if DEFAULT not in sources:
            raise ConfigError(f"the model has chat templates, but none is called {DEFAULT!r}: {sorted(sources)}")
        self.sources = dict(sources)
        sandbox = TemplateSandbox()
        self._templates = {name: _compiled(sandbox, name, source) for name, source in sources.items()}
        self._tokens = dict(tokens)
        self._cpu_limit_s = cpu_limit_s
        self._taken = OWN_NAMES | TEMPLATE_TEXT | {*TOKEN_NAMES, *self._tokens, *sandbox.globals}
        try:
            self._defaults = self._checked(defaults)
        except InvalidRequest as error:
            raise ConfigError(f"--chat-template-kwargs: {error.message}") from error

    def render(self, conversation: Conversation) -> str:
        name = TOOL_USE if conversation.tools is not None and TOOL_USE in self._templates else DEFAULT
        template = self._templates[name]
        values = {
            **self._tokens,
            **self._defaults,
            **self._checked(conversation.kwargs),
            "messages": list(conversation.messages),
            "tools": conversation.tools,
            "documents": conversation.documents,
            "add_generation_prompt": conversation.add_generation_prompt,
            BUDGET: RenderBudget(self._cpu_limit_s),
        }
        try:
            return "".join(template.root_render_func(template.new_context(values)))
        except Exception as error:  # templates are programs and may raise anything
            kind = InvalidRequest if isinstance(error, HOPELESS) else RenderingFailed
            raise kind(_reason(template, error), param="messages") from error

    def _checked(self, kwargs: Mapping[str, Scalar]) -> Mapping[str, Scalar]:
        for name, value in kwargs.items():
            if name in self._taken or not name.isidentifier():
                raise InvalidRequest(f"chat_template_kwargs can't set {name[:100]!r}", param="chat_template_kwargs")
            if not isinstance(value, str | int | float | bool | None):
                raise InvalidRequest(
                    f"chat_template_kwargs: {name[:100]!r} must be text, a number, true, false or null",
                    param="chat_template_kwargs",
                )
        return kwargs


def _compiled(sandbox: TemplateSandbox, name: str, source: str) -> jinja2.Template:
    try:
        return sandbox.from_string(source)
    except jinja2.TemplateSyntaxError as error:
        raise ConfigError(
            f"the model's chat template {name!r} can't be read: line {error.lineno}: {error.message}"
        ) from error
    except Exception as error:  # for example, too deep nesting
        raise ConfigError(
            f"the model's chat template {name!r} can't be read: {type(error).__name__}: {error}"
        ) from error


def _reason(template: jinja2.Template, error: Exception) -> str:
    where = f"(its line {_line(template, error.__traceback__)})"
    reason = str(error)[:MAX_REASON_CHARS]
    if isinstance(error, TemplateRefusal):
        return f"the model's chat template refuses these messages: {reason} {where}"
    return f"the model's chat template fails on these messages: {type(error).__name__}: {reason} {where}"


def _line(template: jinja2.Template, trace: TracebackType | None) -> int:
    line = 0
    while trace is not None:
        if trace.tb_frame.f_globals.get("__jinja_template__") is template:
            line = template.get_corresponding_lineno(trace.tb_lineno)
        trace = trace.tb_next
    return line
