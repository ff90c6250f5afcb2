"""Make a tokenizer of a tiktoken.model, which Kimi's repositories have instead of a tokenizer.json.

The file holds byte strings and their ranks. How a text is cut into words, and which tokens come after the file's, is
told only by the repository's Python code, which is never run. So a table has both, by the model_type of config.json.
"""

from __future__ import annotations

import base64
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from shared.config.models.json_file import read_json_if_there
from shared.config.models.model_folder import TOKENIZER, ModelFolder, read_folder
from shared.config.models.vocab_bytes import byte_level_alphabet
from shared.core.errors import ConfigError

NAME = "tiktoken.model"


@dataclass(frozen=True, slots=True)
class OwnCode:
    """What the repository's code says. `split`: a pattern of words. `reserved`: number of tokens after the file's."""

    split: str
    reserved: int


# Chinese characters are words of their own; the rest is cut as for GPT-4o.
_BEFORE, _ENDING = r"[^\r\n\p{L}\p{N}]?", r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
_UPPER, _LOWER = (rf"[\p{{{case}}}\p{{Lm}}\p{{Lo}}\p{{M}}&&[^\p{{Han}}]]" for case in (r"Lu}\p{Lt", "Ll"))
_WORDS = rf"{_BEFORE}{_UPPER}*{_LOWER}+{_ENDING}|{_BEFORE}{_UPPER}+{_LOWER}*{_ENDING}"
KIMI = OwnCode(
    rf"[\p{{Han}}]+|{_WORDS}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+", reserved=256
)
BY_TYPE = {"kimi_k2": KIMI}  # also Kimi K2.5's text part


def read_tiktoken(folder: Path) -> Tokenizer:
    """Raise ConfigError as `own_code` does, and for a file that can't be read."""
    code = own_code(read_folder(folder))
    try:
        return made_of(ranks_of(folder / NAME), code, read_json_if_there(folder / TOKENIZER))
    except (OSError, LookupError, TypeError, ValueError, AttributeError) as error:
        raise ConfigError(f"{folder / NAME} can't be used: {error}") from error


def own_code(folder: ModelFolder) -> OwnCode:
    """Raise ConfigError for a type of model whose words are not known."""
    kind = folder.text.get("model_type")
    if kind not in BY_TYPE:
        raise ConfigError(
            f"{folder.path} has a {NAME} and no tokenizer.json, and how {kind} cuts words is told only by its own "
            "code, which Baton never runs: put a tokenizer.json into the folder (TikTokenConverter of transformers "
            "makes one)"
        )
    return BY_TYPE[kind]


def ranks_of(path: Path) -> dict[bytes, int]:
    """Return each token's bytes with its rank, which is its id. Raises ValueError."""
    lines = (line.split() for line in path.read_bytes().splitlines() if line)
    ranks = {base64.b64decode(token, validate=True): int(rank) for token, rank in lines}
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError("its ranks are not 0, 1, 2, ...")
    return ranks


def made_of(ranks: Mapping[bytes, int], code: OwnCode, described: Mapping[str, Any]) -> Tokenizer:
    """`described`: tokenizer_config.json, which names some of the reserved tokens."""
    letters = {byte: letter for letter, byte in byte_level_alphabet().items()}
    spelled = {token: "".join(map(letters.__getitem__, token)) for token in ranks}
    vocab = {spelled[token]: rank for token, rank in ranks.items()}
    merges = [(spelled[left], spelled[right]) for left, right in pairs_of(ranks)]
    tokenizer = Tokenizer(models.BPE(vocab, merges, ignore_merges=True))
    words = pre_tokenizers.Split(Regex(code.split), behavior="isolated")
    letters_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([words, letters_of])
    tokenizer.decoder = decoders.ByteLevel()
    named = described.get("added_tokens_decoder") or {}
    for index in range(len(ranks), len(ranks) + code.reserved):
        own = named.get(str(index)) or {"content": f"<|reserved_token_{index}|>", "special": True}
        tokenizer.add_tokens([AddedToken(own["content"], special=bool(own.get("special")), normalized=False)])
        if tokenizer.token_to_id(own["content"]) != index:
            raise ValueError(f"the token {json.dumps(own['content'])} is there twice")
    return tokenizer


def pairs_of(ranks: Mapping[bytes, int]) -> list[tuple[bytes, bytes]]:
    """Return the pairs that merge, in the order of what they merge to: tiktoken merges any two that make a token."""
    pairs = []
    for token in sorted(ranks, key=ranks.__getitem__):
        cuts = ((token[:at], token[at:]) for at in range(1, len(token)))
        found = [pair for pair in cuts if pair[0] in ranks and pair[1] in ranks]
        pairs += sorted(found, key=lambda pair: (ranks[pair[0]], ranks[pair[1]]))
    return pairs
