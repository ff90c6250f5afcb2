"""Folders as others have published them: config.json and other small files, and names of tensors, without numbers.

`python -m tests.support.house.doc_pages --write` writes `verdicts.json` anew: what Baton says to each, which a test
compares and docs/support.md shows. tests/data/published/README.md says where the files are from.
"""

from __future__ import annotations

import itertools
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deploy.hub.served import LIBRARY, program_of, reason_in
from shared.config.models.folder_facts import facts_of
from shared.config.models.model_folder import CONFIG, GENERATION, TOKENIZER, ModelFolder, read_folder
from shared.core.errors import ConfigError
from shared.model.formats.choice import AUTO
from shared.model.formats.quantized_folder import ENDINGS, UNREAD
from shared.model.formats.quantized_scheme import scheme_of

FOLDER = Path(__file__).resolve().parents[2] / "data" / "published"
VERDICTS = FOLDER / "verdicts.json"
REWRITE = "python -m tests.support.house.doc_pages --write"
FILES = {CONFIG: "config", GENERATION: "generation", TOKENIZER: "tokenizer", "hf_quant_config.json": "hf_quant"}
RANGE = re.compile(r"\{([\d,-]+)\}")
NOT_LISTED = ".**"  # behind the name of a module whose tensors the source does not list


@dataclass(frozen=True, slots=True)
class PublishedFolder:
    """`files`: by their names, as JSON. `how`: "as published", or how the source quotes config.json.

    `tensors`: names, in which {0-31} stands for a number; () if no source lists them."""

    name: str
    how: str
    source: str
    files: Mapping[str, Mapping[str, Any]]
    tensors: tuple[str, ...]
    tensors_source: str

    def write(self, above: Path) -> ModelFolder:
        """Write the files to ORG/NAME in a folder."""
        path = above / self.name
        path.mkdir(parents=True)
        for name, content in self.files.items():
            (path / name).write_text(json.dumps(content), "utf-8")
        return read_folder(path)


def published_folders() -> list[PublishedFolder]:
    return [read_published(path) for path in sorted(FOLDER.glob("*--*.json"), key=lambda path: path.name.lower())]


def read_published(path: Path) -> PublishedFolder:
    told = json.loads(path.read_text("utf-8"))
    files = {name: told[key] for name, key in FILES.items() if key in told}
    tensors = tuple(told.get("tensors", ()))
    return PublishedFolder(
        told["repository"], told["how"], told["source"], files, tensors, told.get("tensors_source", "")
    )


@dataclass(frozen=True, slots=True)
class Verdict:
    """`runs`: the program that would run the folder; "" if it is refused. `refusal`: why, in one sentence.

    `unread`: tensors that no part of the network takes, `lacking`: parameters for which there is none; both None for a
    refused folder, and where names are not known."""

    runs: str
    refusal: str = ""
    unread: int | None = None
    lacking: int | None = None


def verdict_on(published: PublishedFolder) -> Verdict:
    with tempfile.TemporaryDirectory() as above:
        folder = published.write(Path(above))
        try:
            facts_of(folder)  # the router reads the folder, too
            runs = program_of(folder, AUTO)
        except ConfigError as error:
            return Verdict("", reason_in(error, folder))
        if not published.tensors:
            return Verdict(runs)
        names = matrices(published.tensors, folder)
        taken, wanted = library_names(folder, names) if runs == LIBRARY else own_names(folder, names)
        lacking = {name for name in wanted - {*taken.values()} if not is_skipped(name, published.tensors)}
        return Verdict(runs, "", len(names - taken.keys()), len(lacking))


def is_skipped(name: str, patterns: tuple[str, ...]) -> bool:
    """Return whether a parameter is in a module whose tensors the source does not list."""
    modules = {pattern.split(".")[-2] for pattern in patterns if pattern.endswith(NOT_LISTED)}
    return not modules.isdisjoint(name.split("."))


def matrices(patterns: tuple[str, ...], folder: ModelFolder) -> set[str]:
    """Return the tensors' names, a quantised matrix's as one."""
    scheme = scheme_of(folder.config, folder.path)
    names = {name for pattern in patterns if not pattern.endswith(NOT_LISTED) for name in written_out(pattern)}
    if scheme is None:
        return names
    endings, own = ENDINGS[scheme.method]
    ends = {name: next((end for end in endings if name.endswith(end)), None) for name in names}
    plain = {name for name, end in ends.items() if end is None and not name.endswith(UNREAD)}
    return plain | {name.removesuffix(end) + own for name, end in ends.items() if end is not None}


def written_out(pattern: str) -> Iterator[str]:
    """Yield the names of a pattern, of experts only the first and the last.

    model.layers.{0-1,3}.a -> model.layers.0.a, model.layers.1.a, model.layers.3.a"""
    parts = RANGE.split(pattern)
    choices = [numbers(part) if index % 2 else [part] for index, part in enumerate(parts)]
    for index in range(3, len(parts), 2):  # behind the first range, which counts layers
        choices[index] = [choices[index][0], choices[index][-1]]
    return map("".join, itertools.product(*choices))


def numbers(text: str) -> list[str]:
    spans = (span.partition("-") for span in text.split(","))
    return [str(number) for first, _, last in spans for number in range(int(first), int(last or first) + 1)]


def own_names(folder: ModelFolder, names: set[str]) -> tuple[dict[str, str], set[str]]:
    """Return the names that our program takes, each with the name of its parameter, and all names that it needs."""
    from shared.model.formats.hf_config import config_from_hf
    from shared.model.formats.safetensors_folder import hf_name
    from shared.model.formats.tensor_shapes import tensor_shapes

    config = config_from_hf(folder)
    wanted = {hf_name(name, config.family) for name in tensor_shapes(config)}
    if config.experts is not None:  # of which names has two for each layer
        last = config.experts.count - 1
        wanted = {name for name in wanted if re.search(rf"\.experts\.(?!(?:0|{last})\.)", name) is None}
    return {name: name for name in names & wanted}, wanted


def library_names(folder: ModelFolder, names: set[str]) -> tuple[dict[str, str], set[str]]:
    """The same for the library's network, by its own renaming."""
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    from shared.model.library.loading import checked_config, outline_of

    outline = outline_of(checked_config(folder))
    changes = get_model_conversion_mapping(outline, None, None)
    renamings = [one for one in changes if isinstance(one, WeightRenaming)]
    mergers = [one for one in changes if isinstance(one, WeightConverter)]
    state = outline.state_dict()
    tied = set(getattr(outline, "all_tied_weights_keys", ()))
    taken = {}
    for name in names:
        target, _ = rename_source_key(name, renamings, mergers, outline.base_model_prefix, state)
        if target not in state:
            target, _ = rename_source_key(name, [], [], outline.base_model_prefix, state)
        if target in state:
            taken[name] = target
    return taken, {name for name, _ in outline.named_parameters()} - tied


def shown(verdict: Verdict) -> dict[str, Any]:
    """Return the fields that say something."""
    fields = {name: getattr(verdict, name) for name in ("runs", "refusal", "unread", "lacking")}
    return {name: value for name, value in fields.items() if value not in ("", None)}


def kept_verdicts() -> dict[str, dict[str, Any]]:
    kept: dict[str, dict[str, Any]] = json.loads(VERDICTS.read_text("utf-8"))
    return kept


def write_verdicts() -> None:
    found = {published.name: shown(verdict_on(published)) for published in published_folders()}
    VERDICTS.write_text(json.dumps(found, indent=1) + "\n", "utf-8")
