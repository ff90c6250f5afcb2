"""Starts the clusters that clients meet. Writes the first one's tokenizer for clients that count tokens themselves.

The first serves a real model. The second serves `scripted`, which says what a message tells it to: loops of agents come
to an end that is known.
"""

from __future__ import annotations

import contextlib
import json
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from router.text.gguf_tokenizer import build_tokenizer, read_metadata
from shared.config.models.model_path import bundled_gguf
from shared.config.models.shipped_model import with_system
from tests.support.clusters.cluster import baton_up

MODEL = "smollm2"
# float32: a greedy answer is always the same. The short context bounds an answer of no given length.
FLAGS = ("--model", MODEL, "--dtype", "float32", "--kv-bytes", "256MiB", "--max-context", "1024")
TOOLS = ("--tool-format", "hermes")  # scripted has no template: its texts call tools in this format
SCRIPTED = "scripted"
SCRIPTED_FLAGS = ("--model", SCRIPTED, "--max-context", "65536")  # agents' prompts are long


@dataclass(frozen=True, slots=True)
class Served:
    """`folder`: gone with the clusters; each client gets a folder in it."""

    url: str
    tokenizer: Path
    folder: Path
    model: str = MODEL
    scripted_url: str = ""
    scripted_model: str = SCRIPTED


@contextlib.contextmanager
def served() -> Iterator[Served]:
    with tempfile.TemporaryDirectory(prefix="baton-clients-") as name:
        folder = Path(name)
        with (
            baton_up(folder / "up.log", *FLAGS) as cluster,
            baton_up(folder / "scripted.log", *SCRIPTED_FLAGS, *TOOLS) as scripted,
        ):
            tokenizer = write_tokenizer(folder / "tokenizer")
            yield Served(cluster.url, tokenizer, folder, scripted_url=scripted.url)


def write_tokenizer(folder: Path) -> Path:
    """Write what `transformers.AutoTokenizer` reads."""
    metadata = read_metadata(bundled_gguf())
    tokens = metadata["tokenizer.ggml.tokens"]
    facts = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[metadata["tokenizer.ggml.bos_token_id"]],
        "eos_token": tokens[metadata["tokenizer.ggml.eos_token_id"]],
        "chat_template": with_system(metadata["tokenizer.chat_template"]),
    }
    folder.mkdir()
    build_tokenizer(metadata).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))
    return folder
