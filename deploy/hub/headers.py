"""Make a folder of a repository's JSON files and its tensors' headers. The tensors are holes, which take no disk."""

from __future__ import annotations

import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.hub.fetch import find_files
from deploy.hub.files import DESCRIPTION, check_listing, matching, wanted_files
from deploy.hub.hub import Hub, Repository, describe, download
from deploy.hub.local_model import say
from deploy.hub.name import HubName
from deploy.hub.reasons import explained

if TYPE_CHECKING:
    from huggingface_hub import SafetensorsFileMetadata

# What `fetch` reads of a model's words, without tokenizer.json, which takes megabytes.
WORDS = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
AT_ONCE = 8  # files whose headers are asked for


def described(name: HubName, hub: Hub) -> Repository:
    """Return a repository whose JSON files are in the cache. Raise ConfigError if it can't be asked."""
    with explained(name, hub):
        repository = find_files(name, hub, say)
        check_listing(name, repository.sizes)
        if not name.file:
            describe(repository)
            download(repository, matching(WORDS, repository.sizes), say)
        return repository


def with_headers(repository: Repository, above: Path) -> Path:
    """Write the folder ORG/NAME into `above`. A weight file that is in the cache is linked.

    Raises ConfigError if a header can't be had."""
    name, cached = repository.name, repository.folder
    folder = above / name.repo
    folder.mkdir(parents=True)
    for file in matching((*DESCRIPTION, *WORDS), repository.sizes):
        (folder / file).parent.mkdir(exist_ok=True)
        shutil.copyfile(cached / file, folder / file)
    weights = [one for one in wanted_files(name, repository.sizes, cached, True) if one.endswith(".safetensors")]
    for file in weights:
        if (cached / file).is_file():
            (folder / file).symlink_to((cached / file).resolve())
    missing = [file for file in weights if not (folder / file).exists()]
    with explained(name, repository.hub), ThreadPoolExecutor(AT_ONCE) as threads:
        for file, header in zip(missing, threads.map(lambda file: header_of(repository, file), missing), strict=True):
            write_holes(folder / file, header)
    return folder


def header_of(repository: Repository, file: str) -> SafetensorsFileMetadata:
    """Ask for the first bytes of a file. Raise huggingface_hub's errors, and ValueError for another kind of file."""
    from huggingface_hub.errors import SafetensorsParsingError

    hub = repository.hub
    if hub.offline:
        raise FileNotFoundError(f"{file} is not in the cache")
    try:
        return hub.api.parse_safetensors_file_metadata(repository.name.repo, file, revision=repository.commit)
    except SafetensorsParsingError as error:
        raise ValueError(f"{file}: {error}") from error


def write_holes(path: Path, header: SafetensorsFileMetadata) -> None:
    """Write a safetensors file of this header. Its tensors are holes, which read as zeros."""
    tensors = {
        name: {"dtype": one.dtype, "shape": one.shape, "data_offsets": list(one.data_offsets)}
        for name, one in header.tensors.items()
    }
    text = json.dumps(tensors).encode()
    with path.open("wb") as sink:
        sink.write(len(text).to_bytes(8, "little") + text)
        sink.truncate(8 + len(text) + max((one.data_offsets[1] for one in header.tensors.values()), default=0))
