"""Ollama's paths that show models (/api/tags, /api/ps, /api/show, /api/version), and its paths that are not served."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec

from router.api.ask.resolve import Resolver
from router.api.fields.fields import NOT_YET, Body, FieldTable, RefusedField
from router.api.ollama.ollama import LATEST, served_name
from router.api.ollama.ollama_writer import time_text
from router.api.openai.chat_task import named_as
from router.http.connection import Connection
from router.text.chat.chat_template import DEFAULT
from router.tools.reasoning import thought_tags
from shared.core.errors import InvalidRequest

Json = dict[str, object]
Card = Mapping[str, Any]  # an entry of /v1/models
VERSION = "0.32.15"  # the version of Ollama whose API is served. Clients compare it with the least one that they need
FOREVER = timedelta(days=36_500)
ARCHITECTURE = "baton"  # clients look up the context's length under this name
UNKNOWN_DETAILS: Json = {
    "parent_model": "",
    "format": "",
    "family": "",
    "families": [],
    "parameter_size": "",
    "quantization_level": "",
}
PARAMETERS = {"repetition_penalty": "repeat_penalty"}  # our name -> Ollama's
NO_CHANGES = "this server serves the model that it was started with"
NOT_SERVED = {
    "/api/embed": "embeddings are not served: the model writes text",
    "/api/embeddings": "embeddings are not served: the model writes text",
    "/api/pull": f"models can't be pulled: {NO_CHANGES}",
    "/api/push": f"models can't be pushed: {NO_CHANGES}",
    "/api/create": f"models can't be created: {NO_CHANGES}",
    "/api/copy": f"models can't be copied: {NO_CHANGES}",
    "/api/delete": f"models can't be deleted: {NO_CHANGES}",
    "/api/blobs": f"files can't be uploaded: {NO_CHANGES}",
}


class ShowRequest(Body, frozen=True, kw_only=True):
    model: str | None = None
    name: str | None = None


SHOW = FieldTable(
    "/api/show",
    ShowRequest,
    about={
        "model": "the served model or one of its adapters, with or without the tag `latest`; default: the model",
        "name": "the older name of model",
    },
    ignored={"options": "nothing is generated", "verbose": "there are no tensors to list"},
    refused={"system": RefusedField(NOT_YET), "template": RefusedField("templates are taken from the model only")},
)


def tagged(name: str) -> str:
    """Return the name with a tag, as clients expect it."""
    return name if ":" in name.rpartition("/")[2] else name + LATEST


def tags(cards: Sequence[Card]) -> Json:
    models = [listed(card) | {"modified_at": time_text(created(card)), "details": details(card)} for card in cards]
    return {"models": models}


def running(cards: Sequence[Card]) -> Json:
    """`cards`: none while no node can take requests."""
    models = [
        listed(card)
        | {
            "details": details(card),
            "expires_at": time_text(created(card) + FOREVER),
            "size_vram": 0,
            "context_length": card["context_length"],
        }
        for card in cards
    ]
    return {"models": models}


def shown_model(body: ShowRequest, cards: Sequence[Card], resolver: Resolver) -> Json:
    given = "model" if body.model is not None else "name"
    name = served_name(getattr(body, given), resolver)
    with named_as({"model": given}):
        resolver.check_model(name)
    card = next((card for card in cards if card["id"] == name), cards[0])
    return {
        "license": "",
        "modelfile": "",
        "parameters": parameters(resolver),
        "template": resolver.text.template.sources.get(DEFAULT, ""),
        "details": details(card),
        "model_info": {
            "general.architecture": ARCHITECTURE,
            "general.basename": card["id"],
            f"{ARCHITECTURE}.context_length": card["context_length"],
            f"{ARCHITECTURE}.vocab_size": resolver.text.tokenizer.facts.vocab_size,
        },
        "capabilities": capabilities(resolver),
        "modified_at": time_text(created(card)),
    }


def listed(card: Card) -> Json:
    """The router has no weights, so the size is unknown, and the digest is that of the name."""
    name = tagged(card["id"])
    return {"name": name, "model": name, "size": 0, "digest": hashlib.sha256(name.encode()).hexdigest()}


def details(card: Card) -> Json:
    return UNKNOWN_DETAILS | {"parent_model": card.get("parent", "")}


def created(card: Card) -> datetime:
    return datetime.fromtimestamp(card["created"], UTC)


def parameters(resolver: Resolver) -> str:
    values = asdict(resolver.defaults).items()
    return "\n".join(f"{PARAMETERS.get(name, name)} {value}" for name, value in values)


def capabilities(resolver: Resolver) -> list[str]:
    sources = resolver.text.template.sources
    has_tools = bool(sources or resolver.calls)
    found = {"completion": True, "tools": has_tools, "thinking": thought_tags(sources) is not None}
    return [name for name, is_there in found.items() if is_there]


async def version(connection: Connection) -> None:
    await connection.answer(200, msgspec.json.encode({"version": VERSION}))


def check_served(path: str) -> None:
    """Raise a 400 for a known path: on a 404, clients take the model to be missing, and pull it."""
    for known, why in NOT_SERVED.items():
        if path == known or path.startswith(f"{known}/"):
            raise InvalidRequest(why)
