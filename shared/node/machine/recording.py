"""Record this node's steps while a file in a folder asks for it (`baton trace`).

    FOLDER/on appears    -> FOLDER/NODE.recording, and rows are kept
    FOLDER/on is gone    -> FOLDER/NODE.steps.json, and NODE.recording is gone

Who may write into the folder may ask. Rows name steps and requests' keys, never text.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from threading import Thread

from shared.config.settings.probe_settings import ProbeConfig
from shared.core.errors import ConfigError
from shared.observe.log import Logger
from shared.observe.step_records import StepRecords, StepRow

LOOK_S = 0.2
ASKED, RECORDING, STEPS = "on", ".recording", ".steps.json"


def open_recording(probe: ProbeConfig, node_id: str, records: StepRecords, log: Logger) -> FolderRecording | None:
    """Return None without a folder. Raise ConfigError if it is not one."""
    return FolderRecording(probe.record_dir, node_id, records, log) if probe.record_dir else None


class FolderRecording:
    """Owned by the loop's thread."""

    def __init__(self, folder: str, node_id: str, records: StepRecords, log: Logger) -> None:
        """Raise ConfigError if the folder is not one."""
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise ConfigError(f"--record-dir {folder} is not a folder")
        self._node_id = node_id
        self._records = records
        self._log = log
        self._next_look = 0.0

    def look_for_file(self) -> None:
        """Called every round."""
        now = self._records.clock()
        if now < self._next_look:
            return
        self._next_look = now + LOOK_S
        is_asked = (self._folder / ASKED).exists()
        if is_asked == self._records.is_on:
            return
        if is_asked:
            self._records.begin_records()
            self._try(lambda: self._path(RECORDING).touch())
        else:
            rows = self._records.take_rows()
            shift = time.time() - self._records.clock()
            Thread(target=lambda: self._try(lambda: self._write(rows, shift)), name="step records", daemon=True).start()

    def _path(self, ending: str) -> Path:
        return self._folder / f"{self._node_id}{ending}"

    def _write(self, rows: list[StepRow], shift: float) -> None:
        """`shift`: what makes the rows' seconds the wall clock's."""
        unfinished = self._path(".unfinished")
        try:
            unfinished.write_text(json.dumps({"node": self._node_id, "shift": shift, "rows": rows}), encoding="utf-8")
            unfinished.replace(self._path(STEPS))
        finally:  # also on a full disk: `baton trace` waits for it
            unfinished.unlink(missing_ok=True)
            self._path(RECORDING).unlink(missing_ok=True)

    def _try(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            self._log.warning("steps can't be recorded", folder=str(self._folder), why=str(error))
