"""Certificates of answers: changed fields, salted digests, keys, and `baton verify`."""

from __future__ import annotations

import io
import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from deploy import cli
from router.certify.key_follower import SigningKeyFollower
from router.certify.record import SALTED, BadCertificate, ShownAnswer, certified_ids, digest_of
from router.certify.signing import (
    FLAG,
    TYPE,
    AnswerSigner,
    decoded,
    encoded,
    key_id,
    make_secret,
    public_pem,
    read_public,
    read_record,
    read_signing_key,
    sign,
    verified,
)
from shared.core.errors import ConfigError
from shared.core.sampling_params import SamplingParams
from shared.observe.log import Logger
from shared.wire.sampling import LISTS
from tests.support.cores.certified import choice_facts, keys_of, new_signer, shown_of
from tests.support.worlds.router_rig import FINGERPRINT

HIDDEN: dict[str, Any] = {
    "logit_bias": ((3, 1.5), (70, 2)),
    "allowed_token_ids": (3, 70),
    "bad_words": ((80, 81),),
    "grammar": 'start: "x"',
}
SAMPLING = SamplingParams(max_tokens=9, temperature=0.7, stop_token_ids=(2,), **HIDDEN)
LIBRARY_NODE = msgspec.structs.replace(FINGERPRINT, weights="abc by transformers 5.24.0")


@pytest.fixture(scope="module")
def signer() -> AnswerSigner:
    return new_signer()


def changed(value: Any) -> Any:
    """Another value of the same JSON type."""
    if isinstance(value, str):
        return "near-ties" if value == "exact" else ("0" if value[:1] != "0" else "1") + value[1:]
    if isinstance(value, bool) or value is None:
        return "0" * 64 if value is None else not value
    return value + 1 if isinstance(value, int | float) else [*value, *value, [1]]


def changes_of(payload: Any) -> Iterator[tuple[str, Any]]:
    """(place, a copy with one other value) for every value in it, and for each member that is left out."""
    places = payload.items() if isinstance(payload, dict) else enumerate(payload)
    for name, value in places:
        copy = payload.copy()
        if isinstance(value, dict) or (isinstance(value, list) and value and isinstance(value[0], dict)):
            for inner, other in changes_of(value):
                copy[name] = other
                yield f"{name}.{inner}", copy.copy()
        else:
            copy[name] = changed(value)
            yield str(name), copy
        if isinstance(payload, dict):
            yield f"without {name}", {key: one for key, one in payload.items() if key != name}


def test_a_change_of_any_field_is_noticed(signer: AnswerSigner) -> None:
    jws = signer.certify(choice_facts(sampling=SAMPLING, stops=("end",), node=LIBRARY_NODE)).record
    keys = keys_of(signer)
    record = verified(jws, keys)
    header, payload, signature = jws.split(".")
    places = []
    for index, word in ((0, header), (1, payload)):
        for place, other in changes_of(json.loads(decoded(word))):
            words = [header, payload, signature]
            words[index] = encoded(json.dumps(other, separators=(",", ":")).encode())
            with pytest.raises(BadCertificate):
                verified(".".join(words), keys)
            places.append(place)
    names = {*record.__struct_fields__, "alg", "kid", "typ"}
    assert names <= {place.partition(".")[0] for place in places}
    assert {f"sampling.{name}" for name in record.sampling} <= set(places)


def test_a_signature_of_another_form_is_refused(signer: AnswerSigner) -> None:
    jws = signer.certify(choice_facts()).record
    text, _, signature = jws.rpartition(".")
    flipped = encoded(bytes([decoded(signature)[0] ^ 1]) + decoded(signature)[1:])
    for other in (
        text,
        f"{text}.",
        f"{text}.{flipped}",
        f"{jws}=",
        f"{jws}.{signature}",
        f"{text}.{signature[:-4]}",
        "",
    ):
        with pytest.raises(BadCertificate):
            verified(other, keys_of(signer))


