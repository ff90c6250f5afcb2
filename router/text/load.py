"""Finds the tokenizer of the configured model. Knows nothing of what it is used for."""

from __future__ import annotations

from router.text.folder_tokenizer import load_folder
from router.text.gguf_tokenizer import load_gguf
from router.text.hashlm import hash_text_model
from router.text.interface import TextModel
from shared.config.model_path import ModelKind, resolve_model


def load_text_model(model: str) -> TextModel:
    """model: smollm2, hashlm, a .gguf file, or a Hugging Face folder. Raises ConfigError."""
    source = resolve_model(model, with_weights=False)
    if source.path is None:
        return hash_text_model()
    return load_folder(source.path) if source.kind is ModelKind.HF_FOLDER else load_gguf(source.path)
