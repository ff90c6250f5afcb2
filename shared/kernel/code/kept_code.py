"""Keeps compiled code on disk: beside a checkout's source, or, because pip would not uninstall it, in the user's cache.

numba has one index for all variants of a function, and takes no lock. If two processes saved different variants at the
same time, one could later load the other's code. So here each variant has its own index and its own file of code. A
variant is a signature with the values in the closure and the processor's features.

A full disk, or a folder that can't be written any more, costs only time: the next process compiles again.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
from pathlib import Path
from typing import Any

from numba.core import config
from numba.core.caching import FunctionCache, IndexDataCacheFile

from shared.config.machine.cache_folder import kernels_folder
from shared.config.machine.home import private_name
from shared.core.launcher import is_checkout


class VariantFiles:
    """Takes the place of numba's IndexDataCacheFile."""

    def __init__(self, folder: str, name: str, stamp: Any) -> None:
        self._folder, self._name, self._stamp = folder, name, stamp

    def load(self, key: Any) -> Any:
        file = self._file_of(key)
        try:
            return file.load(key)
        except Exception:  # a loss of power leaves incomplete files, for which pickle raises any error
            with contextlib.suppress(OSError):
                file.flush()  # `save` reads the index too
            return None

    def save(self, key: Any, code: Any) -> None:
        self._file_of(key).save(key, code)

    def _file_of(self, key: Any) -> Any:
        digest = hashlib.sha256(repr(key).encode()).hexdigest()[:16]
        return IndexDataCacheFile(self._folder, f"{self._name}-{digest}", self._stamp)


class KeptCode(FunctionCache):
    def __init__(self, function: Any) -> None:
        super().__init__(function)
        stamp = self._impl.locator.get_source_stamp()
        files: Any = VariantFiles(self.cache_path, self._impl.filename_base, stamp)  # numba calls `load` and `save`
        self._cache_file = files

    def save_overload(self, sig: Any, data: Any) -> None:
        try:
            super().save_overload(sig, data)
        except OSError as error:
            tell_not_kept(error)


def keep_code(compiled: Any, function: Any) -> None:
    """Let `compiled`, which numba made from the function, load and save its code on disk."""
    settings: Any = config
    try:
        if not settings.CACHE_DIR and not is_own_checkout():
            settings.CACHE_DIR = str(chosen_folder())
        compiled._cache = KeptCode(function)
    except (RuntimeError, OSError) as error:
        tell_not_kept(error)


def is_own_checkout() -> bool:
    return is_checkout() and os.access(Path(__file__).parent, os.W_OK)


def chosen_folder() -> Path:
    folder = kernels_folder()
    if folder.is_relative_to(private_name()):
        why = "no home folder can be written; set XDG_CACHE_HOME to a folder that lasts"
        logging.getLogger(__name__).warning("compiled kernels are kept in %s: %s", folder, why)
    return folder


def tell_not_kept(error: Exception) -> None:
    logging.getLogger(__name__).warning("compiled kernels can't be kept on disk: %s", error)