def test_another_kind_of_jws_is_refused(signer: AnswerSigner) -> None:
    """The key may sign other things one day. Their signature is right."""
    payload = signer.certify(choice_facts()).record.split(".")[1]
    kid = key_id(signer.secret.public_key())
    for header in ({"typ": "jwt"}, {"alg": "none"}, {}):
        text = f"{encoded(msgspec.json.encode({'alg': 'EdDSA', 'kid': kid, 'typ': TYPE} | header))}.{payload}"
        jws = f"{text}.{encoded(signer.secret.sign(text.encode()))}"
        if not header:
            assert verified(jws, keys_of(signer)).answer == "cmpl-1"
            continue
        with pytest.raises(BadCertificate, match="it is a "):
            verified(jws, keys_of(signer))


def test_keys_change_and_old_answers_stay_certified(signer: AnswerSigner) -> None:
    newer = new_signer()
    old, new = (one.certify(choice_facts()).record for one in (signer, newer))
    with pytest.raises(BadCertificate, match=f"{key_id(signer.secret.public_key())}.*none of these"):
        verified(old, keys_of(newer))
    assert verified(old, keys_of(signer, newer)).answer == verified(new, keys_of(signer, newer)).answer == "cmpl-1"


def test_the_record_has_no_text_and_no_ids(signer: AnswerSigner) -> None:
    """Nothing in it depends on the prompt but by the salt: the same answer twice has nothing in common there."""
    facts = choice_facts(prompt_ids=(7,), token_ids=(8,), sampling=SAMPLING, stops=("secret",))
    first, second = (signer.certify(facts) for _ in range(2))
    one, two = (json.loads(decoded(given.record.split(".")[1])) for given in (first, second))
    assert "secret" not in str(one) and SAMPLING.grammar not in str(one) and first.salt not in str(one)
    assert all(len(one["sampling"][name]) == 64 for name in HIDDEN)
    assert {*SALTED, "stop_token_ids"} == {*LISTS}, "another parameter may hold a client's words"
    salted = ("template", "prompt", "tokens", "stop", "sampling")
    assert [one[name] == two[name] for name in salted] == [False] * 5
    assert {name: value for name, value in one.items() if name not in salted} == {
        name: value for name, value in two.items() if name not in salted
    }
    assert one["prompt"]["count"] == two["prompt"]["count"] == 1


def test_a_short_prompt_is_found_only_with_the_salt(signer: AnswerSigner) -> None:
    given = signer.certify(choice_facts(prompt_ids=(7,)))
    digest = verified(given.record, keys_of(signer)).prompt.digest
    other = bytes.fromhex(signer.certify(choice_facts(prompt_ids=(7,))).salt)
    for salt in (b"", bytes(32), other, given.record.encode()):
        assert digest not in {certified_ids(salt, "prompt", [token]).digest for token in range(100)}
    found = [t for t in range(100) if certified_ids(bytes.fromhex(given.salt), "prompt", [t]).digest == digest]
    assert found == [7]


def test_what_is_shown_must_be_what_was_certified(signer: AnswerSigner) -> None:
    shown = shown_of(signer, choice_facts(sampling=SAMPLING))
    record = verified(shown.record, keys_of(signer))
    assert shown.check_shown(record) == ["prompt", "tokens", *HIDDEN]
    other = signer.certify(choice_facts()).salt
    for change in (
        {"prompt_token_ids": [1, 2]}, {"prompt_token_ids": [1, 2, 4]}, {"token_ids": [5, 4]}, {"token_ids": []},
        {"token_ids": [-1]}, {"token_ids": [1 << 40]}, {"salt": other}, {"salt": None},
        {"sampling": {"grammar": "start: /x/"}},
        {"sampling": {"bad_words": [[80, 82]]}}, {"sampling": {"bad_words": 5}}, {"sampling": {"temperature": 0.7}},
    ):  # fmt: skip
        with pytest.raises(BadCertificate):
            msgspec.structs.replace(shown, **change).check_shown(record)
    bare = ShownAnswer(record=shown.record)
    assert bare.check_shown(record) == []


