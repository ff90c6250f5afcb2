"""Load the tokenizer of the configured model."""

from __future__ import annotations

from router.text.chat.interface import TextModel
from router.text.folder_tokenizer import load_folder
from router.text.gguf_tokenizer import load_gguf
from router.text.hashlm import hash_text_model
from router.text.scripted import scripted_text_model
from shared.config.models import shipped_model
from shared.config.models.model_path import ModelKind, resolve_model
from shared.config.settings.text_settings import TextConfig

DEFAULTS = TextConfig()


def load_text_model(model: str, options: TextConfig = DEFAULTS) -> TextModel:
    """Raise ConfigError if tokenizer or template can't be loaded.

    `model`: smollm2, hashlm, scripted, a .gguf file, or a Hugging Face folder."""
    source = resolve_model(model, with_weights=False)
    if source.kind is ModelKind.SCRIPTED:
        return scripted_text_model()
    if source.path is None:
        return hash_text_model()
    if source.kind is ModelKind.HF_FOLDER:
        return load_folder(source.path, options)
    return load_gguf(source.path, options, shipped_model.with_system if model == shipped_model.NAME else str)
