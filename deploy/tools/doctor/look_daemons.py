"""Find this machine's daemons, and read their settings from flags and `--config` files."""

from __future__ import annotations

import argparse
import contextlib
import os
import pwd
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from deploy.tools.doctor.facts import DaemonFacts
from shared.config.core_plan import CorePlan
from shared.config.flags import Values, add_flags, given_values
from shared.config.load import load
from shared.config.settings.settings import SecurityConfig
from shared.core.errors import ConfigError

PROGRAMS = ("baton", "baton_serve", "deploy.cli")
WORDS = ("router", "prefill", "decode")
OUT_OF_SIGHT = "its working folder can't be read, and {} is relative to it"


@dataclass(frozen=True, slots=True)
class DaemonSettings:
    """The settings that every daemon has and the checks need."""

    cores: CorePlan = field(default_factory=CorePlan)
    security: SecurityConfig = field(default_factory=SecurityConfig)


def find_daemons() -> Iterable[DaemonFacts]:
    for process in psutil.process_iter(["cmdline"]):
        argv: list[str] = process.info["cmdline"] or []
        command = command_of(argv)
        if command:
            with contextlib.suppress(psutil.Error):
                uid = process.uids().effective
                yield read_daemon(process.pid, command, argv, uid, cores_of(process), folder_of(process))


def command_of(argv: Sequence[str]) -> str:
    """Return "router", "prefill", "decode" or ""."""
    pairs = zip(argv, argv[1:], strict=False)
    return next((b for a, b in pairs if b in WORDS and Path(a).name in PROGRAMS), "")


def cores_of(process: psutil.Process) -> tuple[int, ...]:
    """Return () if unknown."""
    return tuple(process.cpu_affinity()) if hasattr(process, "cpu_affinity") else ()


def folder_of(process: psutil.Process) -> Path | None:
    try:
        return Path(process.cwd())
    except psutil.Error:  # another user's process
        return None


def read_daemon(
    pid: int, command: str, argv: Sequence[str], uid: int, cores: tuple[int, ...], folder: Path | None
) -> DaemonFacts:
    """`folder`: the daemon's working folder; None if unknown."""
    settings, problem = read_settings(argv, folder)
    keys = place(settings.security.keys, folder, uid) if settings.security.keys else ""
    return DaemonFacts(
        pid=pid,
        command=command,
        uid=uid,
        cores=cores,
        threads=settings.cores.threads,
        spins=settings.cores.wait_policy == "active",
        keys=keys or "",
        problem=problem or ("" if keys is not None else OUT_OF_SIGHT.format(settings.security.keys)),
    )


def read_settings(argv: Sequence[str], folder: Path | None) -> tuple[DaemonSettings, str]:
    """Return (settings, why they may be incomplete). If the config file is unreadable, use only the flags."""
    try:
        given, config = parse(argv)
    except argparse.ArgumentError as error:
        return DaemonSettings(), str(error)
    file = Path(config) if folder is None else folder / config
    is_hidden = bool(config) and not file.is_absolute()
    problem = OUT_OF_SIGHT.format(config) if is_hidden else ""
    for source in (file if config and not is_hidden else None, None):
        try:
            return load(DaemonSettings, given, source), problem
        except ConfigError as error:
            problem = problem or error.message
    return DaemonSettings(), problem


def parse(argv: Sequence[str]) -> tuple[Values, str]:
    """Return (flags, the value of --config)."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("--config", default="")
    add_flags(parser, DaemonSettings)
    args, _ = parser.parse_known_args(list(argv))
    return given_values(args), args.config


def place(name: str, folder: Path | None, uid: int) -> str | None:
    """Resolve a path as a daemon of user `uid` in `folder` does. Return None if the path depends on an unknown
    folder."""
    if name.startswith("~/") and uid != os.geteuid():
        with contextlib.suppress(KeyError):
            name = f"~{pwd.getpwuid(uid).pw_name}{name[1:]}"
    path = Path(name).expanduser()
    if path.is_absolute():
        return str(path)
    return None if folder is None else str(folder / path)
