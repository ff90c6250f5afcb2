"""The default model's file in the formats that peers read: llama.cpp's own ones, and a Hugging Face folder."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

from benchmarks.peers.environments import PEERS
from shared.config.models.model_path import bundled_gguf

AS_SHIPPED = "Q4_1"
REQUANTISED = ("Q4_0", "Q8_0", "BF16")


def gguf_files(programs: Path) -> dict[str, Path]:
    """By format, made where missing. `programs`: the folder of llama-quantize."""
    shipped, folder = bundled_gguf(), PEERS / "weights"
    folder.mkdir(parents=True, exist_ok=True)
    files = {AS_SHIPPED: shipped}
    for name in REQUANTISED:
        files[name] = folder / f"{shipped.stem}.{name}.gguf"
        if not files[name].exists():
            made = files[name].with_suffix(".new")
            command = [str(programs / "llama-quantize"), "--allow-requantize", str(shipped), str(made), name]
            subprocess.run([*command, str(os.cpu_count())], check=True, capture_output=True)
            made.rename(files[name])
    return files


def hf_folder() -> Path:
    """The same weights dequantised to bfloat16, with tokenizer: what vLLM reads."""
    folder = PEERS / "weights" / "bfloat16"
    if folder.exists():
        return folder
    # Here, for it loads torch and transformers, which the process that measures can do without.
    import torch

    from shared.model.formats.opened import open_model
    from tests.clients.served import write_tokenizer
    from tests.support.models.transformers_model import reference_network

    made = folder.with_suffix(".new")
    shutil.rmtree(made, ignore_errors=True)
    made.parent.mkdir(parents=True, exist_ok=True)
    write_tokenizer(made)
    reference_network(open_model(bundled_gguf()), torch.bfloat16).save_pretrained(made)
    made.rename(folder)
    return folder
