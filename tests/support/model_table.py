"""Make the table of models in docs/support.md from what the tests serve. Knows nothing of the rest of the page."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import groupby

from shared.config.frozen import LIBRARY
from shared.model.gguf_config import GGUF_ARCHITECTURES
from shared.model.hf_config import HF_ARCHITECTURES
from tests.support import gguf_families, library_families, mtp_folders, tiny_families
from tests.support.made_parts import with_part
from tests.support.tiny_quantized import FORMATS

BEGIN = "<!-- Made by `python -m tests.support.doc_pages --write` from what the tests serve. -->"
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
MTP = "\n`--spec mtp` runs the MTP layers in folders of these families, under their published names; candidates are \
those of the library's own generator: {names}. Those of `deepseek_v3` are also those of its report's definition, in \
plain torch. Refused with it, in one sentence each: {refused}.\n"
NOT_WITH = "Refused by name, because models that transformers runs ...\n\n"
QUANTISED = "\nFolders quantised in these formats are compared with the formats' definitions, bit by bit: {names}.\n"
KINDS = "\nKinds of models that the tests see refused, in one sentence each, before weights are read: {names}.\n"


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
            MTP.format(names=listed(mtp_folders.FAMILIES), refused=listed(mtp_folders.REFUSED)),
            "\n",
            NOT_WITH,
            *lacks,
            QUANTISED.format(names=", ".join(dict.fromkeys(form.name for form in FORMATS.values()))),
            KINDS.format(names=listed(library_families.REFUSED)),
        ]
    )


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
