"""Make the table of models in docs/support.md from what the tests serve. Knows nothing of the rest of the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedConfig,
)

from router.tools.detect import AS_TEXT, READS_TOOLS
from router.tools.reasoning import thought_tags
from shared.config.settings.frozen import LIBRARY
from shared.core.errors import ConfigError
from shared.model.formats.gguf_config import GGUF_ARCHITECTURES
from shared.model.formats.hf_config import HF_ARCHITECTURES
from shared.model.library.kinds import check_kind
from tests.support.bodies import template_turns
from tests.support.bodies.family_templates import NO_TOOLS, PUBLISHED
from tests.support.house.made_parts import with_part
from tests.support.models import (
    gguf_families,
    library_families,
    library_wrappers,
    mtp_folders,
    published_folders,
    tiny_families,
)
from tests.support.models.tiny_quantized import FORMATS

BEGIN = "<!-- Made by `python -m tests.support.house.doc_pages --write` from what the tests serve. -->"
END = "<!-- The rest is written by hand. -->"
HEAD = """| family | run by | read from | compared with | also in these variants |
|---|---|---|---|---|
"""
FOLDERS, GGUF = "folders", "GGUF"
# each source's comparison of logits with those of transformers
COMPARED = {FOLDERS: "whole, in chunks, token by token", GGUF: "whole, in chunks"}
LIBRARY_ROW = "| {families} | transformers | folders | its own `generate`: greedy answers, with chunks, hand-offs, \
retractions and cached prompts. They are equal, except where the two best scores are nearer than {tie:g} of the \
largest | |\n"
WRAPPERS_ROW = "| {names} | transformers, the text part alone | folders | its own `generate`, without images and \
sounds, in the same ways | |\n"
SHARE = "\nOf the library's {count} types that write texts, {accepted} pass the checks of config.json, with the \
library's default values. A model's weights are then checked against the library's own results when it is loaded.\n"
MTP = "\n`--spec mtp` runs the MTP layers in folders of these families, under their published names; candidates are \
those of the library's own generator: {names}. Those of `deepseek_v3` are also those of its report's definition, in \
plain torch. Refused with it, in one sentence each: {refused}.\n"
NOT_WITH = "Refused by name, because models that transformers runs ...\n\n"
QUANTISED = "\nFolders quantised in these formats are compared with the formats' definitions, bit by bit: {names}.\n"
KINDS = "\nKinds of models that the tests see refused, in one sentence each, before weights are read: {names}.\n"

PUBLISHED_HEAD = """
### Published repositories
What Baton says to {count} repositories of the hub, by their config.json and other small files: {served} would load. The
files are quoted from public repositories and packages ([sources](../tests/data/published/README.md)); no weights of
them were tried here. `baton models NAME` asks the same of any repository, with the tensors' headers.

| repository | run by, or why not | tensors |
|---|---|---|
"""
NAMES_UNKNOWN, NAMES_FIT = "–", "names fit"

SPOKEN = """
How these families call tools and think, as their published templates tell: each template's own rendering of a call, a
thought and an answer reads back as the same message, in random pieces
(`tests/unit/router/tools/test_published_templates.py`), and a random model, bound by the format's grammar, calls
through a cluster (`tests/integration/api/test_call_formats.py`). "As text" means that the template reads no tools, so
they are written into the chat. What a family's template can't show or tests can't have (licences) is told in the last
column. Formats that SGLang or vLLM read and Baton does not: Inkling, Beam and K2 Horizon (`<ifm|tool_call>`); of ERNIE
4.5 the `<response>` around a text.

