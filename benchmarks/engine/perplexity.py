"""How well each weight format still knows the model's language: perplexity of Baton and of llama.cpp over one text.

    python -m benchmarks.engine.perplexity [--windows 100] [--only bfloat16 file] [--threads 1]

The text is the documentation inside networkx's own functions, as pinned in constraints.txt. Both read the same windows
of 512 token ids and score the same ids: those of the second half of a window, each behind all ids before it. A format
is near enough when its perplexity is at most 0.3 % above llama.cpp's for the same file. What is found stays in
bench-out/perplexity.json; a format that stands there is not measured again, unless the sources have changed.
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import importlib.metadata
import importlib.util
import json
import math
import re
import sys
import tempfile
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from benchmarks.engine_model import PagedRows
from benchmarks.peers.engines import BATON_FORMATS, run
from benchmarks.peers.environments import llama_cpp
from benchmarks.peers.kept import MODEL_SOURCES, PERPLEXITY, code_digest
from benchmarks.peers.weights import AS_SHIPPED, gguf_files
from benchmarks.run import num_cores
from router.text.gguf_tokenizer import read_metadata
from router.text.load import load_text_model
from shared.config.models.model_path import bundled_gguf
from shared.model.formats.opened import LoadOptions
from shared.model.loading.load import load_model
from shared.model.math.interface import Model
from shared.model.math.kernels import Formats

PACKAGE, VERSION = "networkx", "3.6.1"
CHARACTERS = 400_000  # about 120,000 tokens
TEXT_DIGEST = "04d7893484acdbf6"
WINDOW = 512  # tokens
FIRST_SCORED = WINDOW // 2 + 1  # llama-perplexity's rule: half a window is there to be read
MOST_ABOVE = 1.003  # times the peer's
PEER = "llama.cpp "
ESTIMATE = re.compile(r"Final estimate: PPL = ([0-9.]+)")


def stated_text() -> str:
    """The first of the package's docstrings, by path. SystemExit where it is another text than the one meant."""
    found = importlib.util.find_spec(PACKAGE)
    if found is None or found.origin is None:
        raise SystemExit(f"the text is read from {PACKAGE} {VERSION}, which is not installed")
    text = "\n\n".join(docstrings(Path(found.origin).parent))[:CHARACTERS].strip()
    if digest_of(text) != TEXT_DIGEST:
        there = importlib.metadata.version(PACKAGE)
        raise SystemExit(f"the text has changed (it is meant to be that of {PACKAGE} {VERSION}; {there} is installed)")
    return text


def docstrings(folder: Path) -> Iterator[str]:
    for file in sorted(folder.rglob("*.py"), key=lambda file: file.relative_to(folder).as_posix()):
        if "tests" in file.parts:
            continue
        for node in ast.walk(ast.parse(file.read_text("utf-8"))):
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
                first, _, rest = (ast.get_docstring(node, clean=False) or "").strip().partition("\n")
                if first:
                    yield f"{first}\n{textwrap.dedent(rest)}".rstrip()


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def windows_of(ids: Sequence[int], count: int, begin_id: int | None) -> torch.Tensor:
    """(windows, WINDOW) int64. Where the model wants a begin token, it stands in place of each window's first id."""
    count = min(count, len(ids) // WINDOW)
    windows = torch.tensor(ids[: count * WINDOW], dtype=torch.int64).view(count, WINDOW)
    if begin_id is not None:
        windows[:, 0] = begin_id
    return windows


def perplexity(model: Model, windows: torch.Tensor) -> float:
    """exp of the mean negative log-likelihood of each window's ids from FIRST_SCORED on."""
    total = 0.0
    for ids in windows:
        logits = PagedRows(model, 1, WINDOW).append(ids[None], every=True)
        total += negative_log_likelihood(logits, ids)
    return math.exp(total / (len(windows) * (WINDOW - FIRST_SCORED)))


def negative_log_likelihood(logits: torch.Tensor, ids: torch.Tensor) -> float:
    """Of ids[FIRST_SCORED:], summed. logits (WINDOW, vocab) float: row i is about what follows ids[i]; ids (WINDOW,)"""
    rows = torch.log_softmax(logits[FIRST_SCORED - 1 : -1].double(), dim=-1)
    return -float(rows.gather(1, ids[FIRST_SCORED:, None]).sum())


@dataclass(frozen=True, slots=True)
class Peer:
    """llama.cpp's programs, and a file with the text."""

    programs: Path
    text: Path
    threads: int

    def ids(self, file: Path) -> list[int]:
        command = self.command("llama-tokenize", file)
        return list(json.loads(run([*command, "--ids", "--no-bos", "--no-parse-special", "--log-disable"]).stdout))

    def command(self, program: str, file: Path) -> list[str]:
        """A backslash is a backslash, as in Baton."""
        return [str(self.programs / program), "--model", str(file), "--file", str(self.text), "--no-escape"]

    def perplexity(self, file: Path, windows: int) -> float:
        command = [*self.command("llama-perplexity", file), "--ctx-size", str(WINDOW), "--chunks", str(windows)]
        threads = str(self.threads)
        said = run([*command, "--threads", threads, "--threads-batch", threads]).stderr
        found = ESTIMATE.search(said)
        if found is None:
            raise RuntimeError(f"llama-perplexity gave no estimate: {said[-1000:]}")
        return float(found[1])


class Found:
    """The perplexities so far, in a file, with what they are of."""

    def __init__(self, path: Path, about: dict[str, Any]) -> None:
        self.path = path
        known = json.loads(path.read_text()) if path.exists() else {}
        self.values: dict[str, float] = known.get("perplexity", {}) if known.get("about") == about else {}
        self.about = about

    def add(self, name: str, value: float) -> None:
        self.values[name] = value
        self.path.parent.mkdir(exist_ok=True)
        content = {"about": self.about, "perplexity": self.values, "near_enough": self.near_enough()}
        self.path.write_text(json.dumps(content, indent=1))

    def near_enough(self) -> list[str]:
        """Baton's formats."""
        return [name for name in BATON_FORMATS if name in self.values and self.is_near(name)]

    def is_near(self, name: str) -> bool:
        return self.values[name] <= MOST_ABOVE * self.values[peer_name(AS_SHIPPED)]


def peer_name(file_format: str) -> str:
    return PEER + file_format


def check_ids(ours: Sequence[int], theirs: Sequence[int]) -> None:
    """SystemExit unless both read the same text as the same ids."""
    if list(ours) != list(theirs):
        first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), "the shorter one's end")
        raise SystemExit(f"llama.cpp reads other token ids ({len(theirs)} of them, ours {len(ours)}): from {first} on")


