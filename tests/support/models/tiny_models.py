"""Tiny random networks of transformers on disk, and rows of them over one pool: for tests of logits."""

from __future__ import annotations

import math
from pathlib import Path

import torch
import transformers

from shared.kernel.code.step_layout import Layout
from shared.kv.layout import page_windows
from shared.kv.pool import KVPool
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.model.math.interface import LayerMarks, Model, ModelInputs
from tests.support.cores.draft_trees import depths, visible_bits

VOCAB = 97


def save_random(network: transformers.PreTrainedModel, folder: Path) -> transformers.PreTrainedModel:
    """Random biases and norm weights too: the defaults (0 and 1) would hide a missing one."""
    torch.manual_seed(7)
    folder.mkdir(exist_ok=True)
    with torch.no_grad():
        for name, value in network.eval().named_parameters():
            value.copy_(torch.randn(value.shape) * (0.3 if is_vector(name) else 0.08))
            if "norm" in name and not isinstance(network, transformers.Gemma3ForCausalLM):
                value.add_(1.0)
    network.save_pretrained(folder)
    return network


def is_vector(name: str) -> bool:
    return name.endswith("bias") or "norm" in name


def load(folder: Path, kernels: str = "torch", dtype: str = "float32") -> Model:
    return load_model(str(folder), LoadOptions(dtype, kernels=kernels))


class Rows:
    """Several sequences over one pool, each with pages scattered over it."""

    def __init__(self, model: Model, num_rows: int, page_size: int, max_len: int = 64) -> None:
        self.model = model
        per_row = -(-max_len // page_size)
        planes = model.kv_planes(page_size)
        shape = (len(page_windows(planes)), num_rows, per_row)
        self.pool = KVPool(planes, 1 + math.prod(shape), page_size)
        for plane in self.pool.planes:  # what is read must have been written
            if plane.dtype.is_floating_point:
                self.pool.plane(plane.name).fill_(float("nan"))
        order = torch.randperm(math.prod(shape), generator=torch.Generator().manual_seed(1)) + 1
        self.tables = order.to(torch.int32).view(shape).unbind()  # of each page group
        self.lens = [0] * num_rows
        self.aux: torch.Tensor | None = None  # of the last step

    @property
    def table(self) -> torch.Tensor:
        (table,) = self.tables
        return table

    def step(
        self,
        chunks: dict[int, list[int]],
        wanted: list[int] | None = None,
        adapters: dict[int, int] | None = None,
        layers: LayerMarks | None = None,
        encoder_lens: list[int] | None = None,
        parents: list[int] | None = None,
    ) -> torch.Tensor:
        """Appends chunks[row] to each row; logits of all tokens, or of those at `wanted`. `adapters`: slots by row.
        `parents`: the only chunk is a draft tree."""
        rows, ids = list(chunks), [i for chunk in chunks.values() for i in chunk]
        q_lens = torch.tensor([len(chunk) for chunk in chunks.values()])
        positions = [self.lens[row] + n for row in rows for n in range(len(chunks[row]))]
        for row in rows:
            self.lens[row] += len(chunks[row])
        slots = visible = None
        if parents is not None:
            slots, visible = torch.tensor(positions), visible_bits(parents)
            positions = [positions[0] + depth for depth in depths(parents)]
        inputs = ModelInputs(
            input_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            layout=Layout(
                cu_q_lens=torch.cat((torch.zeros(1, dtype=torch.long), q_lens.cumsum(0))).to(torch.int32),
                page_tables=tuple(table[rows] for table in self.tables),
                max_q_len=int(q_lens.max()),
                max_seq_len=max(self.lens[row] for row in rows),
                encoder_lens=None if encoder_lens is None else torch.tensor(encoder_lens),
            ),
            logits_idx=torch.arange(len(ids)) if wanted is None else torch.tensor(wanted, dtype=torch.long),
            adapters=self._slots(adapters or {}, chunks),
            layers=layers,
            slots=slots,
            visible=visible,
        )
        with torch.inference_mode():
            output = self.model.forward(inputs, self.pool)
        self.aux = output.aux
        return output.logits

    @staticmethod
    def _slots(adapters: dict[int, int], chunks: dict[int, list[int]]) -> torch.Tensor | None:
        slots = [adapters.get(row, 0) for row, chunk in chunks.items() for _ in chunk]
        return torch.tensor(slots) if any(slots) else None


def prompt(length: int, seed: int = 0) -> list[int]:
    return torch.randint(0, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def reference(network: transformers.PreTrainedModel, ids: list[int]) -> torch.Tensor:
    with torch.inference_mode():
        return network(torch.tensor([ids])).logits[0]
