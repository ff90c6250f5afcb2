"""The steps of `baton keys`. Each changes one folder, and prints which files to copy.

Running routers and nodes notice changed files.
"""

from __future__ import annotations

from pathlib import Path

from deploy.columns import aligned
from shared.core.errors import ConfigError
from shared.wire.keys.key_files import (
    ALLOWED,
    NEXT,
    NODE,
    ROUTER,
    SECRET,
    AllowedKeys,
    KeyEntry,
    check_name,
    make_folder,
    new_pair,
    read_allowed,
    read_pair,
    write_pair,
    write_private,
)

SHOWN_DIGITS = 16


def create(folder: Path, routers: list[str], nodes: list[str]) -> None:
    wanted = [(ROUTER, check_name(name)) for name in routers] + [(NODE, check_name(name)) for name in nodes]
    if not wanted:
        raise ConfigError("create: name a router or a node, e.g. --router router --node prefill-0 decode-0")
    if len({name for _, name in wanted}) < len(wanted):
        raise ConfigError("create: a name is given twice")
    make_folder(folder)
    entries = list(read_allowed(folder).entries) if (folder / ALLOWED).exists() else []
    known = {entry.name: entry.kind for entry in entries}
    for kind, name in wanted:
        if known.get(name, kind) != kind:
            raise ConfigError(f"create: {name} is taken: it names a {known[name]} in {folder}")
    for kind, name in wanted:
        if name in known:
            print(f"{name}: has a key already")
            continue
        pair = new_pair()
        write_pair(folder, name, pair)
        entries.append(KeyEntry(kind, name, pair.public))
        print(f"{name}: copy {folder / (name + SECRET)} to the machine that runs it, and to no other")
    write_list(folder, entries)


def write_list(folder: Path, entries: list[KeyEntry]) -> None:
    write_private(folder / ALLOWED, AllowedKeys(tuple(entries)).text)
    print(f"Copy {folder / ALLOWED} to every machine of the cluster.")


def entries_of(folder: Path, name: str) -> list[KeyEntry]:
    found = read_allowed(folder).of_name(check_name(name))
    if not found:
        raise ConfigError(f"{name} is not in {folder / ALLOWED}: `baton keys show {folder}` lists the names")
    return found


def prepare(folder: Path, name: str) -> None:
    found = entries_of(folder, name)
    if len(found) > 1:
        raise ConfigError(f"{name}'s key is being rotated already: --use or --drop-old is next, see `show`")
    if not (folder / (name + NEXT)).exists():  # an earlier run may have made the key, but not listed it
        write_pair(folder, name, new_pair(), NEXT)
    pair = read_pair(folder, name, NEXT)
    write_list(folder, [*read_allowed(folder).entries, KeyEntry(found[0].kind, name, pair.public)])
    print(f"{name} has two keys now, both allowed; it still uses the old one.")
    print(
        f"When the list is copied, and {folder / (name + NEXT)} to {name}'s machine: "
        f"baton keys rotate {folder} {name} --use"
    )


def use(folder: Path, name: str) -> None:
    pair = read_pair(folder, name, NEXT)
    if pair.public not in [entry.public for entry in entries_of(folder, name)]:
        raise ConfigError(
            f"{folder / ALLOWED} does not list {name}'s new key yet: copy the new list here first, "
            f"or {name} is shut out"
        )
    (folder / (name + NEXT)).replace(folder / (name + SECRET))
    print(f"{name} uses its new key within a second if it runs here. If it runs elsewhere, repeat this there.")
    print(f"Then, where keys are made: baton keys rotate {folder} {name} --drop-old")


def drop_old(folder: Path, name: str) -> None:
    found = entries_of(folder, name)
    if len(found) < 2:
        raise ConfigError(f"{name} has one key only: there is nothing to drop")
    if read_pair(folder, name).public != found[-1].public:
        raise ConfigError(f"{name} does not use its new key yet: baton keys rotate {folder} {name} --use comes first")
    write_list(folder, [entry for entry in read_allowed(folder).entries if entry not in found[:-1]])
    print(f"Routers and nodes refuse {name}'s old key now, and ignore messages on its connections.")


def remove(folder: Path, name: str) -> None:
    found = entries_of(folder, name)
    write_list(folder, [entry for entry in read_allowed(folder).entries if entry not in found])
    for suffix in (SECRET, NEXT):
        (folder / (name + suffix)).unlink(missing_ok=True)
    print(f"Every machine that gets the new list refuses {name} and ignores its messages.")


def shown_keys(folder: Path) -> str:
    entries = read_allowed(folder).entries
    rows = [("name", "kind", "key", "secret", "")]
    for name in dict.fromkeys(entry.name for entry in entries):
        keys = [entry for entry in entries if entry.name == name]
        digits = ", ".join(entry.public.hex()[:SHOWN_DIGITS] for entry in keys)
        where = "here" if (folder / (name + SECRET)).exists() else "elsewhere"
        rows.append((name, keys[0].kind, digits, where, state_of(folder, name, keys)))
    return aligned(rows) + "\n"


def state_of(folder: Path, name: str, keys: list[KeyEntry]) -> str:
    if (folder / (name + NEXT)).exists():
        return "rotating: --use is next"
    return "rotating: --drop-old is next" if len(keys) > 1 else ""
