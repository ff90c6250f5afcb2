"""Turn a parsed request into a plan: fill in defaults, check the limits of configuration and model.

Errors are InvalidRequests with the field's name. Does no I/O; the caller chooses the thread.
"""

from __future__ import annotations

import hashlib
import secrets
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

from router.api.answer.generation_plan import PLAIN, AnswerForm, GenerationPlan, PromptJob, ShowOptions, UsageShown
from router.api.ask.parts import Parts
from router.api.ask.structured import grammar_of
from router.api.ask.token_rules import (
    allowed_ids_of,
    bad_words_of,
    bias_of,
    check_ids,
    check_something_is_left,
    stop_ids_of,
)
from router.api.ask.unenforced import free_header, left_free
from router.api.fields.cache_hints import RETENTION_S
from router.api.fields.fields import NO_LIMIT, GenerationFields, sampling_fields_of
from router.http.errors import PromptTooLong
from router.http.ignored import LOWERED
from router.tenants.tenant import Tenant
from router.text.chat.chat_prompt import ChatPrompt, chat_prompt
from router.text.chat.conversation import Conversation
from router.text.chat.interface import TextModel, Tokenizer, decode_ids
from router.tools.calls.format_row import ToolFormat
from router.tools.response_template import ResponseTemplate
from shared.config.settings.settings import LimitsConfig
from shared.core.errors import InvalidRequest, ModelNotFound
from shared.core.keys import MASK64
from shared.core.sampling_params import NEUTRAL, SamplingParams, SamplingValues

CHARS_PER_TOKEN = 64  # the least result of chars_per_token
# Words of OpenAI's own: LiteLLM and others know this error by its text, not by its code.
TOO_MANY = "this model's maximum context length is exceeded"
MOST_SHOWN = 1 << 63
MOST_NAMES = 20  # in an error
MAX_STOP_STRINGS, MAX_STOP_CHARS = 16, 256
DEFAULTED = tuple(one.name for one in fields(SamplingValues))
# Nodes take no 0, which OpenAI's API takes. The likeliest token of any vocabulary has a larger share than this.
LEAST_TOP_P = 1e-9
GONE = "gone"  # stands for a digest if the adapter's last node has just left


