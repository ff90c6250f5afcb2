"""How chats become prompts: settings of the router's own, beside what its model is (settings.ModelConfig)."""

from __future__ import annotations

import json
from dataclasses import dataclass

from shared.config.options import check_fields, option
from shared.core.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TextConfig:
    """How the router makes prompts out of chats."""

    chat_template_kwargs: str = option(
        "",
        'what the chat template gets where a request does not say it, as {"enable_thinking": false}',
        metavar="JSON",
    )
    allow_control_tokens: bool = option(
        False, "let control tokens that a chat's messages spell, as <|im_end|>, act as such; else they are text"
    )
    tool_format: str = option(
        "", "how the model calls tools, as hermes; else its chat template says it", metavar="NAME"
    )

    def __post_init__(self) -> None:
        check_fields(self)
        _ = self.template_kwargs

    @property
    def template_kwargs(self) -> dict[str, str | int | float | bool | None]:
        """The defaults of chat_template_kwargs, by name."""
        if not self.chat_template_kwargs:
            return {}
        try:
            given = json.loads(self.chat_template_kwargs)
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"--chat-template-kwargs is not JSON: {error}") from None
        if not isinstance(given, dict) or any(isinstance(value, dict | list) for value in given.values()):
            raise ConfigError(
                '--chat-template-kwargs must be an object of texts, numbers, true, false or null, as {"name": false}'
            )
        return given
