"""Collect a template's turns, for /v1/responses and /v1/messages."""

from __future__ import annotations

from collections.abc import Sequence

from router.api.ask.insertions import system_text
from router.api.openai.chat_messages import Turn

BETWEEN = "\n\n"  # stands between merged texts


class Turns:
    """Merges neighbouring turns of one role, because many templates require that roles alternate.

    The assistant's text, reasoning and calls become one turn. System messages are merged only at the beginning.
    """

    def __init__(self) -> None:
        self.all: list[Turn] = []
        self._own: dict[str, str] = {}  # the open assistant turn's texts, by field
        self._calls: list[dict[str, object]] = []
        self._call_ids: list[str] = []  # call ids of the last assistant turn

    def add_turn(self, role: str, text: str) -> None:
        self.close()
        last = self.all[-1] if self.all else None
        if last is not None and last["role"] == role and (role != "system" or len(self.all) == 1):
            last["content"] = f"{last['content']}{BETWEEN}{text}"
        else:
            self.all.append({"role": role, "content": text})

    def add_system(self, texts: Sequence[str]) -> None:
        """Add no turn for empty text, so that the template's own system prompt stays."""
        text = system_text(texts)
        if text:
            self.add_turn("system", text)

    def add_results(self, results: Sequence[tuple[str, str]]) -> None:
        """Add (call id, output) pairs in the order of the calls, because some templates show no ids."""
        self.close()
        known = {call_id: place for place, call_id in enumerate(self._call_ids)}
        for call_id, text in sorted(results, key=lambda result: known.get(result[0], len(known))):
            self.all.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def add_own(self, name: str, text: str) -> None:
        """Append to the assistant's field `name`: `content` or `reasoning_content`."""
        self._own[name] = self._own.get(name, "") + text

    def add_call(self, call_id: str, name: str, arguments: object) -> None:
        """`arguments`: see `as_object`."""
        function = {"name": name, "arguments": arguments}
        self._calls.append({"id": call_id, "type": "function", "function": function})

    def close(self) -> None:
        if not self._own and not self._calls:
            return
        turn: Turn = {"role": "assistant", "content": "", **self._own}
        self.all.append(turn | {"tool_calls": self._calls} if self._calls else turn)
        self._call_ids = [str(call["id"]) for call in self._calls]
        self._own, self._calls = {}, []
