"""Secrets that others could read or change: nodes refuse such files, and so they would not start."""

from __future__ import annotations

from deploy.doctor.facts import Facts, Secret
from deploy.doctor.finding import BROKEN, Finding, or_well

FOREIGN = 0o077
ROOT = 0
HERE = "this machine"


def check_keys(facts: Facts) -> list[Finding]:
    if not facts.secrets and not facts.keys_problem:
        return []
    found = [finding for secret in facts.secrets for finding in check_secret(secret, facts.own_uid)]
    if facts.keys_problem and not found:
        found.append(Finding("keys", HERE, BROKEN, facts.keys_problem, "see `baton keys --help`"))
    return or_well(found, "keys", HERE, "folders and secrets are this user's own, and complete")


def check_secret(secret: Secret, own_uid: int) -> list[Finding]:
    if secret.error:
        return [
            Finding("keys", secret.path, BROKEN, secret.error, "`baton keys create` makes a folder, see its --help")
        ]
    if secret.uid not in (own_uid, ROOT):
        return [
            Finding("keys", secret.path, BROKEN, f"it belongs to uid {secret.uid}", f"chown {own_uid} {secret.path}")
        ]
    if secret.mode & FOREIGN:
        right = "700" if secret.is_folder else "600"
        what = f"it is open to others (mode {secret.mode:o})"
        return [Finding("keys", secret.path, BROKEN, what, f"chmod {right} {secret.path}")]
    return []