@dataclass(frozen=True, slots=True)
class Cap:
    """The limit on an answer, and the response's header if it is lower than the client's."""

    max_tokens: int
    headers: Mapping[bytes, bytes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Resolver:
    """The function `adapters` returns all adapters' digests by name. Each use calls it anew, because nodes come and
    go.

    `defaults`: for fields that a request lacks. `max_chars`: the most characters of a text. For longer texts a
    tokenizer would take gigabytes. `keeps_parts`: whether images may get a placeholder. `is_strict`: whether a
    `max_tokens` beyond the room is refused, not lowered. `no_grammar`: why no node follows grammars; "": one does."""

    model_name: str
    text: TextModel
    limits: LimitsConfig
    adapters: Callable[[], Mapping[str, str]] = dict
    calls: ToolFormat | None = None  # the format of the model's calls, if it is known
    defaults: SamplingValues = NEUTRAL
    max_chars: int = sys.maxsize
    keeps_parts: bool = True
    is_strict: bool = False
    other_names: tuple[str, ...] = ()  # of the model, beside `model_name`
    opens_objects: bool = False  # whether objects of schemas take properties that the schema does not mention
    no_grammar: str = ""
    template: ResponseTemplate | None = None  # how the model describes its answers, if `calls` is not known

    def for_tenant(self, tenant: Tenant) -> Resolver:
        if tenant.adapters is None:
            return self
        every = self.adapters
        return replace(self, adapters=lambda: {name: it for name, it in every().items() if tenant.may_use(name)})

    def parts(self) -> Parts:
        return Parts(keeps=self.keeps_parts)

    def check_model(self, name: str | None) -> None:
        """Raise ModelNotFound for an unknown name."""
        if name is None or name in self.names:
            return
        served = [*self.names, *self.adapters()]
        if name not in served:
            shown = ", ".join(map(repr, served[:MOST_NAMES])) + (", ..." if len(served) > MOST_NAMES else "")
            verb = "are" if len(served) > 1 else "is"
            raise ModelNotFound(f"the model {name[:100]!r} does not exist; {shown} {verb} served", param="model")

    @property
    def names(self) -> tuple[str, ...]:
        """All names of the model itself; the first is the default."""
        return (self.model_name, *self.other_names)

    def check_shared(self, body: GenerationFields) -> None:
        """Check the fields that need no tokenizer."""
        self.check_model(body.model)
        if (body.n or 1) > self.limits.max_n:
            raise InvalidRequest(f"n is {body.n}, above the limit of {self.limits.max_n}", param="n")
        if _usage_shown(body) is not UsageShown.NEVER and not body.stream:
            raise InvalidRequest("stream_options needs stream to be true", param="stream_options")
        if body.seed is not None and not -(1 << 63) <= body.seed < (1 << 64):
            raise InvalidRequest("seed does not fit into 64 bits", param="seed")
        stops = _stops(body)
        if len(stops) > MAX_STOP_STRINGS:
            raise InvalidRequest(f"stop holds more than {MAX_STOP_STRINGS} strings", param="stop")
        if any(len(stop) > MAX_STOP_CHARS for stop in stops):
            raise InvalidRequest(f"stop: a stop string has at most {MAX_STOP_CHARS} characters", param="stop")

    # ---- prompts

    def chat_prompt(self, conversation: Conversation) -> ChatPrompt:
        return chat_prompt(self.text, conversation, lambda text: self._check_chars(text, "messages"))

    def prompt_ids(self, text: str, *, add_special: bool, field: str = "prompt") -> list[int]:
        self._check_chars(text, field)
        return self._encode(text, field, add_special=add_special)

    def prompts(
        self, prompt: str | list[str | int | list[int]], *, add_special: bool
    ) -> list[tuple[list[int], str | None]]:
        """Return (ids, text) of every prompt; text is None if the client sent ids."""
        entries = [prompt] if isinstance(prompt, str) or (prompt and isinstance(prompt[0], int)) else prompt
        if not entries:
            raise InvalidRequest("prompt is empty", param="prompt")
        if len(entries) > self.limits.max_prompts:
            raise InvalidRequest(f"prompt holds more than {self.limits.max_prompts} prompts", param="prompt")
        return [self._prompt(entry, add_special) for entry in entries]

    def truncated(self, ids: list[int], most: int | None, num_answer: int, max_context: int) -> list[int]:
        """Return the last `most` ids. If `most` is None, return all; if -1, as many as leave room for the answer."""
        if most == -1:
            most = max_context - num_answer - self.size(())
            if most < 1:
                why = f"truncate_prompt_tokens is -1, but an answer of {num_answer} tokens leaves no room for a prompt"
                raise InvalidRequest(why, param="truncate_prompt_tokens")
        return ids if most is None else ids[max(0, len(ids) - most) :]

    def echo(self, ids: list[int], text: str | None, *, is_whole: bool) -> str:
        return text if text is not None and is_whole else decode_ids(self.text.tokenizer, ids)

    def size(self, ids: Sequence[int]) -> int:
        return len(ids) + len(self.text.tokenizer.facts.start_ids)

    def check_length(self, ids: Sequence[int], field: str, max_context: int) -> None:
        if not ids:
            raise InvalidRequest(f"{field} is empty: there must be at least one token", param=field)
        limit = min(max_context - 1 - self.size(()), self.limits.max_prompt_tokens or max_context)
        if len(ids) > limit:
            why = f"{field} has {len(ids)} tokens; at most {limit} fit (context length {max_context})"
            raise PromptTooLong(f"{TOO_MANY}: {why}: the prompt is too long", param=field)

    def _check_chars(self, text: str, field: str) -> None:
        if len(text) > self.max_chars:
            why = f"{field} has {len(text)} characters; at most {self.max_chars} are turned into tokens"
            raise PromptTooLong(f"{TOO_MANY}: {why}: the prompt is too long", param=field)

    def cap(self, wanted: int | None, field: str, room: int, *, default: int) -> Cap:
        """Raise PromptTooLong if strict: agents then shorten their conversation."""
        if wanted is None:
            return Cap(min(default, room, self.limits.default_max_tokens or room))
        if wanted == NO_LIMIT:
            return Cap(min(default, room))
        if wanted <= room:
            return Cap(wanted)
        if self.is_strict:
            why = f"{field} is {wanted}, but only {room} tokens fit after the prompt"
            raise PromptTooLong(f"{TOO_MANY}: {why}", param=field)
        return Cap(room, {LOWERED: f"{field};from={min(wanted, MOST_SHOWN)};to={room}".encode()})

    def check_ids(self, ids: Sequence[int], field: str) -> None:
        check_ids(ids, field, self.text.tokenizer.facts.vocab_size)

    # ---- the plan

    def form(self, body: GenerationFields) -> tuple[str, tuple[str, ...]]:
        """Return the grammar of an answer without tools ("" allows any text), and what `left_free` returns."""
        if self.no_grammar:
            return "", left_free(body, self.no_grammar)
        return grammar_of(body, self.text.tokenizer.facts, opens_objects=self.opens_objects), ()

    def plan(
        self,
        body: GenerationFields,
        prompts: Sequence[tuple[list[int], str]],
        cap: Cap,
        num_logprobs: int,
        *,
        headers: Mapping[bytes, bytes] | None = None,
        echoes_logprobs: bool = False,
        form: AnswerForm = PLAIN,
        grammar: str = "",
        unenforced: Sequence[str] = (),
    ) -> GenerationPlan:
        """`grammar`: the answer's grammar; "" allows any text. `unenforced`: see `left_free`."""
        prompt_logprobs = -1 if body.prompt_logprobs is None else body.prompt_logprobs
        echoes_logprobs = echoes_logprobs and num_logprobs >= 0
        scores = max(prompt_logprobs, num_logprobs if echoes_logprobs else -1)
        self._check_scores(body, scores, sum(len(ids) for ids, _ in prompts))
        model = body.model or self.model_name
        # Every prompt gets the client's seed, so that each can be repeated alone.
        jobs = tuple(PromptJob(ids=ids, seed=_seed(body.seed), echo=echo) for ids, echo in prompts)
        return GenerationPlan(
            model=model,
            adapter="" if model in self.names else self.adapters().get(model, GONE),
            cache_salt=_salt(body.cache_salt),
            rank=body.priority or 0,
            session=body.prompt_cache_key or "",
            keep_s=RETENTION_S.get(body.prompt_cache_retention, 0.0),
            jobs=jobs,
            num_sequences=body.n or 1,
            sampling=self._sampling(body, cap.max_tokens, num_logprobs, scores, grammar),
            show=ShowOptions(
                stops=_stops(body),
                stream=bool(body.stream),
                usage=_usage_shown(body),
                return_token_ids=bool(body.return_token_ids),
                num_logprobs=num_logprobs,
                prompt_logprobs=prompt_logprobs,
                echoes_logprobs=echoes_logprobs,
                hides_answer=cap.max_tokens == 0,
                keeps_stop=bool(body.include_stop_str_in_output),
                shows_special=body.skip_special_tokens is False,
                names_tokens_by_id=bool(body.return_tokens_as_token_ids),
                form=form,
            ),
            headers={**cap.headers, **(headers or {}), **free_header(unenforced)},
            unenforced=tuple(unenforced),
            is_certified=bool(body.certificate),
        )

    def _check_scores(self, body: GenerationFields, num_scores: int, num_tokens: int) -> None:
        name = "echo" if body.prompt_logprobs is None else "prompt_logprobs"
        if num_tokens * (num_scores + 1) * (body.n or 1) > self.limits.max_scores:
            most = self.limits.max_scores
            raise InvalidRequest(f"{name} asks for more than {most} log-probabilities of the prompt", param=name)
        if num_scores >= 0 and self.text.tokenizer.facts.start_ids:
            raise InvalidRequest("a model with an encoder does not say how likely a prompt is", param=name)
        if body.prompt_logprobs is not None and body.stream:
            raise InvalidRequest("prompt_logprobs needs an answer that is not streamed", param="prompt_logprobs")

    def _sampling(
        self, body: GenerationFields, max_tokens: int, num_logprobs: int, prompt_logprobs: int, grammar: str
    ) -> SamplingParams:
        tokenizer, min_tokens = self.text.tokenizer, body.min_tokens or 0
        vocab_size = tokenizer.facts.vocab_size
        if min_tokens > max_tokens:
            raise InvalidRequest(f"min_tokens is {min_tokens}, above max_tokens {max_tokens}", param="min_tokens")
        sampling = SamplingParams(
            max_tokens=max(1, max_tokens),
            **self._numbers(body),
            logit_bias=bias_of(body.logit_bias or {}, vocab_size),
            allowed_token_ids=allowed_ids_of(body.allowed_token_ids, vocab_size),
            bad_words=bad_words_of(
                body.bad_words or (), lambda word: self._encode(word, "bad_words", add_special=False)
            ),
            min_tokens=min_tokens,
            stop_token_ids=stop_ids_of(body, tokenizer),
            grammar=grammar,
            num_logprobs=num_logprobs,
            prompt_logprobs=prompt_logprobs,
        )
        check_something_is_left(sampling)
        return sampling

    def _prompt(self, entry: object, add_special: bool) -> tuple[list[int], str | None]:
        if isinstance(entry, str):
            return self.prompt_ids(entry, add_special=add_special), entry
        if isinstance(entry, list) and all(isinstance(i, int) for i in entry):
            self.check_ids(entry, "prompt")
            return entry, None
        raise InvalidRequest("prompt mixes text, ids and lists; send all of one kind", param="prompt")

    def _encode(self, text: str, field: str, *, add_special: bool) -> list[int]:
        try:
            return self.text.tokenizer.encode(text, add_special=add_special)
        except InvalidRequest as error:
            raise InvalidRequest(error.message, param=field) from error

    def _numbers(self, body: GenerationFields) -> dict[str, Any]:
        own = {name: value for name, value in sampling_fields_of(body).items() if value is not None}
        numbers = {name: getattr(self.defaults, name) for name in DEFAULTED} | own
        top_k = min(max(0, numbers["top_k"]), self.text.tokenizer.facts.vocab_size)
        return numbers | {"top_k": top_k, "top_p": max(LEAST_TOP_P, numbers["top_p"])}


def chars_per_token(tokenizer: Tokenizer) -> int:
    longest = max(len(tokenizer.token_bytes(i)) for i in range(tokenizer.facts.vocab_size))
    return max(CHARS_PER_TOKEN, longest)


def _seed(seed: int | None) -> int:
    return secrets.randbits(64) if seed is None else seed & MASK64


def _salt(text: str | None) -> int:
    """Return the salt's 64-bit digest, the same on every router; 0 for no salt."""
    if text is None:
        return 0
    digest = hashlib.blake2b(text.encode(errors="surrogatepass"), digest_size=8, person=b"cache_salt").digest()
    return int.from_bytes(digest) | 1


def _stops(body: GenerationFields) -> tuple[str, ...]:
    """Leave out empty strings: forms send what their user left empty."""
    given = (body.stop,) if isinstance(body.stop, str) else body.stop or ()
    return tuple(dict.fromkeys(filter(None, given)))


def _usage_shown(body: GenerationFields) -> UsageShown:
    options = body.stream_options
    if options is None or not (options.include_usage or options.continuous_usage_stats):
        return UsageShown.NEVER
    return UsageShown.ALWAYS if options.continuous_usage_stats else UsageShown.LAST
