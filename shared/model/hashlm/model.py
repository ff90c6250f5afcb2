"""Run HashLM, a language model over integers: the exact oracle for code that moves tokens, rows and pages.

    kv0[j] = mix(token_j, j)      s[j] = sum over i <= j of kv0[i] * weight(i)
    kv1[j] = mix(s[j], j)         h[j] = sum over i <= j of kv1[i] * weight(i)      logits[j] = hash(h[j], token id)

Every step reads its whole context through the page table. A foreign page changes the logits, because kv1 depends on all
earlier positions. Swapped pages change them, too, because a value is weighted by the position at which it is READ (in a
draft tree, the text position). With a window w a sum is over i > j - w only. Layers with unlike windows are in two page
groups.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import xxhash

from shared.core.page_identity import LONG
from shared.kernel.sampling.noise_numba import exact
from shared.kv.layout import PlaneSpec
from shared.kv.pool import KVPool
from shared.model.hashlm.layer import STATE, STATE_WINDOW, Words, arrays_of, layers_of, mix, run_layer, words_of
from shared.model.math.adapter_bank import AdapterBank, ReadAdapter
from shared.model.math.interface import AdapterSpec, ModelInputs, ModelOutput, ModelSpec, path_digest

VOCAB_SIZE = 96  # ids 0..94 are chr(32 + id); the last is EOS
DEFAULT_CONTEXT = 4096  # freely chosen: positions have no limit
LOGIT_BITS = 23
EOS_DRAWS = 4  # EOS gets the best of 4 draws, so 3 to 4 % of tokens are EOS
COMMON_DRAWS = 2
COMMON_EVERY = 8  # every 8th id gets the better of 2 draws, so some ids are frequent
LOGIT_SCALE = 2.0**-19  # makes logits in [-8, 8), exact in float32 and unique per id

_u64 = np.uint64


@exact
def write_logits(state: np.uint64, eos_id: int, id_bits: int, out: npt.NDArray[np.float32]) -> None:
    """Write one position's logits: high bits from a hash, and the id as low bits, so that no two ids tie."""
    for token_id in range(out.shape[0]):
        draws = mix(state, token_id)
        best = draws & _u64(0xFFFF)
        num_draws = EOS_DRAWS if token_id == eos_id else (COMMON_DRAWS if token_id % COMMON_EVERY == 0 else 1)
        for k in range(1, num_draws):
            best = max(best, (draws >> _u64(16 * k)) & _u64(0xFFFF))
        value = ((best >> _u64(16 + id_bits - LOGIT_BITS)) << _u64(id_bits)) | _u64(token_id)
        out[token_id] = np.float32((np.int64(value) - (1 << (LOGIT_BITS - 1))) * LOGIT_SCALE)


@exact
def write_all_logits(states: npt.NDArray[np.uint64], eos_id: int, id_bits: int, out: npt.NDArray[np.float32]) -> None:
    for e in range(states.shape[0]):
        write_logits(states[e], eos_id, id_bits, out[e])


def adapter_salt(digest: str) -> int:
    """Return a number above every token id, or 0 without an adapter."""
    return (xxhash.xxh3_64_intdigest(digest.encode()) >> 2) & ~0xFFFFFFFF if digest else 0


class HashLM:
    """A Model on the CPU, on the forward stream, without the GIL. With a window it can't verify draft trees.

    `window`: how many tokens both layers read, the newest included; 0: all. `lower_window`: of the lower layer only,
    which with STATE is a recurrence (docs/adr/0012-states.md). `short_context`: of the ModelSpec.
    """

    def __init__(
        self,
        vocab_size: int = VOCAB_SIZE,
        max_context: int = 0,  # 0: DEFAULT_CONTEXT
        window: int = 0,
        lower_window: int | None = None,  # None: the same as `window`
        adapters: tuple[AdapterSpec, ...] = (),
        num_spare: int = 0,  # see AdapterBank, which a HashLM is itself
        short_context: int = 0,
    ) -> None:
        if not 2 <= vocab_size <= 4096:
            raise ValueError(f"vocab_size {vocab_size} is not in 2..4096: the logits would tie")
        self.windows = window if lower_window is None else lower_window, window
        name = "-".join(map(str, dict.fromkeys(self.windows)))
        self.id_bits = max(7, (vocab_size - 1).bit_length())
        self.spec = ModelSpec(
            name="hashlm",
            vocab_size=vocab_size,
            max_context=max_context or DEFAULT_CONTEXT,
            dtype="int",
            weights_hash=f"hashlm-1-{vocab_size}" + (f"-window-{name}" if any(self.windows) else ""),
            eos_ids=(vocab_size - 1,),
            adapters=adapters,
            short_context=short_context,
        )
        salts = [adapter_salt(LONG)] if short_context else [adapter_salt(adapter.digest) for adapter in adapters]
        self._salts = torch.tensor([0, *salts, *[0] * num_spare])
        self.num_spare = num_spare

    @property
    def bank(self) -> AdapterBank:
        return self

    def read(self, folder: Path) -> ReadAdapter:
        """As at the start, no file is read."""
        return ReadAdapter(path_digest(str(folder)), None)

    def put(self, slot: int, adapter: ReadAdapter) -> None:
        self._salts[slot] = adapter_salt(adapter.digest)

    def clear(self, slot: int) -> None:
        self._salts[slot] = 0

    def kv_planes(self, page_size: int) -> tuple[PlaneSpec, ...]:
        windows = tuple(dict.fromkeys(STATE_WINDOW if window == STATE else window for window in self.windows))
        return (PlaneSpec("kv", (2 // len(windows), page_size), torch.int64, slot_dim=-1, windows=windows),)

    def forward(self, inputs: ModelInputs, kv: KVPool) -> ModelOutput:
        """Return `hidden` (E, 1) int64, the states h, and `aux` (T, 3) int64: s, h, position."""
        first, second = layers_of(kv)
        lower = run_layer(arrays_of(inputs), words_of(self.salted(inputs)), first, self.windows[0])
        return self.output(inputs, lower, run_layer(arrays_of(inputs, group=-1), lower, second, self.windows[1]))

    def output(self, inputs: ModelInputs, lower: Words, upper: Words) -> ModelOutput:
        wanted = upper[inputs.logits_idx.numpy()]
        aux = np.empty((len(upper), 3), np.int64)
        aux[:, 0], aux[:, 1], aux[:, 2] = lower.view(np.int64), upper.view(np.int64), inputs.positions.numpy()
        return ModelOutput(
            logits=self.logits_of(wanted),
            hidden=torch.from_numpy(wanted.view(np.int64)[:, None]),
            aux=torch.from_numpy(aux),
        )

    def salted(self, inputs: ModelInputs) -> torch.Tensor:
        """Return (T,) int64: each token id plus its adapter's salt."""
        return inputs.input_ids if inputs.adapters is None else inputs.input_ids + self._salts[inputs.adapters]

    def logits_of(self, states: npt.NDArray[np.uint64]) -> torch.Tensor:
        """Turn (E,) states into (E, vocab) float32."""
        logits = np.empty((len(states), self.spec.vocab_size), dtype=np.float32)
        write_all_logits(states, self.spec.eos_ids[0], self.id_bits, logits)
        return torch.from_numpy(logits)
