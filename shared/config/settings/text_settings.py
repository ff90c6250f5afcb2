"""The router's settings for turning requests into prompts and sampling parameters."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from shared.config.settings.options import check_fields, option
from shared.core.errors import ConfigError
from shared.core.sampling_params import NEUTRAL, listed

MODELS_OWN = "model"
NEUTRALS = asdict(NEUTRAL)


@dataclass(frozen=True, slots=True)
class TextConfig:
    """How the router makes prompts from chats, and what requests leave out."""

    chat_template_kwargs: str = option(
        "",
        'defaults for variables of the chat template, which requests may override, e.g. {"enable_thinking": false}',
        metavar="JSON",
    )
    allow_control_tokens: bool = option(
        False, "treat spellings of control tokens in messages, e.g. <|im_end|>, as these tokens; else they are text"
    )
    sampling_defaults: str = option(
        MODELS_OWN,
        f"values of {listed(tuple(NEUTRALS), 'and')} for requests without them; model: the model's own "
        "(generation_config.json, or general.sampling of a GGUF file); neutral: "
        f"{', '.join(f'{value:g}' for value in NEUTRALS.values())}; FILE: a JSON object",
        metavar="model|neutral|FILE",
    )
    tool_format: str = option(
        "", "format of the model's tool calls, e.g. hermes; empty: read from its chat template", metavar="NAME"
    )
    open_objects: bool = option(
        False,
        "let objects of JSON schemas have properties that the schema does not mention, as JSON Schema says; else an "
        "object with properties takes others only if additionalProperties allows them",
    )

    def __post_init__(self) -> None:
        check_fields(self)
        _ = self.template_kwargs

    @property
    def template_kwargs(self) -> dict[str, str | int | float | bool | None]:
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
