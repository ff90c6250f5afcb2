"""HashSeq2Seq: HashLM with an encoder, the exact oracle of what moves its pages.

    encoder     own[j] = mix(token_j, j)      all = sum of own[j] * weight(j) over the whole input
                kv0[j] = mix(all ^ own[j], j)      kv1[j] = mix(kv0[j], j)
    decoder     as HashLM, over these and its own: every step reads the encoder's slots through the page table too

So each encoder slot depends on every encoder token, and a decoder token on every slot. A prompt is the encoder's tokens
and one more, which begins the decoder's text. Knows nothing of scheduling.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch

from shared.kernel.noise import exact
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.model.encoder_rows import encoder_rows
from shared.model.hashlm.model import HashLM, forward_row, mix, odd_weight
from shared.model.interface import ModelInputs, ModelOutput, ModelSpec

_u64 = np.uint64


@exact
def _encode(
    ids: npt.NDArray[np.int64], pages: npt.NDArray[np.int32], kv: npt.NDArray[np.uint64], num_tokens: int
) -> None:
    """The whole encoder input of one row: ids[:num_tokens] at positions 0 .. num_tokens - 1."""
    page_size, everything = kv.shape[2], _u64(0)
    for j in range(num_tokens):
        everything += mix(_u64(ids[j]), j) * odd_weight(j)
    for j in range(num_tokens):
        page, slot = pages[j // page_size], j % page_size
        kv[page, 0, slot] = mix(everything ^ mix(_u64(ids[j]), j), j)
        kv[page, 1, slot] = mix(kv[page, 0, slot], j)


@exact
def _forward(
    ids: npt.NDArray[np.int64],
    positions: npt.NDArray[np.int64],
    encoder_lens: npt.NDArray[np.int64],
    cu_q_lens: npt.NDArray[np.int32],
    page_table: npt.NDArray[np.int32],
    kv: npt.NDArray[np.uint64],
    states: npt.NDArray[np.uint64],
) -> None:
    for row in range(cu_q_lens.shape[0] - 1):
        begin, end, pages = cu_q_lens[row], cu_q_lens[row + 1], page_table[row]
        if begin < end and positions[begin] < encoder_lens[row]:
            length = encoder_lens[row]
            _encode(ids[begin:end], pages, kv, length)
            begin += length
        forward_row(ids[begin:end], positions[begin:end], pages, kv, states[begin:end])


class HashSeq2Seq:
    """A Model with an encoder; CPU only."""

    def __init__(self, max_context: int = 4096) -> None:
        self._logits = HashLM(max_context=max_context)
        spec = self._logits.spec
        self.spec = ModelSpec(
            "hash-seq2seq", spec.vocab_size, max_context, spec.dtype, "hash-seq2seq-1", spec.eos_ids, has_encoder=True
        )

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]:
        return self._logits.kv_planes(page_size)

    def forward(self, inputs: ModelInputs, kv: KVPool) -> ModelOutput:
        """hidden: (E, 1) int64. Raises where only a part of an encoder's input has come."""
        assert inputs.encoder_lens is not None and inputs.visible is None
        encoder_rows(inputs)
        states = np.zeros((len(inputs.positions), 2), dtype=np.uint64)
        _forward(
            inputs.input_ids.contiguous().numpy(),
            inputs.positions.contiguous().numpy(),
            inputs.encoder_lens.contiguous().numpy(),
            inputs.cu_q_lens.contiguous().numpy(),
            inputs.page_table.contiguous().numpy(),
            kv.plane("kv").numpy().view(np.uint64),
            states,
        )
        wanted = np.ascontiguousarray(states[inputs.logits_idx.numpy(), 1])
        hidden = torch.from_numpy(wanted.view(np.int64)[:, None])
        return ModelOutput(logits=self._logits.logits_of(wanted), hidden=hidden)
