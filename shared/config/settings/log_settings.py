"""Settings of each process's log."""

from __future__ import annotations

from dataclasses import dataclass

from shared.config.settings.options import Settings, option


@dataclass(frozen=True, slots=True)
class LogConfig(Settings):
    """Logging: one line per record, to stderr. Prompts and answers are never logged."""

    log_level: str = option("info", "lowest level that is logged", choices=("debug", "info", "warning", "error"))
    log_format: str = option(
        "text",
        "form of the lines; json: an object with time, level, part and message, then fields",
        choices=("text", "json"),
    )
