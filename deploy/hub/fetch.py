"""Turn a name on the hub into a local path. Refuse unservable models before fetching weights.

ask the hub (or the cache) -> files and sizes -> config.json -> is it served? -> is there room? -> weights
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from deploy.hub.files import DESCRIPTION, TEXT, check_listing, matching, num_missing_bytes, weight_files
from deploy.hub.hub import Hub, Repository, ask_hub, describe, download, recall
from deploy.hub.name import HubName
from deploy.hub.reasons import explained, unreachable
from shared.config.models.encoder_decoder import has_encoder
from shared.config.models.gguf_parts import part_names
from shared.config.models.json_file import read_json_if_there
from shared.core.errors import ConfigError

Say = Callable[[str], None]


def fetch(name: HubName, hub: Hub, say: Say, *, with_weights: bool, library: str = "auto") -> Path:
    """Return the model's local path. Always fetch a named GGUF file: it also holds the tokenizer.

    `library`: --model-library."""
    with explained(name, hub):
        repository = find_files(name, hub, say)
        check_listing(name, repository.sizes)
        if name.file:
            check_gguf_architecture(repository)
            parts = part_names(name.file)
            complete(repository, list(parts), say)
            return repository.folder / parts[0]
        describe(repository, matching(DESCRIPTION, repository.sizes))
        if with_weights:
            check_served(name, repository.folder, library)
        complete(repository, wanted_files(repository, with_weights), say)
        return repository.folder


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


def cached_or_none(name: HubName, hub: Hub) -> Repository | None:
    from huggingface_hub.errors import RevisionResolutionError

    try:
        found = recall(name, hub)
    except RevisionResolutionError:
        return None
    return found if found.folder.is_dir() else None


def wanted_files(repository: Repository, with_weights: bool) -> list[str]:
    sizes = repository.sizes
    weights = weight_files(repository.name, sizes, repository.folder) if with_weights else []
    return [*matching(TEXT, sizes), *weights]


def check_served(name: HubName, folder: Path, library: str) -> None:
    """Raise ConfigError if no node could load the model that config.json describes."""
    from shared.model.formats.choice import uses_library
    from shared.model.formats.hf_config import config_from_hf

    if has_encoder(read_json_if_there(folder / "config.json")):
        return
    try:
        if not uses_library(folder, library):
            config_from_hf(folder)
            return
        from shared.model.library.loading import checked_config  # imports the library

        checked_config(folder)
    except ConfigError as error:
        reason = error.message.replace(str(folder / "config.json"), "config.json").removeprefix(f"{folder}: ")
        raise ConfigError(f"--model {name}: {reason}") from None


def check_gguf_architecture(repository: Repository) -> None:
    """Check the architecture that the hub reports for the GGUF files. Loading checks the file itself."""
    from shared.model.formats.gguf_config import GGUF_ARCHITECTURES

    architecture = repository.architecture
    if architecture and architecture not in GGUF_ARCHITECTURES:
        raise ConfigError(
            f"--model {repository.name}: GGUF architecture {architecture!r} is not supported, "
            f"only {', '.join(GGUF_ARCHITECTURES)}"
        )


def complete(repository: Repository, files: list[str], say: Say) -> None:
    need = num_missing_bytes(files, repository.sizes, repository.folder)
    if need and not repository.hub.offline:
        check_room(repository, need)
        say(f"fetching {repository.name} (commit {repository.commit[:12]}), {need / 1e6:,.1f} MB")
    download(repository, files)


def check_room(repository: Repository, need: int) -> None:
    hub = repository.hub
    free = hub.free_bytes(hub.cache)
    if need > free:
        raise ConfigError(
            f"--model {repository.name}: the download needs {need / 1e9:.2f} GB and {free / 1e9:.2f} GB are free "
            f"in {hub.cache}; free some, or set HF_HOME to a larger disk"
        )
