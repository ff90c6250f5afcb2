"""What a certificate says of one choice of an answer, and the check of what its owner shows. Pure.

record    signed: model, numerics, sampling, seed, counts and salted digests; no text, and only stop tokens' ids
salt      32 random bytes for the asker only; without them no reader can try which prompt a digest is of
shown     prompt ids, token ids, SALTED parameters: a reader with the salt can compare them with the record
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from shared.core.errors import InvalidRequest, WireError
from shared.core.keys import MASK64
from shared.core.sampling_params import BY_NAME, SamplingParams
from shared.wire.fitting import PLANE_SEPARATOR, runs_by_library
from shared.wire.messages import Fingerprint
from shared.wire.sampling import Sampling, sampling_of

SALT_BYTES = 32
EXACT: Literal["exact"] = "exact"
NEAR_TIES: Literal["near-ties"] = "near-ties"
NO_RECORD = ""  # of a choice without certificate
UNSIGNED = ("num_logprobs", "prompt_logprobs")  # they change no token
SALTED = ("logit_bias", "allowed_token_ids", "bad_words", "grammar")  # they may say much of the prompt, and be long
HEX = r"^[0-9a-f]{64}$"

Digest = Annotated[str, Meta(pattern=HEX)]
Count = Annotated[int, Meta(ge=0)]
Seconds = Annotated[int, Meta(ge=0, lt=253_402_300_800)]  # since 1970, before the year 10000


class BadCertificate(InvalidRequest, code="bad_certificate"):
    """The certificate, or a prompt or tokens shown with it, differ from the signed ones."""


class CertifiedIds(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    count: Count
    digest: Digest


class CertifiedNumerics(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The part of a node's fingerprint that decides tokens. `pages`: the layout of KV pages, with their dtypes."""

    numerics: Count
    model: str
    weights: str
    dtype: str
    pages: str

    @classmethod
    def of_node(cls, node: Fingerprint) -> CertifiedNumerics:
        return cls(node.numerics, node.model, node.weights, node.dtype, node.page_layout)

    def differs_from(self, other: CertifiedNumerics) -> str | None:
        """Return the first field in which `other`, a node without draft head, differs; None if it may replay."""
        for name in self.__struct_fields__:
            own, theirs = getattr(self, name), getattr(other, name)
            planes, wanted = (str(one).split(PLANE_SEPARATOR) for one in (theirs, own))
            if own != theirs and not (name == "pages" and wanted[: len(planes)] == planes):
                return name
        return None


class AnswerRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One choice. `nodes`: one entry, unless nodes of different kinds had the request, one after the other.

    `seed` is the prompt's; with `sequence`, the place among its n answers, it gives the choice's own. `time`: seconds
    since 1970. `template`, `stop`: digests of the model's chat templates and of the stop strings. It has many fields
    because each is a claim of its own."""

    version: Literal[1] = 1
    answer: str
    choice: Count
    time: Seconds
    model: str
    adapter: str
    nodes: Annotated[list[CertifiedNumerics], Meta(min_length=1)]
    replays: Literal["exact", "near-ties"]
    template: Digest
    prompt: CertifiedIds
    sampling: dict[str, Any]
    stop: Digest | None
    seed: Annotated[int, Meta(ge=0)]
    sequence: Count
    tokens: CertifiedIds
    finish_reason: str

    def sampling_params(self, shown: Mapping[str, Any]) -> SamplingParams:
        """Return what nodes got. `shown`: the SALTED ones. Raise BadCertificate for parameters that no node takes."""
        for name in self.sampling:
            if name not in BY_NAME:
                raise BadCertificate(f"this version of Baton does not know its sampling parameter {name!r}")
            if name in SALTED and self.sampling[name] and name not in shown:
                raise BadCertificate(f"the answer was drawn with {name}, not shown with the certificate")
        try:
            return sampling_of(msgspec.convert({**self.sampling, **shown}, Sampling))
        except (msgspec.ValidationError, WireError) as error:
            raise BadCertificate(f"its sampling parameters are not Baton's: {error}") from None

    def __str__(self) -> str:
        node, when = self.nodes[0], datetime.fromtimestamp(self.time, UTC)
        return (
            f"choice {self.choice} of {self.answer}: {self.tokens.count} tokens of {self.model} after a prompt of "
            f"{self.prompt.count}, weights {node.weights}, {node.dtype}, numerics {node.numerics}, seed {self.seed}, "
            f"ended by {self.finish_reason}, {when:%Y-%m-%d %H:%M:%S} UTC"
        )


class ChoiceFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What the router knows of one choice when it ends."""

    answer: str
    choice: int
    time: int
    model: str
    adapter: str
    nodes: Sequence[Fingerprint]
    templates: Mapping[str, str]
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    stops: Sequence[str]
    seed: int
    sequence: int
    token_ids: Sequence[int]
    finish_reason: str