def begin_id() -> int | None:
    metadata = read_metadata(bundled_gguf())
    wants = metadata.get("tokenizer.ggml.add_bos_token", False)
    return int(metadata["tokenizer.ggml.bos_token_id"]) if wants else None


def show(found: Found, console: Console) -> None:
    base = found.values[peer_name(AS_SHIPPED)]
    table = Table("format", "perplexity", "beside llama.cpp's for the file", "at most 0.3 % above")
    for name, value in found.values.items():
        is_near = "yes" if found.is_near(name) else "no"
        table.add_row(name, f"{value:.4f}", f"{100 * (value / base - 1):+.3f} %", is_near)
    console.print(table)


def measure(found: Found, peer: Peer, windows: torch.Tensor, names: Sequence[str], console: Console) -> None:
    """Whatever is not there yet: the peer's for the file as it is shipped, Baton's formats, the peer's other files."""
    files = gguf_files(peer.programs)
    for name in (peer_name(AS_SHIPPED), *names, *map(peer_name, files)):
        if name not in found.values:
            if name.startswith(PEER):
                found.add(name, peer.perplexity(files[name.removeprefix(PEER)], len(windows)))
            else:
                found.add(name, perplexity(load(name, peer.threads), windows))
            console.print(f"{name}: {found.values[name]:.4f}")


def load(name: str, threads: int) -> Model:
    chosen = BATON_FORMATS[name]
    formats = Formats(chosen.kv, chosen.weights)
    return load_model("smollm2", LoadOptions(chosen.dtype, threads=threads, formats=formats))


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--windows", type=int, default=100)
    parser.add_argument("--threads", type=int, default=num_cores(), help="fewer beside other work; changes no figure")
    parser.add_argument("--only", nargs="*", choices=list(BATON_FORMATS), help="of Baton's formats")
    parser.add_argument("--json", type=Path, default=PERPLEXITY)
    args = parser.parse_args(argv)
    console, text = Console(width=110), stated_text()
    torch.set_num_threads(args.threads)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "text.txt"
        file.write_text(text, encoding="utf-8")
        peer = Peer(llama_cpp(), file, args.threads)
        ids = load_text_model("smollm2").tokenizer.encode(text, add_special=False)
        check_ids(ids, peer.ids(bundled_gguf()))
        windows = windows_of(ids, args.windows, begin_id())
        scored = len(windows) * (WINDOW - FIRST_SCORED)
        console.print(f"{PACKAGE} {VERSION}, sha256 {TEXT_DIGEST}: {windows.numel():,} tokens, {scored:,} scored")
        console.print(f"token ids agree over the whole text ({len(ids):,})")
        about = {"text": TEXT_DIGEST, "windows": len(windows), "code": code_digest(MODEL_SOURCES)}
        found = Found(args.json, about)
        with torch.inference_mode():
            measure(found, peer, windows, args.only or list(BATON_FORMATS), console)
    show(found, console)
    return 0


if __name__ == "__main__":
    sys.exit(main())
