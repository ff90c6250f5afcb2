"""Records and signers for tests of certificates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from router.certify.record import ChoiceFacts, ShownAnswer
from router.certify.signing import AnswerSigner, key_id
from shared.core.sampling_params import SamplingParams
from shared.wire.messages import Fingerprint
from tests.support.worlds.router_rig import FINGERPRINT

TEMPLATES = {"default": "{{ messages }}"}


def new_signer() -> AnswerSigner:
    return AnswerSigner(Ed25519PrivateKey.generate(), TEMPLATES)


def keys_of(*signers: AnswerSigner) -> dict[str, Any]:
    return {key_id(one.secret.public_key()): one.secret.public_key() for one in signers}


def choice_facts(
    prompt_ids: Sequence[int] = (1, 2, 3),
    token_ids: Sequence[int] = (4, 5),
    *,
    node: Fingerprint = FINGERPRINT,
    sampling: SamplingParams | None = None,
    seed: int = 7,
    **changes: Any,
) -> ChoiceFacts:
    facts = ChoiceFacts(
        answer="cmpl-1",
        choice=0,
        time=1_790_000_000,
        model="m",
        adapter="",
        nodes=[node],
        templates=TEMPLATES,
        prompt_ids=prompt_ids,
        sampling=sampling or SamplingParams(max_tokens=2),
        stops=(),
        seed=seed,
        sequence=0,
        token_ids=token_ids,
        finish_reason="length",
    )
    return msgspec.structs.replace(facts, **changes)


def shown_of(signer: AnswerSigner, facts: ChoiceFacts, *, with_tokens: bool = True) -> ShownAnswer:
    """What a client has that asked for token ids."""
    given = msgspec.to_builtins(signer.certify(facts))
    tokens = list(facts.token_ids) if with_tokens else None
    return msgspec.convert({**given, "prompt_token_ids": list(facts.prompt_ids), "token_ids": tokens}, ShownAnswer)
