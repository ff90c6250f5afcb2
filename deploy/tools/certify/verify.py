"""Say in a sentence what a certificate certifies, or name its fault. Loads no model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from deploy.router_http import printable
from deploy.tools.certify.shown_files import read_shown
from router.certify.record import NEAR_TIES, AnswerRecord, BadCertificate, ShownAnswer
from router.certify.signing import read_public, read_record, verified

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

EXIT_WRONG = 1
UNSHOWN = "neither prompt nor tokens are shown with it"


def verify_files(files: Iterable[Path], keys: Iterable[Path]) -> int:
    """Print a line for each certificate. Return 1 if one of them is wrong. Raise ConfigError for unusable files."""
    known = read_public(list(keys))
    wrong = 0
    for file, one in ((path, one) for path in files for one in read_shown(path)):
        try:
            said = f"certified by the key {read_record(one.record)[0].kid}: {sentence(one, known)}"
        except BadCertificate as error:
            wrong += 1
            said = f"NOT CERTIFIED: {error.message}"
        print(f"{file}: {printable(said)}")
    return EXIT_WRONG if wrong else 0


def sentence(shown: ShownAnswer, keys: Mapping[str, Ed25519PublicKey]) -> str:
    """Raise BadCertificate if something is not as it was signed."""
    record = verified(shown.record, keys)
    names = shown.check_shown(record)
    said = f"{' and '.join(names)} shown with it: certified" if names else UNSHOWN
    return f"{record}; {said}{doubts(record)}"


def doubts(record: AnswerRecord) -> str:
    said = "; a library ran the model, so near ties may flip" if record.replays == NEAR_TIES else ""
    return said + ("; nodes of different kinds had it" if record.nodes[1:] else "")
