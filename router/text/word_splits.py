"""Say how a byte-level BPE cuts text into words, by the names that GGUF files have for it (tokenizer.ggml.pre)."""

from __future__ import annotations

from tokenizers import Regex, pre_tokenizers

from shared.core.errors import ConfigError

_ENDINGS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LETTERS = rf"{_ENDINGS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_REST = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{_SPACES}"
QWEN2_SPLIT = rf"{_LETTERS}|\p{{N}}|{_REST}"
LLAMA3_SPLIT = rf"{_LETTERS}|\p{{N}}{{1,3}}|{_REST}"
# These two also cut where a small letter is followed by a capital one.
_BEFORE, _UPPER, _LOWER = r"[^\r\n\p{L}\p{N}]?", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SMALL, _CAPITAL = rf"{_BEFORE}{_UPPER}*{_LOWER}+", rf"{_BEFORE}{_UPPER}+{_LOWER}*"
_SIGNS = rf" ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{_SPACES}"
TEKKEN_SPLIT = rf"{_SMALL}|{_CAPITAL}|\p{{N}}|{_SIGNS}"
GPT4O_SPLIT = rf"{_SMALL}{_ENDINGS}?|{_CAPITAL}{_ENDINGS}?|\p{{N}}{{1,3}}|{_SIGNS}"

_LLAMA3 = ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "midm-2.0")
_TEKKEN = ("tekken",)
SPLITS = {
    **dict.fromkeys((*_LLAMA3, "dbrx", "smaug-bpe"), LLAMA3_SPLIT),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez", "kormo"), QWEN2_SPLIT),
    **dict.fromkeys(_TEKKEN, TEKKEN_SPLIT),
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), GPT4O_SPLIT),
}
# A word that is an entry is one token, even if no merges lead to it. Texts begin with the begin token, where the file
# does not say whether they do.
TAKES_WHOLE_WORDS = frozenset((*_LLAMA3, *_TEKKEN))
WITH_DIGITS = ("smollm", "starcoder", "refact", "command-r")  # each digit is a word
PLAIN = ("gpt-2",)


def pre_tokenizer(name: str) -> pre_tokenizers.PreTokenizer:
    """Raise ConfigError for an unknown name: other words would be other tokens."""
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=name not in SPLITS)
    if name in SPLITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLITS[name]), "isolated"), words])
    if name in WITH_DIGITS:
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    if name in PLAIN:
        return words
    raise ConfigError(f"how the GGUF file splits words ({name!r}) is not known here; use the model's folder")
