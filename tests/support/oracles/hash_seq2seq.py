"""Run HashSeq2Seq, HashLM with an encoder: the exact oracle for code that moves an encoder's pages.

    encoder     own[j] = mix(token_j, j)      all = sum of own[j] * weight(j) over the whole input
                kv0[j] = mix(all ^ own[j], j)      kv1[j] = mix(kv0[j], j)
    decoder     as HashLM, over the encoder's slots and its own, all read through the page table

So each encoder slot depends on every encoder token, and each decoder token depends on every slot. A prompt is the
encoder's tokens and one more token, which begins the decoder's text.
"""

from __future__ import annotations

import numpy as np
import torch

from shared.kernel.sampling.noise_numba import exact
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.model.encoder.t5 import encoder_rows
from shared.model.hashlm.layer import Ints, Words, arrays_of, layers_of, mix, odd_weight, run_layer, words_of
from shared.model.hashlm.model import HashLM
from shared.model.math.interface import ModelInputs, ModelOutput, ModelSpec

_u64 = np.uint64


@exact
def _encode(ids: Words, pages: Ints, lower: Words, upper: Words) -> None:
    """Encode one row's whole input from position 0; `lower` and `upper`: (num_pages, page_size)."""
    page_size, everything = lower.shape[1], _u64(0)
    for j in range(ids.shape[0]):
        everything += mix(ids[j], j) * odd_weight(j)
    for j in range(ids.shape[0]):
        page, slot = pages[j // page_size], j % page_size
        lower[page, slot] = mix(everything ^ mix(ids[j], j), j)
        upper[page, slot] = mix(lower[page, slot], j)


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
        """Return `hidden` (E, 1) int64. Raises ValueError if a step has only a part of an encoder's input."""
        assert inputs.layout.encoder_lens is not None and inputs.visible is None
        step, (first, second) = arrays_of(inputs), layers_of(kv)
        ids, begins = words_of(inputs.input_ids), step.begins.copy()
        for row, begin, length in encoder_rows(inputs):
            _encode(ids[begin : begin + length], step.page_table[row], first.words, second.words)
            begins[row] += length
        step = step._replace(begins=begins)
        upper = run_layer(step, run_layer(step, ids, first), second)
        wanted = upper[inputs.logits_idx.numpy()]
        hidden = torch.from_numpy(wanted.view(np.int64)[:, None])
        return ModelOutput(logits=self._logits.logits_of(wanted), hidden=hidden)
