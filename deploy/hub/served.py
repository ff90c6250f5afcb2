"""Refuse what no node could load, by what its repository says: before any weights are fetched."""

from __future__ import annotations

from deploy.hub.hub import Repository
from shared.config.models.model_folder import CONFIG, ModelFolder, read_folder
from shared.core.errors import ConfigError

BATON, LIBRARY, T5 = "Baton", "transformers", "Baton, as an encoder-decoder model"


def check_gguf_architecture(repository: Repository) -> None:
    """Check the architecture that the hub reports for the GGUF files. Loading checks the file itself."""
    from shared.model.formats.gguf_config import GGUF_ARCHITECTURES

    architecture = repository.architecture
    if architecture and architecture not in GGUF_ARCHITECTURES:
        raise ConfigError(
            f"--model {repository.name}: GGUF architecture {architecture!r} is not supported, "
            f"only {', '.join(GGUF_ARCHITECTURES)}"
        )


def check_served(repository: Repository, library: str) -> None:
    """Raise ConfigError if no node could load the GGUF file, or the model that config.json describes."""
    if repository.name.file:
        check_gguf_architecture(repository)
        return
    folder = read_folder(repository.folder)
    try:
        if "tokenizer.json" not in repository.sizes:
            from shared.config.models.tiktoken_file import own_code  # imports tokenizers

            own_code(folder)
        program_of(folder, library)
    except ConfigError as error:
        raise ConfigError(f"--model {repository.name}: {reason_in(error, folder)}") from None


def program_of(folder: ModelFolder, library: str) -> str:
    """Return which program would run a folder, by its JSON files alone. Raise ConfigError if none can.

    `library`: --model-library."""
    from shared.model.formats.choice import uses_library
    from shared.model.formats.hf_config import config_from_hf
    from shared.model.formats.quantized_scheme import scheme_of

    if folder.has_encoder:
        return T5
    if not uses_library(folder, library):
        config_from_hf(folder)
        return BATON
    scheme_of(folder.config, folder.path)
    from shared.model.library.loading import checked_config  # imports the library

    checked_config(folder)
    return LIBRARY


def reason_in(error: ConfigError, folder: ModelFolder) -> str:
    """Return the error's sentence without the folder's path."""
    path = folder.path
    return error.message.replace(str(path / CONFIG), CONFIG).removeprefix(f"{path}: ").replace(str(path), path.name)
