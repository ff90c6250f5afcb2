"""Compare the text that was saved with an answer with the one that its certified token ids spell."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from router.certify.record import AnswerRecord, BadCertificate, ShownAnswer
from router.text.chat.interface import Tokenizer
from router.text.detokenizer import Detokenizer

SHOWN_CHARS = 40


class Speller:
    """Spells ids in every way in which a request may have asked for text: with and without special and stop tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def check_text(self, shown: ShownAnswer, record: AnswerRecord, prompt_ids: Sequence[int]) -> None:
        """Raise BadCertificate for another text. A stop string, which only its digest is of, may have cut it anywhere;
        with `echo` it begins with the prompt."""
        text, ids = shown.text, shown.token_ids
        if text is None or ids is None:
            return
        over = max((*ids, *prompt_ids), default=0)
        if over >= self._tokenizer.facts.vocab_size:
            raise BadCertificate(f"the model here has no token {over}, so its text can't be compared")
        silent = frozenset(record.sampling.get("stop_token_ids", ()))
        ways = [*self._spelled(ids), *self._spelled([one for one in ids if one not in silent])]
        ways += [prompt + way for prompt in self._spelled(prompt_ids) for way in ways]
        if text in ways or (record.stop is not None and any(way.startswith(text) for way in ways)):
            return
        place = max(len(os.path.commonprefix([text, way])) for way in ways)
        way = next(way for way in ways if len(os.path.commonprefix([text, way])) == place)
        saved, spelled = (one[place : place + SHOWN_CHARS] for one in (text, way))
        raise BadCertificate(
            f"the text saved with it is not what its token ids spell: from character {place} on it is {saved!r}, and "
            f"they spell {spelled!r}"
        )

    def _spelled(self, ids: Iterable[int]) -> list[str]:
        ids = list(ids)
        found = []
        for shows_special in (False, True):
            detokenizer = Detokenizer(self._tokenizer, shows_special=shows_special)
            found.append("".join(map(detokenizer.feed, ids)))
        return found
