"""Collects the turns that a template renders, from endpoints whose histories come in other pieces."""

from __future__ import annotations

from collections.abc import Sequence

from router.api.chat_messages import Turn

BETWEEN = "\n\n"  # texts of two turns that become one


class Turns:
    """Neighbours of one role are one turn, for many templates want roles to alternate: the assistant's text, thought
    and calls, a user's messages, and system messages at the beginning."""

    def __init__(self) -> None:
        self.all: list[Turn] = []
        self._own: dict[str, str] = {}  # texts of the assistant's turn that is open
        self._calls: list[dict[str, object]] = []
        self._call_ids: list[str] = []  # of the last turn of the assistant

    def add(self, role: str, text: str) -> None:
        """A turn that is neither the assistant's nor a tool's."""
        self.close()
        last = self.all[-1] if self.all else None
        if last is not None and last["role"] == role and (role != "system" or len(self.all) == 1):
            last["content"] = f"{last['content']}{BETWEEN}{text}"
        else:
            self.all.append({"role": role, "content": text})

    def add_results(self, results: Sequence[tuple[str, str]]) -> None:
        """What calls gave, each with the call's id. Templates that show no ids want them in the order of the calls."""
        self.close()
        known = {call_id: place for place, call_id in enumerate(self._call_ids)}
        for call_id, text in sorted(results, key=lambda result: known.get(result[0], len(known))):
            self.all.append({"role": "tool", "tool_call_id": call_id, "content": text})

    def add_own(self, name: str, text: str) -> None:
        """More of the assistant's `content` or `reasoning_content`."""
        self._own[name] = self._own.get(name, "") + text

    def add_call(self, call_id: str, name: str, arguments: object) -> None:
        """`arguments`: JSON text, or the object itself."""
        function = {"name": name, "arguments": arguments}
        self._calls.append({"id": call_id, "type": "function", "function": function})

    def close(self) -> None:
        """The assistant's turn, if one is open, is complete."""
        if not self._own and not self._calls:
            return
        turn: Turn = {"role": "assistant", "content": "", **self._own}
        self.all.append(turn | {"tool_calls": self._calls} if self._calls else turn)
        self._call_ids = [str(call["id"]) for call in self._calls]
        self._own, self._calls = {}, []
