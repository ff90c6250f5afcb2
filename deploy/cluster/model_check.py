"""Ask a process with torch, before anything starts, whether nodes would refuse the model's folder."""

from __future__ import annotations

import json
import os

from shared.config.flags import to_argv
from shared.config.models.model_folder import read_folder
from shared.config.models.model_path import ModelKind, resolve_model
from shared.config.processes import NodeParts, NodeProcessConfig
from shared.core import launcher
from shared.core.errors import ConfigError
from shared.core.short_process import NoEnd, run_short

CHECK = "shared.node.assembly.model_check"
CHECK_TIMEOUT_S = 120.0


def check_folder(parts: NodeParts) -> None:
    """Raise ConfigError with the reason. If the process gives no answer, nodes will say it."""
    source = resolve_model(parts.model.model)
    if source.kind is not ModelKind.HF_FOLDER or source.path is None or read_folder(source.path).has_encoder:
        return
    if not (source.path / "tokenizer.json").is_file() and (source.path / "tiktoken.model").is_file():
        from shared.config.models.tiktoken_file import own_code  # imports tokenizers

        own_code(read_folder(source.path))
    flags = to_argv(NodeProcessConfig(parts), frozenset({"role"}))
    try:
        done = run_short(launcher.command(CHECK, str(os.getpid()), *flags), CHECK_TIMEOUT_S)
        reason = json.loads(done.stdout.strip().rpartition("\n")[2])["refused"]
    except (NoEnd, OSError, ValueError, LookupError):
        return
    if reason:
        raise ConfigError(reason)
