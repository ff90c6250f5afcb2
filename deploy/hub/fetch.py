"""Turn a name on the hub into a local path. Refuse unservable models before fetching weights.

ask the hub (or the cache) -> files and sizes -> config.json -> is it served? -> is there room? -> weights
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from deploy.hub.files import check_listing, wanted_files
from deploy.hub.hub import Hub, Repository, ask_hub, cached_or_none, describe, download, recall
from deploy.hub.name import HubName
from deploy.hub.reasons import explained, unreachable
from deploy.hub.served import check_served

Say = Callable[[str], None]


def fetch(name: HubName, hub: Hub, say: Say, *, with_weights: bool, library: str = "auto") -> Path:
    """Return the model's local path. Always fetch a named GGUF file: it also holds the tokenizer.

    `library`: --model-library."""
    with explained(name, hub):
        repository = find_files(name, hub, say)
        check_listing(name, repository.sizes)
        if not name.file:
            describe(repository)
        if with_weights or name.file:
            check_served(repository, library)
        files = wanted_files(name, repository.sizes, repository.folder, with_weights)
        download(repository, files, say)
        return repository.folder / files[0] if name.file else repository.folder


def commit_of(name: HubName, hub: Hub, say: Say) -> str:
    with explained(name, hub):
        return find_files(name, hub, say).commit


def find_files(name: HubName, hub: Hub, say: Say) -> Repository:
    """If the hub is unreachable, use the cache, so that nodes can restart."""
    if hub.offline:
        return recall(name, hub)
    try:
        return ask_hub(name, hub)
    except Exception as error:
        reason = unreachable(error)
        if not reason:
            raise
        found = cached_or_none(name, hub)
        if found is None:
            raise
        say(f"can't reach {hub.endpoint} ({reason}): using {name} from the cache")
        return found
