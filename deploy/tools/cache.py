"""`baton cache`: list and remove packed weights, which this user's nodes map into memory."""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from shared.config.machine.cache_folder import packed_folder
from shared.core.errors import ConfigError

if TYPE_CHECKING:
    from shared.model.formats.packed_folder import Listed

MIB = 1 << 20
DESCRIPTION = """\
baton cache: packed weights. A node on a CPU packs weights for its kernels once, in a file that all nodes of this
user on this machine map, so they share one copy in memory. A file is made again when the model, its format, the
processor or Baton's code changes. The nodes' flag --packed-bytes bounds the total size of the files. These commands
wait for no node.

  baton cache           list files, the most recently used first
  baton cache clear     remove all files; running nodes keep theirs mapped, and the next node to start packs again
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("action", nargs="?", choices=("list", "clear"), default="list", help="default: list")


def run(args: argparse.Namespace) -> int:
    """Raise ConfigError if the folder is unreadable, or open to other users."""
    # loads xxhash, which machines with only a router lack
    from shared.model.formats.packed_folder import PackedFolder, PackedRefused

    try:
        folder = PackedFolder(packed_folder(), 0)
        found = folder.listed() if args.action == "list" else folder.clear()
    except (OSError, PackedRefused) as error:
        raise ConfigError(str(error)) from None
    except RuntimeError:
        raise ConfigError("there is no home folder; set XDG_CACHE_HOME") from None
    print("\n".join(listing(found, str(folder.path), "removed from" if args.action == "clear" else "in")))
    return 0


def listing(found: Sequence[Listed], path: str, where: str) -> list[str]:
    if not found:
        return [f"no packed weights in {path}"]
    whole = sum(one.num_bytes for one in found)
    files = "1 file" if len(found) == 1 else f"{len(found)} files"
    return [f"{files}, {whole // MIB} MiB, {where} {path}", *map(line_of, found)]


def line_of(one: Listed) -> str:
    about = " ".join(one.about[field] for field in ("model", "dtype", "weights") if field in one.about)
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(one.used))
    return f"{one.num_bytes // MIB:8} MiB  {used}  {'in use ' if one.in_use else '       '}{about or one.name}"