def record_of(facts: ChoiceFacts, salt: bytes) -> AnswerRecord:
    nodes = list(dict.fromkeys(map(CertifiedNumerics.of_node, facts.nodes)))
    return AnswerRecord(
        answer=facts.answer,
        choice=facts.choice,
        time=facts.time,
        model=facts.model,
        adapter=facts.adapter,
        nodes=nodes,
        replays=NEAR_TIES if any(map(runs_by_library, facts.nodes)) else EXACT,
        template=template_digest(salt, facts.templates),
        prompt=certified_ids(salt, "prompt", facts.prompt_ids),
        sampling=shown_sampling(facts.sampling, salt),
        stop=digest_of(salt, "stop", msgspec.json.encode(list(facts.stops))) if facts.stops else None,
        seed=facts.seed & MASK64,
        sequence=facts.sequence,
        tokens=certified_ids(salt, "tokens", facts.token_ids),
        finish_reason=facts.finish_reason,
    )


class ShownAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """A certificate, and what its owner shows with it. `record`: a JWS; `salt`, in hexadecimal digits. `text`: of the
    answer, if all of it is text; no digest is of it."""

    record: str
    salt: Annotated[str, Meta(pattern=HEX)] | None = None
    sampling: dict[str, Any] = {}
    prompt_token_ids: list[int] | None = None
    token_ids: list[int] | None = None
    text: str | None = None

    def check_shown(self, record: AnswerRecord) -> list[str]:
        """Return the names of the shown parts, all certified. Raise BadCertificate if one is not."""
        shown: list[str] = []
        for name, ids, wanted in (
            ("prompt", self.prompt_token_ids, record.prompt),
            ("tokens", self.token_ids, record.tokens),
        ):
            if ids is not None:
                self._check(name, certified_ids(self.salt_bytes, name, ids).digest == wanted.digest)
                shown.append(name)
        for name, value in self.sampling.items():
            wanted_digest = record.sampling.get(name) if name in SALTED else None
            self._check(name, parameter_digest(self.salt_bytes, name, value) == wanted_digest)
            shown.append(name)
        return shown

    def _check(self, name: str, is_equal: bool) -> None:
        if not is_equal:
            raise BadCertificate(f"the {name} shown with it is not what was certified (or the salt is another one's)")

    @property
    def salt_bytes(self) -> bytes:
        """Raise BadCertificate if there is none."""
        if self.salt is None:
            raise BadCertificate("there is no salt beside it, so nothing can be compared with its digests")
        return bytes.fromhex(self.salt)


class GivenCertificate(msgspec.Struct, frozen=True):
    """What an answer's choice has in its field `certificate`. `sampling`: the SALTED parameters, if it had any."""

    record: str
    salt: str
    sampling: dict[str, Any] | UnsetType = UNSET


def digest_of(salt: bytes, purpose: str, data: bytes) -> str:
    """Return HMAC-SHA256, keyed with the salt, of purpose and data. It tells nothing of the data without the salt."""
    return hmac.digest(salt, purpose.encode() + b"\0" + data, "sha256").hex()


def certified_ids(salt: bytes, purpose: str, ids: Sequence[int]) -> CertifiedIds:
    """The digest is of the ids as unsigned 32-bit numbers, lowest byte first. Raise BadCertificate for other ids."""
    try:
        return CertifiedIds(len(ids), digest_of(salt, purpose, struct.pack(f"<{len(ids)}I", *ids)))
    except struct.error:
        raise BadCertificate(f"the {purpose} shown with it is not a list of token ids") from None


def template_digest(salt: bytes, templates: Mapping[str, str]) -> str:
    """`templates`: the model's chat templates by name."""
    return digest_of(salt, "template", msgspec.json.encode(dict(templates), order="sorted"))


def salted_parameters(sampling: SamplingParams) -> dict[str, Any]:
    """Return those of the SALTED parameters that are set."""
    return {name: value for name in SALTED if (value := getattr(sampling, name))}


def shown_sampling(sampling: SamplingParams, salt: bytes) -> dict[str, Any]:
    """Return the parameters by name, the SALTED ones as digests."""
    shown = {name: value for name, value in asdict(sampling).items() if name not in UNSIGNED}
    digests = {name: parameter_digest(salt, name, value) for name, value in salted_parameters(sampling).items()}
    return shown | digests


def parameter_digest(salt: bytes, name: str, value: Any) -> str:
    """The digest is of the value as JSON, in which 2 and 2.0 are one bias. Raise BadCertificate for another's value."""
    try:
        whole = msgspec.convert({"max_tokens": 1, name: value}, Sampling)
    except msgspec.ValidationError:
        raise BadCertificate(f"the {name} shown with it is of another kind") from None
    return digest_of(salt, name, msgspec.json.encode(getattr(whole, name, None)))
