"""Find the chat templates and special tokens of a Hugging Face model folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from router.text.chat.chat_template import DEFAULT, TOKEN_NAMES
from shared.config.models.json_file import read_json_if_there
from shared.config.models.tokenizer_file import token_content
from shared.core.errors import ConfigError


def template_sources(folder: Path, own: Mapping[str, Any]) -> dict[str, str]:
    """Return templates by name. Template files take precedence over `own`, the contents of tokenizer_config.json."""
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files[DEFAULT] = folder / "chat_template.jinja"
    return {name: _read(path) for name, path in files.items()} or _described(own.get("chat_template"))


def template_tokens(folder: Path, own: Mapping[str, Any]) -> dict[str, str]:
    """Return the tokens that templates may write, by name. Missing tokens stay undefined."""
    older = {} if "added_tokens_decoder" in own else read_json_if_there(folder / "special_tokens_map.json")
    described = {**own, **older}
    tokens = {name: token for name, token in own.items() if name.endswith("_token") and isinstance(token, str)}
    tokens |= {name: described[name] for name in TOKEN_NAMES if described.get(name) is not None}
    extra = described.get("extra_special_tokens")
    tokens |= extra if isinstance(extra, dict) else {}
    return {name: token_content(token) for name, token in tokens.items()}


def _described(given: object) -> dict[str, str]:
    if isinstance(given, list):
        named = [entry for entry in given if isinstance(entry, dict) and entry.get("template")]
        return {str(entry.get("name")): str(entry["template"]) for entry in named}
    return {DEFAULT: str(given)} if given else {}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}") from error