| family | calls | thoughts begin with | templates of the tests, or why there is none |
|---|---|---|---|
"""


def renewed(page: str) -> str:
    """Return the page with a new table. Raise ValueError if the page has no place for it."""
    return with_part(page, "docs/support.md", BEGIN, END, table())


def table() -> str:
    lacks = (f"- `{flag}`: {why}\n" for flag, why in sorted(LIBRARY.lacks.items()))
    families = listed(library_families.FAMILIES)
    return "".join(
        [
            HEAD,
            *own_rows(),
            LIBRARY_ROW.format(families=families, tie=library_families.TIE),
            WRAPPERS_ROW.format(names=listed(library_wrappers.WRAPPERS)),
            share(),
            MTP.format(names=listed(mtp_folders.FAMILIES), refused=listed(mtp_folders.REFUSED)),
            "\n",
            NOT_WITH,
            *lacks,
            QUANTISED.format(names=", ".join(dict.fromkeys(form.name for form in FORMATS.values()))),
            KINDS.format(names=listed(library_families.REFUSED)),
            SPOKEN,
            *spoken_rows(),
            *published_rows(),
        ]
    )


def published_rows() -> Iterator[str]:
    """Yield the table of published repositories, from the verdicts that a test compares."""
    kept = published_folders.kept_verdicts()
    yield PUBLISHED_HEAD.format(count=len(kept), served=sum("runs" in verdict for verdict in kept.values()))
    for name, verdict in kept.items():
        fit = names_fit(verdict) if "runs" in verdict else ""
        said = verdict.get("runs") or "refused: " + " ".join(verdict["refusal"].replace("|", "\\|").split())
        yield f"| `{name}` | {said} | {fit} |\n"


def names_fit(verdict: Mapping[str, Any]) -> str:
    if "unread" not in verdict:
        return NAMES_UNKNOWN
    counts = [f"{verdict[what]} {what}" for what in ("unread", "lacking") if verdict[what]]
    return ", ".join(counts) or NAMES_FIT


def share() -> str:
    """Tell how many of the library's types of models that write texts `check_kind` accepts."""
    every = map(CONFIG_MAPPING.__getitem__, CONFIG_MAPPING.keys())
    write = (MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING)
    kinds = [kind for kind in every if any(kind in mapping for mapping in write)]
    return SHARE.format(count=len(kinds), accepted=sum(map(is_accepted, kinds)))


def is_accepted(kind: type[PreTrainedConfig]) -> bool:
    try:
        check_kind(Path(), kind())
    except (ValueError, StrictDataclassError, ConfigError):  # some have no default values
        return False
    return True


def spoken_rows() -> Iterator[str]:
    """Yield a row for each family: the format of its calls, and the tag of its thoughts, as its templates tell them."""
    for family in sorted({*library_families.FAMILIES, *HF_ARCHITECTURES.values(), *GGUF_ARCHITECTURES}):
        names = PUBLISHED[family]
        if isinstance(names, str):
            yield f"| `{family}` | {f'{AS_TEXT.name}, as text' if names is NO_TOOLS else '–'} | – | {names} |\n"
            continue
        calls, thoughts = zip(*map(spoken_by, names), strict=True)
        templates = ", ".join(f"`{name}`" for name in names)
        yield f"| `{family}` | {joined(calls)} | {joined(thoughts)} | {templates} |\n"


def spoken_by(name: str) -> tuple[str, str]:
    """Return how a model with this template calls and thinks; "–" where its template reads no tools or thoughts."""
    sources, row = template_turns.sources_of(name), template_turns.speech(name).calls
    assert row is not None, f"{name}: the format of its calls must be in the table"
    reads = any(map(READS_TOOLS.search, sources.values()))
    tags = thought_tags(sources)
    return (row.name if reads or row is not AS_TEXT else f"{row.name}, as text"), (
        f"`{tags.opening.strip()}`".replace("|", "\\|") if tags is not None else "–"
    )


def joined(texts: Iterable[str]) -> str:
    return "; ".join(dict.fromkeys(texts))


def own_rows() -> Iterator[str]:
    """Yield a row for each family that Baton's own programs run. Raise AssertionError for one without a test."""
    tested = {name: list(variants) for name, variants in groupby(tiny_families.FAMILIES, family_of)}
    gguf = {name.removesuffix("_text") for name in gguf_families.ARCHITECTURES}
    assert tested.keys() == {*HF_ARCHITECTURES.values()}, "each family of folders has a tiny network in the tests"
    assert gguf == {*GGUF_ARCHITECTURES}, "each family of GGUF files has one"
    for name in sorted(tested.keys() | gguf):
        sources = [source for source, names in ((FOLDERS, tested.keys()), (GGUF, gguf)) if name in names]
        variants = [what for one in tested.get(name, ()) if (what := one.partition(", ")[2])]
        compared = f"logits of transformers: {COMPARED[sources[0]]}"
        yield f"| `{name}` | Baton | {', '.join(sources)} | {compared} | {'; '.join(variants)} |\n"


def family_of(variant: str) -> str:
    return variant.partition(",")[0].replace("-", "_")


def listed(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)
