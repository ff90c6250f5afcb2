"""What earlier runs have left in bench-out, and of which sources: figures of others count for nothing."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from benchmarks.run import OUT, ROOT

PACKAGES = ("shared", "router", "prefill_node", "decode_node", "deploy")
MODEL_SOURCES = ("shared",)  # what a perplexity depends on
PERPLEXITY = ROOT / OUT / "perplexity.json"


def code_digest(folders: tuple[str, ...]) -> str:
    digest = hashlib.sha256()
    for file in sorted(file for folder in folders for file in (ROOT / folder).rglob("*.py")):
        digest.update(file.relative_to(ROOT).as_posix().encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:12]


def formats_near_enough(path: Path = PERPLEXITY) -> frozenset[str] | None:
    """Baton's formats whose perplexity is near enough to the peer's. None: benchmarks.engine.perplexity has not been
    run on these sources."""
    found = json.loads(path.read_text()) if path.exists() else {"about": {}}
    if found["about"].get("code") != code_digest(MODEL_SOURCES):
        return None
    return frozenset(found["near_enough"])
