"""A request's sampling parameters, with all defaults filled in and text replaced by ids."""

from __future__ import annotations

from dataclasses import dataclass

MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOP_TOKEN_IDS = 64
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 128  # limit on token sequences; one bad word has several sequences
MAX_BAD_WORD_TOKENS = 32  # limit on the tokens of one such sequence
MAX_GRAMMAR_CHARS = 1 << 18


@dataclass(frozen=True, slots=True)
class SamplingValues:
    """The parameters for which a model may have defaults. Without arguments: neutral, so no probability changes."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: no limit
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # for tokens in the prompt or the output


NEUTRAL = SamplingValues()


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's parameters.

    - stop_token_ids: include the model's EOS ids, unless the client set ignore_eos. Stop strings stay in the router.
    - allowed_token_ids: only these ids may be drawn; () allows all ids.
    - bad_words: runs of token ids. A run's last id isn't drawn after the run's other ids, unless no other id is
      allowed.
    - num_logprobs: with -1, no log-probabilities are returned; with 0, the sampled token's; with k, also those of the k
      likeliest tokens.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0  # this and frequency_penalty: for tokens in the output
    frequency_penalty: float = 0.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    grammar: str = ""  # the answer's grammar, as text for llguidance; "": no grammar
    num_logprobs: int = -1
    prompt_logprobs: int = -1  # like num_logprobs, for the prompt's tokens

    @property
    def needs_history(self) -> bool:
        has_penalty = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return has_penalty or any(len(word) > 1 for word in self.bad_words)

    @property
    def values(self) -> SamplingValues:
        return SamplingValues(self.temperature, self.top_p, self.top_k, self.min_p, self.repetition_penalty)
