"""Turn --model into a local path. Commands do this first, so that other code sees only local paths."""

from __future__ import annotations

import sys
from dataclasses import replace

from deploy.hub.name import HubName, parse_hub_name
from shared.config.processes import NodeParts, RouterProcessConfig
from shared.config.settings.settings import ModelConfig


def with_local_model(nodes: NodeParts) -> NodeParts:
    name = parse_hub_name(nodes.model.model)
    if name is None:
        return nodes
    library = nodes.model.model_library
    return replace(nodes, model=renamed(nodes.model, name, fetched(name, nodes.hub.offline, library=library)))


def with_pinned_model(nodes: NodeParts) -> NodeParts:
    """Return the settings with the model's current commit, so that all machines fetch the same files."""
    name = parse_hub_name(nodes.model.model)
    if name is None:
        return nodes
    from deploy.hub.fetch import commit_of
    from deploy.hub.hub import hub_of_environment

    pinned = replace(name, revision=commit_of(name, hub_of_environment(nodes.hub.offline), say))
    return replace(nodes, model=renamed(nodes.model, name, str(pinned)))


def with_local_text(router: RouterProcessConfig) -> RouterProcessConfig:
    """Return the settings with a local path. Fetch no weights."""
    name = parse_hub_name(router.model.model)
    if name is None:
        return router
    return replace(router, model=renamed(router.model, name, fetched(name, router.hub.offline, with_weights=False)))


def renamed(model: ModelConfig, name: HubName, path: str) -> ModelConfig:
    """Clients still call the model org/name, unless `served_model_name` is set."""
    return replace(model, model=path, served_model_name=model.served_model_name or (name.repo,))


def local_path(model: str, offline: bool = False, *, with_weights: bool = True, library: str = "auto") -> str:
    name = parse_hub_name(model)
    return model if name is None else fetched(name, offline, with_weights=with_weights, library=library)


def fetched(name: HubName, offline: bool, *, with_weights: bool = True, library: str = "auto") -> str:
    from deploy.hub.fetch import fetch
    from deploy.hub.hub import hub_of_environment

    return str(fetch(name, hub_of_environment(offline), say, with_weights=with_weights, library=library))


def say(line: str) -> None:
    print(f"baton: {line}", file=sys.stderr, flush=True)