def test_digests_of_different_things_differ() -> None:
    salt = bytes(32)
    assert certified_ids(salt, "prompt", [1]).digest != certified_ids(salt, "tokens", [1]).digest
    assert digest_of(salt, "stop", b"") != digest_of(salt, "sto", b"p")


def test_parameters_come_back_as_nodes_got_them(signer: AnswerSigner) -> None:
    record = verified(signer.certify(choice_facts(sampling=SAMPLING)).record, keys_of(signer))
    assert record.sampling_params(msgspec.to_builtins(HIDDEN)) == SAMPLING
    with pytest.raises(BadCertificate, match="with bad_words, not shown"):
        record.sampling_params({name: value for name, value in HIDDEN.items() if name != "bad_words"})
    newer = msgspec.structs.replace(record, sampling=record.sampling | {"warmth": 1})
    with pytest.raises(BadCertificate, match="'warmth'"):
        newer.sampling_params(HIDDEN)
    assert record.replays == "exact"
    of_library = verified(signer.certify(choice_facts(node=LIBRARY_NODE)).record, keys_of(signer))
    assert of_library.replays == "near-ties"
    hostile = msgspec.structs.replace(record, sampling=record.sampling | {"temperature": -1.0})
    for one in (hostile, msgspec.structs.replace(record, sampling={"max_tokens": "9"})):
        with pytest.raises(BadCertificate, match="sampling parameters"):
            one.sampling_params(HIDDEN)


# The keys


def test_a_key_file_is_made_once_and_private(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "router.pem"
    assert cli.main(["keys", "certificate", str(file)]) == 0
    first = capsys.readouterr().out
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert cli.main(["keys", "certificate", str(file)]) == 0
    assert capsys.readouterr().out == first and first.startswith("-----BEGIN PUBLIC KEY-----")
    assert "PRIVATE" not in first
    secret = read_signing_key(str(file))
    assert secret is not None and public_pem(secret.public_key()) == first
    assert read_signing_key("") is None


def test_an_open_or_wrong_key_file_ends_the_start(tmp_path: Path) -> None:
    file = tmp_path / "router.pem"
    public = public_pem(make_secret(file))
    for mode in (0o640, 0o604, 0o660):
        file.chmod(mode)
        with pytest.raises(ConfigError, match=f"{FLAG} .*open to others"):
            read_signing_key(str(file))
    file.chmod(0o600)
    for text in (public, "", "nonsense"):
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"{FLAG} .*holds no Ed25519 key"):
            read_signing_key(str(file))
    with pytest.raises(ConfigError, match="No such file"):
        read_signing_key(str(tmp_path / "none"))


def test_a_new_key_signs_and_old_answers_stay_certified(tmp_path: Path) -> None:
    """The file is replaced while the router runs. An unusable file changes nothing, and is told once."""
    file, told = tmp_path / "router.pem", io.StringIO()
    keys = [make_secret(file)]
    secret = read_signing_key(str(file))
    assert secret is not None
    signer = AnswerSigner(secret, {})
    follower = SigningKeyFollower(str(file), signer, Logger("r", told))
    records = []
    for step in ("as it was", "unusable", "unusable", "gone", "another"):
        if step == "unusable":
            file.write_text("half a key")
        elif step == "gone":
            file.unlink()
        elif step == "another":
            keys.append(make_secret(tmp_path / "next.pem"))
            (tmp_path / "next.pem").replace(file)
        follower.take_key(*follower.read_key())
        records.append(signer.certify(choice_facts()).record)
    public = tmp_path / "public.pem"
    public.write_text("".join(map(public_pem, keys)))
    assert [read_record(one)[0].kid for one in records] == [key_id(keys[0])] * 4 + [key_id(keys[1])]
    assert len({verified(one, read_public([public])).answer for one in records}) == 1
    lines = told.getvalue().splitlines()
    assert ["stays as it was" in line for line in lines] == [True, True, False]
    assert "holds no Ed25519 key" in lines[0] and "No such file" in lines[1] and key_id(keys[1]) in lines[2]


