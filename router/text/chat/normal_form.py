"""Render a conversation so that the prompt has all its texts, in another form if the template needs one.

The template's own rendering is used if it lacks nothing. Else steps of `rewriting` are tried alone, and then added to
each other, until the template takes a form and shows all its texts.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass

from router.text.chat import rewriting
from router.text.chat.chat_texts import TextPlace, all_found, is_usual, lost_places, marked
from router.text.chat.conversation import Conversation
from router.text.chat.interface import RenderingFailed
from shared.core.errors import InvalidRequest

FORMS_CPU_S = 0.5  # no form is tried after this CPU time
CALL = "call"
EVERYTHING = frozenset({"system", "user", "assistant", "tool", CALL})


@dataclass(frozen=True, slots=True)
class FormStep:
    """`mends`: the roles whose texts the step may save, and `call` for the texts of calls. Any step may save a
    conversation that the template refuses."""

    rewrite: Callable[[Conversation], Conversation]
    mends: frozenset[str]

    @property
    def name(self) -> str:
        return self.rewrite.__name__.replace("_", "-")


def _step(rewrite: Callable[[Conversation], Conversation], *mends: str) -> FormStep:
    return FormStep(rewrite, frozenset(mends))


# The order is that of changes: calls keep the template's own form as long as possible.
GENTLE = (
    _step(rewriting.contents_as_text, *EVERYTHING),
    _step(rewriting.blanks_filled),
    _step(rewriting.tools_described),
    _step(rewriting.systems_merged, "system"),
    _step(rewriting.stray_results_as_user, "tool"),
    _step(rewriting.turns_joined, "user", "assistant"),
    _step(rewriting.texts_before_calls, "assistant"),
    _step(rewriting.calls_one_by_one, CALL, "tool"),
    _step(rewriting.turns_alternate, "user", "assistant"),
    _step(rewriting.short_call_ids),
)
AS_SENT = _step(rewriting.calls_as_sent, CALL)  # most templates can't read this form, so nothing is added to it
STRONG = (
    _step(rewriting.systems_as_user, "system"),
    _step(rewriting.results_as_user, "tool"),
    _step(rewriting.calls_as_text, "assistant", CALL),
)


@dataclass(frozen=True, slots=True)
class Form:
    """`steps`: names of what was done to the conversation. `lost`: places of texts that the prompt lacks even so."""

    steps: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Rendering:
    """One form's prompt, or the template's refusal of it. `lost`: what a prompt lacks."""

    steps: tuple[str, ...]
    chat: Conversation
    prompt: str = ""
    lost: tuple[TextPlace, ...] = ()
    refusal: InvalidRequest | None = None

    @property
    def is_complete(self) -> bool:
        return self.refusal is None and not self.lost

    @property
    def lacks(self) -> frozenset[str]:
        """What kinds of texts a step must save."""
        if self.refusal is not None:
            return EVERYTHING
        return frozenset(place.kind for place in self.lost)


@dataclass(frozen=True, slots=True)
class Renderer:
    """`render` raises RenderingFailed, or another InvalidRequest that no other form can help. `check` may refuse the
    text. `unused_char` returns a character that is not in the conversation, and raises InvalidRequest if all are."""

    render: Callable[[Conversation], str]
    check: Callable[[str], None]
    unused_char: Callable[[], str]

    def with_all_texts(self, chat: Conversation) -> tuple[str, Form]:
        """Raise the template's refusal if it takes no form with all texts."""
        began = time.thread_time()
        try:
            native = self._rendered((), chat)
        except RenderingFailed as error:
            native = Rendering((), chat, refusal=error)
        if native.is_complete:
            return native.prompt, Form()
        for form in self._forms(native):
            if form.is_complete:
                return form.prompt, Form(form.steps)
            if time.thread_time() - began > FORMS_CPU_S:
                break
        if native.refusal is not None:
            raise native.refusal
        return native.prompt, Form(lost=tuple(dict.fromkeys(map(str, native.lost))))

    def _forms(self, native: Rendering) -> Iterator[Rendering]:
        known: dict[tuple[str, ...], Rendering] = {}
        for step in GENTLE:
            yield from self._next(native, step, known)
        gentle = yield from self._added(native, GENTLE, known)
        for step in (AS_SENT, *STRONG):
            yield from self._next(native, step, known)
        yield from self._added(gentle, STRONG, known)

    def _added(
        self, form: Rendering, steps: Sequence[FormStep], known: dict[tuple[str, ...], Rendering]
    ) -> Generator[Rendering, None, Rendering]:
        """Return the form with all steps."""
        for step in steps:
            for one in self._next(form, step, known):
                form = one
                yield one
        return form

    def _next(self, form: Rendering, step: FormStep, known: dict[tuple[str, ...], Rendering]) -> Iterator[Rendering]:
        """Yield the form with one step more, if the step may help. `known`: all forms so far."""
        changed = step.rewrite(form.chat) if form.refusal is not None or step.mends & form.lacks else form.chat
        if changed is form.chat:
            return
        steps = (*form.steps, step.name)
        if steps not in known:
            known[steps] = self._tried(steps, changed)
        yield known[steps]

    def _tried(self, steps: tuple[str, ...], chat: Conversation) -> Rendering:
        try:
            return self._rendered(steps, chat)
        except InvalidRequest as error:
            return Rendering(steps, chat, refusal=error)

    def _rendered(self, steps: tuple[str, ...], chat: Conversation) -> Rendering:
        prompt = self.render(chat)
        self.check(prompt)
        return Rendering(steps, chat, prompt, self._lost(chat, prompt))

    def _lost(self, chat: Conversation, prompt: str) -> tuple[TextPlace, ...]:
        is_found = all_found(chat.messages, prompt)
        if is_found and is_usual(chat.messages):
            return ()
        try:
            mark = self.unused_char()
            signed, places = marked(chat, mark)
            return lost_places(places, mark, self.render(signed))
        except InvalidRequest:  # the template does not take the marks
            everything = [TextPlace("messages", kind) for kind in EVERYTHING]
            return () if is_found else tuple(everything)
