"""Resolved sampling parameters: what travels from the router to the nodes. No text, no defaults left open."""

from __future__ import annotations

from dataclasses import dataclass

MAX_TOP_LOGPROBS = 20
MAX_LOGIT_BIAS = 300
MAX_STOP_TOKEN_IDS = 64
MAX_ALLOWED_TOKEN_IDS = 1024
MAX_BAD_WORDS = 128  # as token ids: a word has several spellings
MAX_BAD_WORD_TOKENS = 32  # of one of them
MAX_GRAMMAR_CHARS = 1 << 18


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One request's parameters after the router has resolved them.

    stop_token_ids already holds the model's EOS ids unless the client asked for ignore_eos; stop strings stay in
    the router. `allowed_token_ids` leaves nothing else to draw from; () allows all. A bad word is a run of token ids
    that the answer may not have: its last one is not drawn behind the others, unless nothing else is allowed.
    `num_logprobs` is -1 for none, 0 for the sampled token only, k for the k best as well; logprobs are
    of the model's raw distribution (before penalties, bias, temperature and filters).
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # over prompt + output
    presence_penalty: float = 0.0  # over output
    frequency_penalty: float = 0.0  # over output
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    min_tokens: int = 0
    stop_token_ids: tuple[int, ...] = ()
    grammar: str = ""  # llguidance's text of what the answer must follow; "": anything
    num_logprobs: int = -1
    prompt_logprobs: int = -1  # the same of the prompt's tokens, given what is before each

    @property
    def needs_history(self) -> bool:
        """Whether sampling reads the tokens before it."""
        has_penalty = self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        return has_penalty or any(len(word) > 1 for word in self.bad_words)
