"""Ask a hub for models, and download them, through huggingface_hub. Local models do not need that package."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from deploy.hub.files import DESCRIPTION, Sizes
from deploy.hub.name import HubName
from shared.core.errors import ConfigError

if TYPE_CHECKING:
    from huggingface_hub import HfApi, ResolvedRevision

INFO_TIMEOUT_S = 15.0
LIBRARY = "baton"


def free_bytes(folder: Path) -> int:
    """The folder need not exist yet."""
    return shutil.disk_usage(next(path for path in (folder, *folder.parents) if path.is_dir())).free


@dataclass(frozen=True, slots=True)
class Hub:
    endpoint: str
    cache: Path
    offline: bool = False
    free_bytes: Callable[[Path], int] = free_bytes

    @property
    def api(self) -> HfApi:
        from huggingface_hub import HfApi

        return HfApi(endpoint=self.endpoint, library_name=LIBRARY)

    @property
    def has_token(self) -> bool:
        from huggingface_hub import get_token

        return get_token() is not None


@dataclass(frozen=True, slots=True)
class Repository:
    """A model at one commit. `sizes`: bytes of each file, fetched or not."""

    name: HubName
    hub: Hub
    revision: ResolvedRevision
    folder: Path
    sizes: Sizes
    architecture: str  # of the GGUF files, as the hub reports it; "" if unknown

    @property
    def commit(self) -> str:
        return self.revision.resolved


def hub_of_environment(offline: bool) -> Hub:
    """Read HF_ENDPOINT, HF_HOME and HF_HUB_OFFLINE, as huggingface_hub does."""
    from huggingface_hub import constants

    if not constants.ENDPOINT.startswith(("http://", "https://")):
        raise ConfigError(f"HF_ENDPOINT is {constants.ENDPOINT!r}; write a URL, or unset it for huggingface.co")
    cache = Path(constants.HF_HUB_CACHE).expanduser()
    return Hub(constants.ENDPOINT, cache, offline or constants.is_offline_mode())


def ask_hub(name: HubName, hub: Hub) -> Repository:
    """Ask the hub for a commit and its files. Raise huggingface_hub's errors."""
    asked = name.revision or None
    info = hub.api.model_info(name.repo, revision=asked, files_metadata=True, timeout=INFO_TIMEOUT_S)
    # This call also saves the revision in the cache, for offline use.
    revision = hub.api.resolve_revision(name.repo, revision=asked, cache_dir=hub.cache)
    sizes = {file.rfilename: file.size or 0 for file in info.siblings or ()}
    return Repository(name, hub, revision, folder_of(name, hub, revision), sizes, architecture_of(info.gguf))


def architecture_of(gguf: Any) -> str:
    architecture = gguf.get("architecture") if isinstance(gguf, dict) else None
    return architecture if isinstance(architecture, str) else ""


def recall(name: HubName, hub: Hub) -> Repository:
    """Find a repository in the cache. Raise huggingface_hub's errors."""
    hub = replace(hub, offline=True)
    asked = name.revision or None
    revision = hub.api.resolve_revision(name.repo, revision=asked, cache_dir=hub.cache, local_files_only=True)
    folder = folder_of(name, hub, revision)
    return Repository(name, hub, revision, folder, cached_sizes(name, hub, revision, folder), "")


def cached_or_none(name: HubName, hub: Hub) -> Repository | None:
    from huggingface_hub.errors import RevisionResolutionError

    try:
        found = recall(name, hub)
    except RevisionResolutionError:
        return None
    return found if found.folder.is_dir() else None


def cached_sizes(name: HubName, hub: Hub, revision: ResolvedRevision, folder: Path) -> Sizes:
    """Return the files' sizes from Baton's saved listing. Without one, e.g. after another program's download, measure
    the files."""
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError

    try:
        tree = get_cached_repo_tree(name.repo, revision=revision, cache_dir=hub.cache)
        return {file.path: file.size for file in tree}
    except CachedRepoTreeNotFoundError:
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.stat().st_size for path in files}


def folder_of(name: HubName, hub: Hub, revision: ResolvedRevision) -> Path:
    return hub.cache / f"models--{name.repo.replace('/', '--')}" / "snapshots" / revision.resolved


def describe(repository: Repository) -> None:
    """Fetch the files of DESCRIPTION. Save the listing, so that an offline start can notice missing files."""
    from huggingface_hub import snapshot_download

    hub = repository.hub
    with without_bars():
        snapshot_download(
            repository.name.repo,
            revision=repository.revision,
            cache_dir=hub.cache,
            endpoint=hub.endpoint,
            library_name=LIBRARY,
            local_files_only=hub.offline,
            allow_patterns=list(DESCRIPTION),
        )


def download(repository: Repository, files: Sequence[str], say: Callable[[str], None]) -> None:
    """Fetch missing files one by one on this thread, so that Ctrl-C leaves no partial files. Offline, a missing file is
    an error."""
    from huggingface_hub import hf_hub_download

    hub = repository.hub
    need = sum(repository.sizes[file] for file in files if not (repository.folder / file).is_file())
    if need and not hub.offline:
        check_room(repository, need)
        say(f"fetching {repository.name} (commit {repository.commit[:12]}), {need / 1e6:,.1f} MB")
    for file in files:
        hf_hub_download(
            repository.name.repo,
            file,
            revision=repository.commit,
            cache_dir=hub.cache,
            endpoint=hub.endpoint,
            library_name=LIBRARY,
            local_files_only=hub.offline,
        )


def check_room(repository: Repository, need: int) -> None:
    hub = repository.hub
    free = hub.free_bytes(hub.cache)
    if need > free:
        raise ConfigError(
            f"--model {repository.name}: the download needs {need / 1e9:.2f} GB and {free / 1e9:.2f} GB are free "
            f"in {hub.cache}; free some, or set HF_HOME to a larger disk"
        )


@contextlib.contextmanager
def without_bars() -> Iterator[None]:
    """Hide progress bars. Do nothing if HF_HUB_DISABLE_PROGRESS_BARS is set: the library would print a warning."""
    from huggingface_hub import constants
    from huggingface_hub.utils.tqdm import are_progress_bars_disabled, disable_progress_bars, enable_progress_bars

    if constants.HF_HUB_DISABLE_PROGRESS_BARS is not None or are_progress_bars_disabled():
        yield
        return
    disable_progress_bars()
    try:
        yield
    finally:
        enable_progress_bars()
