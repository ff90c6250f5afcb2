"""Build a SentencePiece BPE tokenizer from the vocabulary in a GGUF file.

Such a file has a score per entry and no merges. SentencePiece joins the two neighbours whose union has the best score,
the first such pair if several have it. The library's BPE does the same with a list of pairs, best first. So each pair
of entries whose union is an entry becomes a merge.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers

from shared.config.models.vocab_bytes import METASPACE
from shared.config.models.vocabulary import TEXT_TYPE, gguf_entries, of_type
from shared.core.errors import ConfigError

MOST_CHARS = 4096  # of an entry, whose divisions are all tried


def sentencepiece_bpe(metadata: Mapping[str, Any]) -> tokenizers.Tokenizer:
    """Return the tokenizer without its control and user-defined tokens. Raise ConfigError for a file without scores."""
    entries = gguf_entries(metadata)
    scores: list[float] = metadata.get("tokenizer.ggml.scores") or []
    if len(scores) != len(entries):
        raise ConfigError(f"the GGUF file has {len(scores)} scores for its {len(entries)} entries of SentencePiece")
    if max(map(len, entries), default=0) > MOST_CHARS:
        raise ConfigError(f"the GGUF file has an entry of more than {MOST_CHARS} characters")
    scored = dict(zip(entries, scores, strict=True))
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    bpe = models.BPE(
        vocab={entry: i for i, entry in enumerate(entries)},
        merges=merges_of({entry: scored[entry] for entry in of_type(metadata, TEXT_TYPE)}),
        unk_token=None if unknown is None else entries[int(unknown)],
        fuse_unk=True,
        byte_fallback=True,
    )
    inner = tokenizers.Tokenizer(bpe)
    inner.decoder = decoders.Sequence([decoders.Replace(METASPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    spaces = normalizers.Replace(" ", METASPACE)
    prefix = [normalizers.Prepend(METASPACE)] if has_space_prefix(metadata) else []
    inner.normalizer = normalizers.Sequence([*prefix, spaces])
    return inner


def has_space_prefix(metadata: Mapping[str, Any]) -> bool:
    """Return whether a text is tokenized with a space before it."""
    return bool(metadata.get("tokenizer.ggml.add_space_prefix", True))


def merges_of(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return each division of an entry into two entries, those of the best entry first. Equal scores keep the file's
    order."""
    return [
        (entry[:cut], entry[cut:])
        for entry in sorted(scores, key=scores.__getitem__, reverse=True)
        for cut in range(1, len(entry))
        if entry[:cut] in scores and entry[cut:] in scores
    ]
