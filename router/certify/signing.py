"""Sign records with Ed25519, check signatures, and read and write the keys, with the package cryptography.

A certificate is a JWS in its compact form (RFC 7515, EdDSA of RFC 8037): other programs can check it, too.

    base64url({"alg":"EdDSA","kid":KEY ID,"typ":TYPE}) . base64url(record as JSON) . base64url(signature)

The package is loaded only by who signs or checks, because a router without certificates does not need it.
"""

from __future__ import annotations

import base64
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from router.certify.record import (
    NO_RECORD,
    SALT_BYTES,
    AnswerRecord,
    BadCertificate,
    ChoiceFacts,
    GivenCertificate,
    record_of,
    salted_parameters,
)
from shared.core import extras
from shared.core.errors import ConfigError
from shared.wire.keys.key_files import write_private
from shared.wire.keys.private_file import read_private

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

FLAG = "--certificate-key"
EXTRA = "certificates"
TYPE = "baton-answer+jws"
MAX_FILE_BYTES = 1 << 16
KEY_ID_CHARS = 16
PUBLIC_PEM = re.compile(r"-----BEGIN PUBLIC KEY-----[^-]+-----END PUBLIC KEY-----\n?")


class JwsHeader(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    alg: str
    kid: str
    typ: str


@dataclass(slots=True)
class AnswerSigner:
    """`secret`: replaced when its file changes. `templates`: the model's chat templates by name, which every record
    has a digest of."""

    secret: Ed25519PrivateKey = field(repr=False)
    templates: Mapping[str, str] = field(repr=False)

    def certify(self, facts: ChoiceFacts) -> GivenCertificate:
        """Return what the asker gets: the signed record, and a salt of its own."""
        salt = secrets.token_bytes(SALT_BYTES)
        record = record_of(facts, salt)
        given = GivenCertificate(sign(record, self.secret), salt.hex())
        salted = salted_parameters(facts.sampling)
        return msgspec.structs.replace(given, sampling=salted) if salted else given


def sign(record: AnswerRecord, secret: Ed25519PrivateKey) -> str:
    header = JwsHeader("EdDSA", key_id(secret.public_key()), TYPE)
    text = f"{encoded(msgspec.json.encode(header))}.{encoded(msgspec.json.encode(record))}"
    return f"{text}.{encoded(secret.sign(text.encode()))}"


def read_record(jws: str) -> tuple[JwsHeader, AnswerRecord]:
    """Return header and record without a look at the signature. Raise BadCertificate for another form."""
    header, payload, _ = parts_of(jws)
    try:
        found = msgspec.json.decode(decoded(header), type=JwsHeader)
        record = msgspec.json.decode(decoded(payload), type=AnswerRecord)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise BadCertificate(f"it is not a record of this version of Baton: {error}") from None
    if (found.alg, found.typ) != ("EdDSA", TYPE):
        raise BadCertificate(f"it is a {found.typ} signed with {found.alg}, not a {TYPE} with EdDSA")
    return found, record


def verified(jws: str, keys: Mapping[str, Ed25519PublicKey]) -> AnswerRecord:
    """Return the record. Raise BadCertificate unless one of these keys, by their ids, has signed it."""
    from cryptography.exceptions import InvalidSignature

    text, _, signature = jws.rpartition(".")
    header, record = read_record(jws)
    key = keys.get(header.kid)
    if key is None:
        known = ", ".join(keys)
        raise BadCertificate(f"the key {header.kid[:64]!r} signed it, which is none of these: {known}")
    try:
        key.verify(decoded(signature), text.encode())
    except InvalidSignature:
        raise BadCertificate(f"its signature is wrong: the key {header.kid} never signed these words") from None
    return record


def parts_of(jws: str) -> Sequence[str]:
    if jws == NO_RECORD:
        raise BadCertificate("there is no certificate with it")
    parts = jws.split(".")
    if len(parts) != 3 or not jws.isascii():
        raise BadCertificate("it is not a JWS: three words with dots between them")
    return parts


def encoded(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def decoded(word: str) -> bytes:
    """Raise BadCertificate for words that `encoded` would write in another way, so that nothing has two forms."""
    try:
        data = base64.urlsafe_b64decode(word + "=" * (-len(word) % 4))
    except ValueError:
        data = b""
    if encoded(data) != word:
        raise BadCertificate("a part of it is not base64url")
    return data


def key_id(public: Ed25519PublicKey) -> str:
    return sha256(public.public_bytes_raw()).hexdigest()[:KEY_ID_CHARS]


# ---- files


def read_signing_key(path: str) -> Ed25519PrivateKey | None:
    """Return None without a path. Raise ConfigError if the file is open to others or holds no Ed25519 key."""
    if not path:
        return None
    extras.require(EXTRA, FLAG)
    try:
        return read_secret(Path(path).expanduser())
    except ConfigError as error:
        raise ConfigError(f"{FLAG} {path}: {error.message}") from None


def read_secret(file: Path) -> Ed25519PrivateKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    text = read_private(file, MAX_FILE_BYTES)
    try:
        key: Any = load_pem_private_key(text.encode(), password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm):  # its words may quote the key
        key = None
    if not isinstance(key, Ed25519PrivateKey):
        raise ConfigError(
            f"{file} holds no Ed25519 key in PEM form without a passphrase; `baton keys certificate` makes one"
        )
    return key


def read_public(files: Sequence[Path]) -> dict[str, Ed25519PublicKey]:
    """Return all public keys in PEM form of these files, by their ids. Raise ConfigError if a file has none."""
    extras.require(EXTRA, "a check of signatures")
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    found: dict[str, Ed25519PublicKey] = {}
    for file in files:
        try:
            blocks = PUBLIC_PEM.findall(file.read_text("ascii", "replace"))
        except OSError as error:
            raise ConfigError(f"{file}: {error.strerror}") from None
        for block in blocks or [""]:
            try:
                key: Any = load_pem_public_key(block.encode())
            except (ValueError, UnsupportedAlgorithm):
                key = None
            if not isinstance(key, Ed25519PublicKey):
                raise ConfigError(f"{file} holds no public key of a router (Ed25519, PEM)")
            found[key_id(key)] = key
    return found


def make_secret(file: Path) -> Ed25519PublicKey:
    """Write a new key into the file, which only this user can read, unless it has one. Return its public half."""
    extras.require(EXTRA, "baton keys certificate")
    from cryptography.hazmat.primitives import serialization
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

    if not file.exists():
        made = Ed25519PrivateKey.generate()
        text = made.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
        write_private(file, text.decode())
    return read_secret(file).public_key()


def public_pem(public: Ed25519PublicKey) -> str:
    from cryptography.hazmat.primitives import serialization

    return public.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo).decode()
