"""Choose which files of a repository to fetch: no pickles, no code. Uses no network.

Only files of the top folder, chat templates and a named GGUF file are allowed, so no name leads out of the folder.
"""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Iterable, Mapping
from pathlib import Path

from deploy.hub.name import HubName
from shared.config.models.gguf_parts import part_names
from shared.core.errors import ConfigError

INDEX = "model.safetensors.index.json"
WHOLE_WEIGHTS = "model.safetensors"
# These files are fetched first, because they decide which other files are fetched.
DESCRIPTION = ("config.json", "generation_config.json", "hf_quant_config.json", INDEX)
TEXT = (
    "config.json",
    "generation_config.json",
    "hf_quant_config.json",
    "tokenizer.json",
    "tiktoken.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
)
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
SHOWN_FILES = 5
Sizes = Mapping[str, int]  # file name -> size in bytes


def matching(patterns: Iterable[str], names: Iterable[str]) -> list[str]:
    """Return the matching names. A pattern matches only names in its own folder."""
    patterns = tuple(patterns)
    return sorted(
        name
        for name in names
        for pattern in patterns
        if name.count("/") == pattern.count("/") and ".." not in name and fnmatch.fnmatchcase(name, pattern)
    )


def check_listing(name: HubName, sizes: Sizes) -> None:
    """Raise ConfigError for a missing file."""
    if not name.file:
        _check_folder(name, sizes)
    else:
        _check_gguf(name, sizes)


def _check_folder(name: HubName, sizes: Sizes) -> None:
    if "adapter_config.json" in sizes and "config.json" not in sizes:
        raise ConfigError(
            f"--model {name}: the repository is an adapter; fetch it into a folder, and serve it with its base model: "
            "--model MODEL --lora NAME=FOLDER"
        )
    if not matching(("*.safetensors",), sizes):
        raise ConfigError(f"--model {name}: {_without_safetensors(name, sizes)}")
    for needed, instead in (("config.json", ""), ("tokenizer.json", "tiktoken.model")):
        if needed not in sizes and instead not in sizes:
            raise ConfigError(f"--model {name}: the repository has no {needed}, so Baton can't serve it")


def _check_gguf(name: HubName, sizes: Sizes) -> None:
    if name.file not in sizes:
        there = _shown(file for file in sizes if file.endswith(".gguf"))
        raise ConfigError(f"--model {name}: the repository has no file {name.file}; its GGUF files: {there}")
    parts = part_names(name.file)
    for n, part in enumerate(parts, 1):
        if part not in sizes:
            raise ConfigError(f"--model {name}: the repository lacks {part}, part {n} of {len(parts)}")


def _without_safetensors(name: HubName, sizes: Sizes) -> str:
    ggufs = [file for file in sizes if file.endswith(".gguf")]
    if ggufs:
        return f"the repository holds GGUF files: name one, as {name.repo}:{min(ggufs)} ({_shown(ggufs)})"
    if matching(PICKLES, sizes):
        return "its weights are pickles only, which can run code when they are read; Baton reads *.safetensors"
    return "the repository has no *.safetensors file (other weight formats are not read)"


def _shown(files: Iterable[str]) -> str:
    names = sorted(files)
    more = f" and {len(names) - SHOWN_FILES} more" if len(names) > SHOWN_FILES else ""
    return ", ".join(names[:SHOWN_FILES]) + more or "none"


def wanted_files(name: HubName, sizes: Sizes, folder: Path, with_weights: bool) -> list[str]:
    """Return the files to fetch, once those of DESCRIPTION are in `folder`: for a GGUF file, its parts in order."""
    if not name.file:
        return [*matching(TEXT, sizes), *(_weight_files(name, sizes, folder) if with_weights else ())]
    return list(part_names(name.file))


def _weight_files(name: HubName, sizes: Sizes, folder: Path) -> list[str]:
    """Return only the index's files, if it exists: other files may hold the same weights."""
    if INDEX in sizes:
        return _shards(name, sizes, folder / INDEX)
    return [WHOLE_WEIGHTS] if WHOLE_WEIGHTS in sizes else matching(("*.safetensors",), sizes)


def _shards(name: HubName, sizes: Sizes, index: Path) -> list[str]:
    try:
        shards = set(json.loads(index.read_text("utf-8"))["weight_map"].values())
        known = set(matching(("*.safetensors",), sizes))
        strange = sorted(map(str, shards - known))
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise ConfigError(f"--model {name}: can't read its {INDEX}: {error!r}") from None
    if strange or not shards:
        raise ConfigError(f"--model {name}: {INDEX} names {_shown(strange)}, which the repository lacks")
    return sorted(shards)
