"""Keep a model's weights in a packed file.

The key has everything that could change a bit:

- model files, dtype, format and processor
- code of this package and the kernels
- versions of libraries that read and convert
"""

from __future__ import annotations

import functools
import importlib.metadata
import json
import logging
import warnings
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import torch
import xxhash

from shared.kernel.product.block_weights import BlockFormat
from shared.kernel.product.linear import Linear
from shared.kernel.product.packed import Packed, processor
from shared.model.formats.opened import CPU, OpenedModel
from shared.model.formats.packed_file import MappedFile, PackedWriter
from shared.model.formats.packed_folder import PackedKey, PackedRefused
from shared.model.math.kernels import Kernels, Packing
from shared.model.math.progress import with_progress
from shared.model.math.weights import HEAD, IN_BLOCKS, products_of, read_product

_log = logging.getLogger(__name__)
EMBED = "embed"
CODE = tuple(Path(__file__).parents[2] / folder for folder in ("kernel", "model"))
NO_PACKING = {"library", "hashlm"}  # rooms whose models pack nothing
LIBRARIES = ("gguf", "numpy", "safetensors", "torch")


class MappedWeights:
    """A PackedWeights whose tensors are views of the file. A write to such a tensor kills the process."""

    def __init__(self, file: MappedFile, packing: Packing) -> None:
        self._file, self._packing = file, packing
        self.embed = self._tensor(EMBED)

    def product(self, name: str) -> Packed | None:
        entry = self._file.entries.get(f"{name}.weight")
        if entry is None:
            return None
        note = json.loads(entry.note)
        form = None if note["form"] is None else BlockFormat(**note["form"])
        scale = self._tensor(f"{name}.scale") if f"{name}.scale" in self._file.entries else None
        tensors = self._tensor(f"{name}.weight"), self._tensor(f"{name}.bias"), scale
        return Packed(tuple(note["shape"]), getattr(torch, note["dtype"]), *tensors, form)

    def unpack(self, packed: Packed, is_head: bool) -> Linear:
        return self._packing.unpack(packed, is_head)

    def _tensor(self, name: str) -> torch.Tensor:
        entry = self._file.entries[name]
        dtype: torch.dtype = getattr(torch, entry.dtype)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The given buffer is not writable")  # intended
            flat = torch.frombuffer(
                self._file.data, dtype=dtype, count=entry.num_bytes // dtype.itemsize, offset=entry.offset
            )
        return flat.view(entry.shape)


def map_weights(opened: OpenedModel, kernels: Kernels, weights_hash: str) -> MappedWeights | None:
    """Map the model's packed weights. If they are missing, make them first.

    Return None if the weights can't be packed or kept. `weights_hash`: as in ModelSpec.
    """
    folder, packing = opened.options.packed, kernels.packing
    if folder is None or packing is None:
        return None
    if opened.options.formats.weights not in IN_BLOCKS and not packing.packs_numbers:
        return None
    key, need = key_of(opened, weights_hash), opened.weights_bytes(opened.source.config)
    file = folder.take_file(key, need, lambda writer: write_weights(writer, opened, packing, key))
    return None if file is None else MappedWeights(file, packing)


def key_of(opened: OpenedModel, weights_hash: str) -> PackedKey:
    about = {
        "model": opened.source.config.name,
        "content": weights_hash,
        "dtype": opened.options.dtype,
        "weights": opened.options.formats.weights,
        "processor": xxhash.xxh3_64_hexdigest(processor().encode()),
    }
    return PackedKey(about, code_digest())


@functools.cache
def code_digest() -> str:
    digest = xxhash.xxh3_128()
    for folder in CODE:
        for path in sorted(folder.rglob("*.py")):
            if path.parent.name not in NO_PACKING:
                digest.update(path.read_bytes())
    for name in LIBRARIES:
        digest.update(f"{name} {importlib.metadata.version(name)}\n".encode())
    return digest.hexdigest()


code_digest()  # computed at import, because source files that change later are not the code that runs


def write_weights(writer: PackedWriter, opened: OpenedModel, packing: Packing, key: PackedKey) -> None:
    """Write the products one by one, so that memory holds only one at a time. Raises PackedRefused if the model's files
    change."""
    source, dtype, form = opened.source, opened.dtype, opened.options.formats.weights
    for product in with_progress(products_of(source.config), _log, "packing weights, once for this machine"):
        weight, bias = read_product(source, product, dtype, CPU, form)
        packed = packing.pack(weight, bias, product.name == HEAD)
        if packed is not None:
            add_product(writer, product.name, packed)
    add_tensor(writer, EMBED, source.tensor(EMBED).to(dtype))
    if opened.spec().weights_hash != key.about["content"]:
        raise PackedRefused("the model's files have changed while they were read")


def add_product(writer: PackedWriter, name: str, packed: Packed) -> None:
    form = None if packed.form is None else asdict(packed.form)
    note: Mapping[str, object] = {"shape": packed.shape, "dtype": _name_of(packed.dtype), "form": form}
    add_tensor(writer, f"{name}.weight", packed.weight, json.dumps(note))
    add_tensor(writer, f"{name}.bias", packed.bias)
    if packed.scale is not None:
        add_tensor(writer, f"{name}.scale", packed.scale)


def add_tensor(writer: PackedWriter, name: str, tensor: torch.Tensor, note: str = "") -> None:
    data = tensor.contiguous().view(-1).view(torch.uint8).numpy().data
    writer.add_tensor(name, data, _name_of(tensor.dtype), tuple(tensor.shape), note)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
