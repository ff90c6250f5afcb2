"""Refuse what no node could load, by what its repository says: before any weights are fetched."""

from __future__ import annotations

from deploy.hub.hub import Repository
from shared.config.models.model_folder import CONFIG, read_folder
from shared.core.errors import ConfigError


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
    from shared.model.formats.choice import uses_library
    from shared.model.formats.hf_config import config_from_hf

    folder = read_folder(repository.folder)
    if folder.has_encoder:
        return
    try:
        if not uses_library(folder, library):
            config_from_hf(folder)
            return
        from shared.model.library.loading import checked_config  # imports the library

        checked_config(folder)
    except ConfigError as error:
        path = folder.path
        reason = error.message.replace(str(path / CONFIG), CONFIG).removeprefix(f"{path}: ")
        raise ConfigError(f"--model {repository.name}: {reason}") from None
