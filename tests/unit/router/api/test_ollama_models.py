"""Names with and without a tag, and what /api/tags, /api/ps and /api/show say of models and adapters."""

from __future__ import annotations

from typing import Any

import pytest

from router.api.ask.resolve import Resolver
from router.api.ollama.ollama import served_name
from router.api.ollama.ollama_models import ShowRequest, running, shown_model, tagged, tags
from router.text.hashlm import hash_text_model
from shared.config.settings.settings import LimitsConfig
from shared.core.errors import ModelNotFound

CARDS: list[dict[str, Any]] = [
    {"id": "m", "created": 1, "context_length": 100},
    {"id": "sql", "created": 1, "context_length": 100, "parent": "m"},
]


def resolver_of(name: str) -> Resolver:
    return Resolver(name, hash_text_model(), LimitsConfig(), adapters=lambda: {"sql": "digest"})


@pytest.mark.parametrize(
    ("name", "with_tag"),
    [("m", "m:latest"), ("org/m", "org/m:latest"), ("m:7b", "m:7b"), ("host:80/m", "host:80/m:latest")],
)
def test_a_name_without_a_tag_gets_one(name: str, with_tag: str) -> None:
    assert tagged(name) == with_tag
    assert served_name(with_tag, resolver_of(name)) == name == served_name(name, resolver_of(name))


def test_a_model_that_is_served_under_the_tag_keeps_it() -> None:
    assert served_name("m:latest", resolver_of("m:latest")) == tagged("m:latest") == "m:latest"


def test_an_adapter_is_a_model_with_a_parent() -> None:
    listed: Any = tags(CARDS)["models"]
    assert [(one["model"], one["details"]["parent_model"]) for one in listed] == [("m:latest", ""), ("sql:latest", "m")]
    assert len({one["digest"] for one in listed}) == 2
    found: Any = shown_model(ShowRequest(model="sql:latest"), CARDS, resolver_of("m"))
    assert (found["details"]["parent_model"], found["model_info"]["general.basename"]) == ("m", "sql")
    with pytest.raises(ModelNotFound):
        shown_model(ShowRequest(model="other"), CARDS, resolver_of("m"))


def test_nothing_runs_without_nodes() -> None:
    assert running([]) == {"models": []}
