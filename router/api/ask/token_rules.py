"""Check rules for single tokens: bias, stops, allowed ids, bad words. An InvalidRequest names the field."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from router.api.fields.fields import GenerationFields
from router.text.chat.interface import Tokenizer
from shared.core.errors import InvalidRequest
from shared.core.sampling_params import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_TOKENS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_STOP_TOKEN_IDS,
    SamplingParams,
)


def check_ids(ids: Collection[int], field: str, vocab_size: int) -> None:
    if ids and max(ids) >= vocab_size:
        raise InvalidRequest(f"{field} holds a token id above {vocab_size - 1}", param=field)


def bias_of(bias: Mapping[str, float], vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not bias:
        return ()
    if len(bias) > MAX_LOGIT_BIAS:
        raise InvalidRequest(f"logit_bias holds more than {MAX_LOGIT_BIAS} tokens", param="logit_bias")
    if not all(name.isascii() and name.isdigit() and len(name) < 10 for name in bias):
        raise InvalidRequest("logit_bias maps token ids, as decimal numbers, to numbers", param="logit_bias")
    ids = {int(name): value for name, value in bias.items()}
    check_ids(ids, "logit_bias", vocab_size)
    return tuple(sorted(ids.items()))


def stop_ids_of(body: GenerationFields, tokenizer: Tokenizer) -> tuple[int, ...]:
    eos_ids = () if body.ignore_eos else tokenizer.facts.eos_ids
    given = body.stop_token_ids
    if not given:
        return eos_ids
    check_ids(given, "stop_token_ids", tokenizer.facts.vocab_size)
    ids = tuple(dict.fromkeys((*eos_ids, *given)))
    if len(ids) > MAX_STOP_TOKEN_IDS:
        raise InvalidRequest(f"stop_token_ids holds more than {MAX_STOP_TOKEN_IDS} ids", param="stop_token_ids")
    return ids


def allowed_ids_of(ids: Sequence[int] | None, vocab_size: int) -> tuple[int, ...]:
    """Return () for None."""
    if ids is None:
        return ()
    allowed = tuple(sorted(set(ids)))
    if not allowed:
        raise InvalidRequest("allowed_token_ids allows no token", param="allowed_token_ids")
    check_ids(allowed, "allowed_token_ids", vocab_size)
    if len(allowed) > MAX_ALLOWED_TOKEN_IDS:
        raise InvalidRequest(
            f"allowed_token_ids holds more than {MAX_ALLOWED_TOKEN_IDS} ids", param="allowed_token_ids"
        )
    return allowed


def bad_words_of(words: Sequence[str], encode: Callable[[str], list[int]]) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of each word, both at the beginning of a text and after a space."""
    if not words:
        return ()
    spellings = dict.fromkeys(tuple(encode(space + word.lstrip())) for word in words for space in ("", " "))
    if not all(word.strip() for word in words) or not all(spellings):
        raise InvalidRequest("bad_words holds an empty word", param="bad_words")
    if len(spellings) > MAX_BAD_WORDS:
        raise InvalidRequest(f"bad_words has more than {MAX_BAD_WORDS} spellings in tokens", param="bad_words")
    if max(map(len, spellings), default=0) > MAX_BAD_WORD_TOKENS:
        raise InvalidRequest(f"bad_words holds a word of more than {MAX_BAD_WORD_TOKENS} tokens", param="bad_words")
    return tuple(spellings)


def check_something_is_left(sampling: SamplingParams) -> None:
    """Raise InvalidRequest if other rules or a grammar could forbid all allowed tokens."""
    if not sampling.allowed_token_ids:
        return
    if sampling.grammar:
        raise InvalidRequest(
            "allowed_token_ids can leave a grammar without a token; send only one of the two", param="allowed_token_ids"
        )
    barred = {word[0] for word in sampling.bad_words if len(word) == 1}
    too_early = sampling.stop_token_ids if sampling.min_tokens else ()
    if not set(sampling.allowed_token_ids) - barred - set(too_early):
        raise InvalidRequest(
            "every id in allowed_token_ids is a bad word, or would end the answer before min_tokens",
            param="allowed_token_ids",
        )
