"""Find secrets that other users could read or change. Nodes refuse such secrets.

Permissions are judged for the nodes' user, not for the caller.
"""

from __future__ import annotations

from collections.abc import Sequence

from deploy.tools.doctor.facts import KeysFolder, Secret
from deploy.tools.doctor.finding import BROKEN, LOOK, Finding, or_well

FOREIGN = 0o077


def check_keys(folders: Sequence[KeysFolder]) -> list[Finding]:
    return [finding for folder in folders for finding in check_folder(folder)]


def check_folder(folder: KeysFolder) -> list[Finding]:
    found = [finding for secret in folder.secrets for finding in check_secret(secret, folder.uid)]
    if folder.problem and not found:
        found.append(Finding("keys", folder.path, BROKEN, folder.problem, "see `baton keys --help`"))
    if not folder.is_open and not found:
        what = f"uid {folder.uid} owns it and we can't read it: its files are not judged"
        found.append(Finding("keys", folder.path, LOOK, what, "run this as root, or as that user"))
    return or_well(found, "keys", folder.path, f"folder and files are uid {folder.uid}'s own, and complete")


def check_secret(secret: Secret, uid: int) -> list[Finding]:
    """A node can't use another user's secret, not even root's: only the owner may read it."""
    if secret.error:
        return [
            Finding("keys", secret.path, BROKEN, secret.error, "`baton keys create` makes a folder, see its --help")
        ]
    if secret.uid != uid:
        what = f"it belongs to uid {secret.uid}, but uid {uid} uses it"
        return [Finding("keys", secret.path, BROKEN, what, f"chown {uid} {secret.path}")]
    if secret.mode & FOREIGN:
        right = "700" if secret.is_folder else "600"
        what = f"it is open to others (mode {secret.mode:o})"
        return [Finding("keys", secret.path, BROKEN, what, f"chmod {right} {secret.path}")]
    return []
