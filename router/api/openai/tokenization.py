"""Serve vLLM's and llama-server's POST /tokenize and /detokenize, and vLLM's GET /tokenizer_info."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from router.api.answer.shapes import token_text
from router.api.ask.resolve import Resolver
from router.api.fields.fields import Body, FieldTable, NotNegative, RefusedField, ShortText
from router.api.openai.chat_messages import ABOUT_TEMPLATE, ChatMessage, conversation_of
from router.api.openai.chat_task import form_headers
from router.text.chat.chat_template import DEFAULT
from router.text.chat.conversation import Scalar
from router.text.chat.interface import TextModel, decode_ids
from router.tools.schemas.declared import parse_tools
from shared.core.errors import InvalidRequest

MOST_PIECES = 131_072


class TokenizeRequest(Body, frozen=True, kw_only=True):
    """A request has either `prompt` or `messages`."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[ChatMessage], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    add_special: bool | None = None
    return_token_strs: bool | None = None
    with_pieces: bool | None = None
    chat_template_kwargs: dict[str, Scalar] | None = None
    documents: list[dict[str, Any]] | None = None
    enable_thinking: bool | None = None
    reasoning_effort: ShortText | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    tools: list[dict[str, Any]] | None = None


class DetokenizeRequest(Body, frozen=True, kw_only=True):
    model: str | None = None
    tokens: list[NotNegative]


TOKENIZE = FieldTable(
    "/tokenize",
    TokenizeRequest,
    about={
        "model": "the served model or one of its adapters",
        "prompt": "a text",
        "content": "llama-server's name for prompt; no begin token before it unless add_special is true",
        "messages": "a conversation, rendered as for chat",
        "add_special_tokens": "false: no begin token before a prompt",
        "add_special": "llama-server's name for add_special_tokens",
        "return_token_strs": f"also return the tokens as text, in token_strs; of at most {MOST_PIECES:,} tokens",
        "with_pieces": "llama-server's form: each token with its piece",
        "tools": "functions that the template shows",
    }
    | ABOUT_TEMPLATE,
    ignored={"parse_special": "control tokens in a prompt are always parsed"},
    refused={
        "chat_template": RefusedField("templates are taken from the model only"),
    },
)
DETOKENIZE = FieldTable(
    "/detokenize",
    DetokenizeRequest,
    about={"model": "the served model or one of its adapters", "tokens": "token ids"},
)


def tokenized(
    body: TokenizeRequest, resolver: Resolver, max_context: int, headers: dict[bytes, bytes]
) -> dict[str, object]:
    """Add to the response's headers what was done to a conversation."""
    ids = ids_of(body, resolver, headers)
    pieces = pieces_of(ids, resolver) if body.with_pieces or body.return_token_strs else []
    answer: dict[str, object] = {"count": len(ids), "max_model_len": max_context, "tokens": ids}
    if body.return_token_strs:
        answer["token_strs"] = pieces
    if body.with_pieces:
        answer["tokens"] = [{"id": i, "piece": piece} for i, piece in zip(ids, pieces, strict=True)]
    return answer


def pieces_of(ids: list[int], resolver: Resolver) -> list[str]:
    if len(ids) > MOST_PIECES:
        why = f"the prompt has {len(ids)} tokens; the text of at most {MOST_PIECES} tokens is returned"
        raise InvalidRequest(why, param="prompt")
    return [token_text(resolver.text.tokenizer, i) for i in ids]


def ids_of(body: TokenizeRequest, resolver: Resolver, headers: dict[bytes, bytes]) -> list[int]:
    resolver.check_model(body.model)
    given = [name for name in ("prompt", "content", "messages") if getattr(body, name) is not None]
    if len(given) != 1:
        raise InvalidRequest("send one of prompt and messages", param="prompt")
    if body.messages is not None:
        tools = parse_tools(body.tools or []).tools
        prompt = resolver.chat_prompt(conversation_of(body.messages, body, tools, resolver.parts()))
        headers.update(form_headers(prompt.form))
        return prompt.ids
    if body.content is not None:
        return resolver.prompt_ids(body.content, add_special=bool(body.add_special), field="content")
    return resolver.prompt_ids(body.prompt or "", add_special=body.add_special_tokens is not False)


def detokenized(body: DetokenizeRequest, resolver: Resolver) -> dict[str, object]:
    resolver.check_model(body.model)
    resolver.check_ids(body.tokens, "tokens")
    text = decode_ids(resolver.text.tokenizer, body.tokens)
    return {"prompt": text, "content": text}


def tokenizer_info(text: TextModel) -> dict[str, object]:
    """Return the members of a tokenizer_config.json."""
    sources = text.template.sources
    named = [{"name": name, "template": source} for name, source in sources.items()]
    template = {"chat_template": sources.get(DEFAULT) if len(sources) < 2 else named}
    return {"tokenizer_class": "PreTrainedTokenizerFast", **text.about, **template}
