"""Write a report as JSON, CSV and an HTML page."""

from __future__ import annotations

import csv
import os
from dataclasses import asdict, fields
from pathlib import Path

from deploy.tools.load.page import page_of
from deploy.tools.traffic.figures.outcome import REPORT, LoadReport, RequestRow, encode
from shared.core import extras
from shared.core.errors import ConfigError

CSV_NAME, HTML_NAME = "requests.csv", "report.html"


def prepare(folder: Path) -> None:
    """Create the folder before an expensive run. Raise ConfigError if that fails."""
    extras.require("load", f"--out {folder}, for its plots,")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error.strerror}") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"--out {folder}: it can't be written")


def write(report: LoadReport, folder: Path) -> None:
    prepare(folder)
    try:
        (folder / REPORT).write_bytes(encode(report))
        write_rows(report.rows, folder / CSV_NAME)
        (folder / HTML_NAME).write_text(page_of(report), "utf-8")
    except OSError as error:
        raise ConfigError(f"--out {folder}: {error}") from None


def write_rows(rows: list[RequestRow], path: Path) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, [field.name for field in fields(RequestRow)])
        writer.writeheader()
        writer.writerows(asdict(row) for row in rows)
