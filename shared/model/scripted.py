"""Run a model that says what it is told to, for tests of clients and agents.

    the last message has `say:`        all text after it
    it is the result of a tool         `The tool said: ` and the result
    else                               `Nothing to say.`

A system message is not the last one if any other is there: agents put some behind the user's.

The prompt is read from the KV cache, one token per slot, so only correct pages give a correct answer. The prompt must
be a chat in the plain template: turns of `role: content`, then `assistant: `. Other prompts get an empty answer. If a
grammar forbids the next token, the model says a short text that the grammar allows. It prefers a JSON object to a tool
call. CPU only, without draft trees.
"""

from __future__ import annotations

import re

import numpy as np
import numpy.typing as npt
import torch

from shared.config.models.pieces import make_pieces
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.model.math.interface import ModelInputs, ModelOutput, ModelSpec

DEFAULT_CONTEXT = 4096
ANSWER = b"assistant: "
TURN = re.compile(rb"(?:^| )(system|user|assistant|tool): ")
SAY = b"say:"
# Logits of the text's next token, the end token, tokens that close a JSON text, and the token that opens it.
CHOSEN, ENDING, CLOSING, OPENING = 100.0, 50.0, 20.0, 10.0
CLOSERS = (b'"', b"}", b"]", b'"}', b'"]', b"}}")
BELOW = 2.0**-12  # difference of neighbouring ids' logits, so that no logits are equal


class ScriptedLM:
    def __init__(self, max_context: int = 0) -> None:
        self._pieces = make_pieces()
        size = len(self._pieces.vocabulary.tokens)
        self.spec = ModelSpec(
            name="scripted",
            vocab_size=size,
            max_context=max_context or DEFAULT_CONTEXT,
            dtype="int",
            weights_hash=f"scripted-2-{self._pieces.vocabulary.digest}",
            eos_ids=(self._pieces.eos_id,),
        )
        self._base = -BELOW * np.arange(size, dtype=np.float32)
        self._base[[self._pieces.ids[token] for token in CLOSERS]] += CLOSING
        self._base[self._pieces.ids[b"{"]] += OPENING
        self._base[self._pieces.eos_id] = ENDING

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]:
        return (PlaneSpec("kv", (page_size,), torch.int64, slot_dim=-1),)

    def forward(self, inputs: ModelInputs, kv: KVPool) -> ModelOutput:
        """Return `hidden` (E, 1) int64: the chosen ids."""
        slots, tables = kv.plane("kv").numpy(), inputs.layout.page_table.numpy()
        bounds, positions, ids = inputs.layout.cu_q_lens.numpy(), inputs.positions.numpy(), inputs.input_ids.numpy()
        for row in range(len(bounds) - 1):
            own = slice(int(bounds[row]), int(bounds[row + 1]))
            page, slot = np.divmod(positions[own], slots.shape[1])
            slots[tables[row][page], slot] = ids[own]
        chosen = np.empty(len(inputs.logits_idx), np.int64)
        for i, token in enumerate(inputs.logits_idx.numpy().tolist()):
            row = int(np.searchsorted(bounds, token, side="right")) - 1
            chosen[i] = self.next_id(read(slots, tables[row], int(positions[token]) + 1))
        logits = np.tile(self._base, (len(chosen), 1))
        logits[np.arange(len(chosen)), chosen] = CHOSEN
        return ModelOutput(logits=torch.from_numpy(logits), hidden=torch.from_numpy(chosen[:, None]))

    def next_id(self, ids: list[int]) -> int:
        text = self._pieces.decode(ids)
        prompt, mark, said = text.rpartition(ANSWER)
        script = script_of(prompt) if mark else b""
        rest = script[len(said) :] if script.startswith(said) else b""
        return self._pieces.first(rest) if rest else self._pieces.eos_id


def read(slots: npt.NDArray[np.int64], pages: npt.NDArray[np.int32], length: int) -> list[int]:
    num_pages = -(-length // slots.shape[1])
    tokens: list[int] = slots[pages[:num_pages]].reshape(-1)[:length].tolist()
    return tokens


def script_of(prompt: bytes) -> bytes:
    turns = list(TURN.finditer(prompt))
    if not turns:
        return b""
    place = max((i for i, turn in enumerate(turns) if turn[1] != b"system"), default=-1)
    last, *behind = turns[place:]
    end = behind[0].start() if behind else len(prompt)
    content = prompt[last.end() : end].removesuffix(b" ")
    _, mark, wanted = content.partition(SAY)
    if mark:
        return wanted
    return b"The tool said: " + content if last[1] == b"tool" else b"Nothing to say."
