"""Answer requests to paths that don't exist: which paths there are, and which known APIs are not served."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches

from router.api.ollama.ollama_models import check_served
from router.http.connection import Connection
from router.http.errors import NotFound

MAX_SHOWN = 100
TEXT_ONLY = "this server only writes text"
NOT_STORED = "this server stores no answers and no files"
AS_FILES = "; `baton generate` answers files of requests"
# the part of a path after its version -> what it would be, and why it is not served
NOT_SERVED = {
    "embeddings": ("embeddings", TEXT_ONLY),
    "embed": ("embeddings", TEXT_ONLY),
    "rerank": ("reranking", TEXT_ONLY),
    "score": ("scoring pairs of texts", TEXT_ONLY),
    "pooling": ("pooling", TEXT_ONLY),
    "classify": ("classification", TEXT_ONLY),
    "moderations": ("moderation", TEXT_ONLY),
    "audio": ("audio", TEXT_ONLY),
    "images": ("images", TEXT_ONLY),
    "videos": ("videos", TEXT_ONLY),
    "realtime": ("the realtime API", TEXT_ONLY),
    "files": ("files", NOT_STORED),
    "uploads": ("files", NOT_STORED),
    "vector_stores": ("vector stores", NOT_STORED),
    "assistants": ("assistants", NOT_STORED),
    "threads": ("threads", NOT_STORED),
    "conversations": ("stored conversations", NOT_STORED),
    "responses": ("stored responses", NOT_STORED),
    "fine_tuning": ("fine-tuning", "this server does not train"),
    "batches": ("batches", NOT_STORED + AS_FILES),
    "messages/batches": ("batches", NOT_STORED + AS_FILES),
    "complete": ("Anthropic's text completions", "ask /v1/messages or /v1/completions"),
}
VERSIONS = ("v1", "v2")


class MissingPaths:
    """`served`: the paths that clients of the API use."""

    def __init__(self, served: Iterable[str]) -> None:
        self._served = tuple(served)

    async def handle(self, connection: Connection) -> None:
        path = connection.scope["path"][:MAX_SHOWN]
        check_served(path)
        known = not_served(path)
        if known is not None:
            raise NotFound(f"{known[0]}: not served here; {known[1]}")
        raise NotFound(f"there is nothing at {path!r}; {self._instead(path)}")

    def _instead(self, path: str) -> str:
        close = get_close_matches(path, self._served, 1)
        return f"did you mean {close[0]}?" if close else f"the API is at {', '.join(self._served)}"


def not_served(path: str) -> tuple[str, str] | None:
    """Return what the path would be and why it is not served; None for unknown paths."""
    parts = [part for part in path.split("/") if part]
    if parts and parts[0] in VERSIONS:
        parts = parts[1:]
    return NOT_SERVED.get("/".join(parts[:2])) or NOT_SERVED.get(parts[0] if parts else "")
