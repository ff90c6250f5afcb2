"""Which path leads to which handler."""

from __future__ import annotations

from starlette.routing import Route, Router

from router.api.endpoint import Endpoint, EndpointRules
from router.api.handlers import Handlers
from router.api.playground import Playground


def build_routes(rules: EndpointRules, handlers: Handlers, playground: Playground) -> Router:
    """The ASGI application. Paths that spend compute or show texts need the key, where one is set."""
    chat = Endpoint(rules, "POST", handlers.chat, needs_key=True, counts=True)
    completion = Endpoint(rules, "POST", handlers.completion, needs_key=True, counts=True)
    return Router(
        routes=[
            Route("/v1/chat/completions", chat),
            Route("/v1/completions", completion),
            Route("/v1/models", Endpoint(rules, "GET", handlers.models, needs_key=True)),
            Route("/v1/models/{model:path}", Endpoint(rules, "GET", handlers.model, needs_key=True)),
            Route("/tokenize", Endpoint(rules, "POST", handlers.tokenize, needs_key=True)),
            Route("/detokenize", Endpoint(rules, "POST", handlers.detokenize, needs_key=True)),
            Route("/health", Endpoint(rules, "GET", handlers.health)),
            Route("/ready", Endpoint(rules, "GET", handlers.ready)),
            Route("/metrics", Endpoint(rules, "GET", handlers.metrics)),
            Route("/", Endpoint(rules, "GET", playground.page)),
        ],
        default=Endpoint(rules, "GET", handlers.missing),
        redirect_slashes=False,
    )