def test_a_file_may_have_many_public_keys(tmp_path: Path) -> None:
    first, second = (public_pem(make_secret(tmp_path / name)) for name in ("a", "b"))
    both = tmp_path / "both.pem"
    both.write_text(f"# of 2026\n{first}# of 2027\n{second}")
    assert len(read_public([both])) == 2
    with pytest.raises(ConfigError, match="holds no public key"):
        read_public([tmp_path / "a"])
    with pytest.raises(ConfigError, match="No such file"):
        read_public([tmp_path / "none"])


# baton verify


@pytest.fixture
def public(tmp_path: Path, signer: AnswerSigner) -> str:
    file = tmp_path / "public.pem"
    file.write_text(public_pem(signer.secret.public_key()))
    return str(file)


def saved(tmp_path: Path, text: str) -> str:
    file = tmp_path / "answer"
    file.write_text(text)
    return str(file)


def test_verify_says_what_is_certified(
    tmp_path: Path, signer: AnswerSigner, public: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = msgspec.to_builtins(signer.certify(choice_facts()))
    answer = {"id": "cmpl-1", "prompt_token_ids": [1, 2, 3], "choices": [{"certificate": given, "token_ids": [4, 5]}]}
    assert cli.main(["verify", saved(tmp_path, json.dumps(answer, indent=2)), "--key", public]) == 0
    said = capsys.readouterr().out
    for words in (
        "certified by the key",
        "choice 0 of cmpl-1",
        "2 tokens of m",
        "seed 7",
        "2026-",
        "prompt and tokens",
    ):
        assert words in said, said


def test_verify_reads_a_stream_s_events_and_lines(
    tmp_path: Path, signer: AnswerSigner, public: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Two choices, in pieces; then two answers in lines, of which one is not as it was signed."""
    given = [msgspec.to_builtins(signer.certify(choice_facts(choice=index))) for index in range(2)]
    chunks = [
        {"id": "a", "choices": [{"index": 0, "token_ids": [], "prompt_token_ids": [1, 2, 3]}]},
        {"id": "a", "choices": [{"index": 1, "token_ids": [4], "prompt_token_ids": [1, 2, 3]}]},
        {"id": "a", "choices": [{"index": 0, "token_ids": [4]}]},
        {"id": "a", "choices": [{"index": 0, "token_ids": [5], "certificate": given[0]}]},
        {"id": "a", "choices": [{"index": 1, "token_ids": [5], "certificate": given[1]}]},
        {"id": "a", "choices": []},
    ]
    events = [f"id: x.{n}\ndata: {json.dumps(chunk)}\n" for n, chunk in enumerate(chunks)]
    text = ": waiting\n\n" + "\n".join(events) + "\ndata: [DONE]\n"
    assert cli.main(["verify", saved(tmp_path, text), "--key", public]) == 0
    assert capsys.readouterr().out.count("prompt and tokens") == 2
    lines = [{**given[0], "token_ids": [4, 5]}, {**given[1], "token_ids": [4, 6]}]
    assert cli.main(["verify", saved(tmp_path, "\n".join(map(json.dumps, lines))), "--key", public]) == 1
    said = capsys.readouterr().out.splitlines()
    assert ": certified" in said[0] and "NOT CERTIFIED: the tokens" in said[1]


def test_verify_refuses_what_nobody_signed(
    tmp_path: Path, signer: AnswerSigner, public: str, capsys: pytest.CaptureFixture[str]
) -> None:
    forged = sign(verified(signer.certify(choice_facts()).record, keys_of(signer)), new_signer().secret)
    assert cli.main(["verify", saved(tmp_path, json.dumps({"record": forged})), "--key", public]) == 1
    assert "NOT CERTIFIED" in capsys.readouterr().out
    for text in ("", "no JSON", "{}", '{"choices": [{"index": 0}]}', '{"record": 3}'):
        assert cli.main(["verify", saved(tmp_path, text), "--key", public]) == 2


def test_a_choice_without_a_certificate_is_told(
    tmp_path: Path, signer: AnswerSigner, public: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Who takes a certificate away, or a stream that broke, does not pass among certified answers."""
    given = msgspec.to_builtins(signer.certify(choice_facts()))
    choices = [{"index": 0, "certificate": given, "token_ids": [4, 5]}, {"index": 1, "token_ids": [4, 5]}]
    text = json.dumps({"id": "cmpl-1", "choices": choices})
    assert cli.main(["verify", saved(tmp_path, text), "--key", public]) == 1
    first, second = capsys.readouterr().out.splitlines()
    assert ": certified" in first and "NOT CERTIFIED: there is no certificate" in second


@pytest.mark.parametrize("name", [{"id": "cmpl-1"}, {}])
def test_an_answer_saved_twice_is_read_twice(
    tmp_path: Path, signer: AnswerSigner, public: str, capsys: pytest.CaptureFixture[str], name: dict[str, str]
) -> None:
    """A repeated request with an idempotency key gets the same answer. Other lines may have no id at all."""
    given = msgspec.to_builtins(signer.certify(choice_facts()))
    choice = {"index": 0, "certificate": given, "token_ids": [4, 5], "text": "one line\u2028in JSON"}
    line = json.dumps({**name, "choices": [choice]}, ensure_ascii=False)
    assert cli.main(["verify", saved(tmp_path, f"{line}\n{line}\n"), "--key", public]) == 0
    assert capsys.readouterr().out.count("tokens shown with it: certified") == 2


DEEP = '{"record": ' + "[" * 100_000


@pytest.mark.parametrize(
    "text",
    [
        '{"choices": [{"index": "x", "certificate": {"record": "", "salt": ""}}]}',
        '{"choices": [5]}',
        '{"choices": [{"token_ids": 5}]}',
        '{"choices": [{"certificate": 5}]}',
        DEEP,
    ],
    ids=["index", "choice", "ids", "certificate", "deep"],
)
def test_files_of_other_forms_are_unusable(tmp_path: Path, public: str, text: str) -> None:
    assert cli.main(["verify", saved(tmp_path, text), "--key", public]) == 2


def test_a_broken_line_is_named(tmp_path: Path, public: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["verify", saved(tmp_path, '{"choices": []}\n{"choices": [\n'), "--key", public]) == 2
    assert "line 2: " in capsys.readouterr().err


@pytest.mark.parametrize("part", ["header", "payload", "deep"])
def test_a_forger_can_t_write_to_the_auditor_s_terminal(
    tmp_path: Path, public: str, capsys: pytest.CaptureFixture[str], part: str
) -> None:
    """Unsigned words are quoted without characters that move the cursor or end the line."""
    words = "\r\x1b[2Kanswer: certified\n"
    header, payload = (
        {"alg": "EdDSA", "kid": "k", "typ": words if part == "header" else TYPE}, {words: 1},
    )  # fmt: skip
    data = msgspec.json.encode(payload) if part != "deep" else b'{"sampling":' + b"[" * 100_000
    jws = f"{encoded(msgspec.json.encode(header))}.{encoded(data)}.AA"
    assert cli.main(["verify", saved(tmp_path, json.dumps({"record": jws})), "--key", public]) == 1
    said = capsys.readouterr().out
    assert "NOT CERTIFIED" in said and said.removesuffix("\n").isprintable()
