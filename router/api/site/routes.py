"""The handler of each path."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from starlette.routing import Route, Router
from starlette.types import ASGIApp, Receive, Scope, Send

from router.api.admin.admin import AdminHandlers
from router.api.admin.admin_endpoint import AdminEndpoint
from router.api.endpoint import Endpoint, EndpointRules
from router.api.ollama.ollama_models import version
from router.api.site.generation_handlers import GenerationHandlers
from router.api.site.missing import MissingPaths
from router.api.site.model_handlers import ModelHandlers
from router.api.site.openapi import OpenApi
from router.api.site.playground import StaticPage
from router.api.site.state_handlers import StateHandlers
from router.api.site.token_handlers import TokenHandlers
from router.tenants.book import Tenants
from router.tenants.tenant import CHANGE, DRAIN, SEE


class PathRouter(Router):
    """`slashed`: paths that are served with a slash at the end, too, as some clients send it. Paths for operators are
    not: proxies bar these by their exact names."""

    def __init__(self, routes: Iterable[Route], default: ASGIApp, slashed: Iterable[str]) -> None:
        super().__init__(list(routes), redirect_slashes=False, default=default)
        self._slashed = {f"{path}/": path for path in slashed}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = self._slashed.get(scope.get("path", ""))
        await super().__call__(scope if path is None else {**scope, "path": path}, receive, send)


@dataclass(frozen=True, slots=True)
class PathHandlers:
    generation: GenerationHandlers
    tokens: TokenHandlers
    models: ModelHandlers
    state: StateHandlers
    admin: AdminHandlers


def build_routes(rules: EndpointRules, handlers: PathHandlers, operators: Tenants) -> Router:
    """Paths that compute or show texts need the API key, if set; /admin needs the operators' key."""
    generating = [
        Route(path, Endpoint(rules, "POST", handler, needs_key=True, counts=True))
        for path, handler in handlers.generation.by_path().items()
    ]
    tokens, models, state = handlers.tokens, handlers.models, handlers.state
    others = [
        Route("/v1/models", Endpoint(rules, "GET", models.models, needs_key=True)),
        Route("/v1/models/{model:path}", Endpoint(rules, "GET", models.model, needs_key=True)),
        Route("/v1/messages/count_tokens", Endpoint(rules, "POST", tokens.count_tokens, needs_key=True)),
        Route("/tokenize", Endpoint(rules, "POST", tokens.tokenize, needs_key=True)),
        Route("/detokenize", Endpoint(rules, "POST", tokens.detokenize, needs_key=True)),
        Route("/tokenizer_info", Endpoint(rules, "GET", tokens.tokenizer_info, needs_key=True)),
        Route("/api/tags", Endpoint(rules, "GET", models.ollama_tags, needs_key=True)),
        Route("/api/ps", Endpoint(rules, "GET", models.ollama_running, needs_key=True)),
        Route("/api/show", Endpoint(rules, "POST", models.ollama_show, needs_key=True)),
        Route("/api/version", Endpoint(rules, "GET", version)),
        Route("/openapi.json", Endpoint(rules, "GET", OpenApi().document)),
        Route("/health", Endpoint(rules, "GET", state.health)),
        Route("/ready", Endpoint(rules, "GET", state.ready)),
        Route("/metrics", Endpoint(rules, "GET", state.metrics)),
        Route("/", Endpoint(rules, "GET", StaticPage("index.html").page)),
        Route("/status", Endpoint(rules, "GET", StaticPage("status.html").page)),
    ]
    paths = [route.path for route in (*generating, *others) if "{" not in route.path]
    missing = MissingPaths(paths).handle
    whole_server = Route("/*", Endpoint(rules, "*", missing))  # WHOLE_SERVER: there is only OPTIONS
    return PathRouter(
        [*generating, *others, *admin_routes(replace(rules, tenants=operators), handlers.admin), whole_server],
        default=Endpoint(rules, "", missing),
        slashed=[path for path in paths if path not in ("/", "/metrics")],
    )


def admin_routes(rules: EndpointRules, admin: AdminHandlers) -> list[Route]:
    adapters = admin.adapters
    return [
        Route("/admin/status", AdminEndpoint(rules, "GET", admin.status, SEE)),
        Route("/admin/drain", AdminEndpoint(rules, "POST", admin.drain, DRAIN)),
        Route("/admin/abort", AdminEndpoint(rules, "POST", admin.abort, CHANGE)),
        Route("/admin/role", AdminEndpoint(rules, "POST", admin.role, CHANGE)),
        Route("/admin/adapters", AdminEndpoint(rules, "GET, POST", adapters.show_or_load, CHANGE)),
        Route("/admin/adapters/{name:path}", AdminEndpoint(rules, "DELETE", adapters.remove_adapter, CHANGE)),
    ]
