"""The codec: every message survives the way, everything else is a WireError, and nothing is large enough to hurt."""

from __future__ import annotations

import math
import subprocess
import sys
import tracemalloc
from typing import Any

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.core.errors import WireError
from shared.core.sampling_params import SamplingParams
from shared.wire.codec import MESSAGE_TYPES, WireLimits, decode, decode_parts, encode, key_of, sampling_of, to_wire
from shared.wire.messages import Drain, Generate, Key, Message, Prebuilt
from tests.support.wire.wire_samples import GENERATE, INLINE, KEY, MESSAGES, READY, SAMPLING, WIRE_KEY, WIRE_SAMPLING


def raw(message: Message, **changes: Any) -> bytes:
    fields = msgpack.unpackb(encode(message))
    fields.update(changes)
    return msgpack.packb(fields)


def test_the_samples_cover_every_message() -> None:
    assert {type(message).__name__ for message in MESSAGES} == set(MESSAGE_TYPES)


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_every_message_survives_the_way(message: Message) -> None:
    assert decode(encode(message)) == message


def test_keys_and_sampling_survive_the_way() -> None:
    assert key_of(to_wire(KEY)) == KEY and isinstance(to_wire(KEY), Key)
    assert sampling_of(to_wire(SAMPLING)) == SAMPLING


@pytest.mark.parametrize("changes", [{"temperature": math.inf}, {"logit_bias": [(1, 0.5), (2, math.nan)]}])
def test_one_number_that_float32_can_t_hold_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(WireError, match="float32"):
        sampling_of(msgspec.structs.replace(to_wire(SAMPLING), **changes))


EVERY_PARAMETER = SamplingParams(
    16, 0.5, 5, 0.75, 0.25, 1.5, -0.5, 2.0, ((5, -1.0),), (3, 5), ((7,), (8, 9)), 2, (1, 2), "g", 4, 2
)
IN_BYTES = bytes.fromhex(
    "de0010aa6d61785f746f6b656e7310ab74656d7065726174757265cb3fe0000000000000a5746f705f6b05a5746f705f70cb"
    "3fe8000000000000a56d696e5f70cb3fd0000000000000b272657065746974696f6e5f70656e616c7479cb3ff80000000000"
    "00b070726573656e63655f70656e616c7479cbbfe0000000000000b16672657175656e63795f70656e616c7479cb40000000"
    "00000000aa6c6f6769745f62696173919205cbbff0000000000000b1616c6c6f7765645f746f6b656e5f696473920305a962"
    "61645f776f726473929107920809aa6d696e5f746f6b656e7302ae73746f705f746f6b656e5f696473920102a76772616d6d"
    "6172a167ac6e756d5f6c6f6770726f627304af70726f6d70745f6c6f6770726f627302"
)


def test_sampling_parameters_keep_their_bytes() -> None:
    """A router and its nodes may be of two builds. Here a new parameter comes last."""
    assert msgspec.msgpack.encode(to_wire(EVERY_PARAMETER)) == IN_BYTES


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_a_missing_field_has_a_default_or_is_an_error(message: Message) -> None:
    fields = msgpack.unpackb(encode(message))
    for field in msgspec.structs.fields(message):
        rest = msgpack.packb({key: value for key, value in fields.items() if key != field.name})
        if field.required:
            with pytest.raises(WireError, match=f"missing required field `{field.name}`"):
                decode(rest)
        else:
            made = field.default if field.default_factory is msgspec.NODEFAULT else field.default_factory()
            assert decode(rest) == msgspec.structs.replace(message, **{field.name: made})


def newer(value: Any) -> Any:
    """The value as a later version could write it: each struct, at any depth, has one more field."""
    if isinstance(value, msgspec.Struct):
        fields = {name: newer(getattr(value, name)) for name in value.__struct_fields__}
        if value.__struct_config__.array_like:
            return [*fields.values(), {"surprise": [1]}]
        tag = {"t": type(value).__name__} if isinstance(value, Message) else {}
        return tag | fields | {"surprise": [{}, b"1"]}
    if isinstance(value, dict):
        return {key: newer(one) for key, one in value.items()}
    return [newer(one) for one in value] if isinstance(value, list | tuple) else value


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_fields_of_a_newer_version_are_skipped(message: Message) -> None:
    assert decode(msgpack.packb(newer(message))) == message


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\xc1", b"\xc0", b"\x80", b"\x90", msgpack.packb({"t": "Nobody"}), msgpack.packb({"t": 5}),
        msgpack.packb({"t": ["Hello"]}), msgpack.packb(["Drain", "d"]), msgpack.packb({"t": "Message"}),
        encode(Drain("d", "")) + b"\x00", b"\x91" * 100_000, b"\x81\xa1t" * 2000, b"\xdd\xff\xff\xff\xff",
        b"\xdf\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc6\xff\xff\xff\xff", b"\x81\xa1t\xd6\xff\x00\x00\x00\x00",
        b"\x81\xa1t\xa1\xff", b"\x82\xa1t\xa5Drain\x01\x02", b"\x82\xa1t\xa5Drain\x90\x02",
    ],
    ids=lambda data: data[:12].hex() or "empty",
)  # fmt: skip
def test_malformed_bytes_are_wire_errors(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (GENERATE, {"prompt_ids": []}), (GENERATE, {"prompt_ids": [-1]}), (GENERATE, {"prompt_ids": [1 << 31]}),
        (GENERATE, {"prompt_ids": ["1"]}), (GENERATE, {"prompt_ids": [1.0]}), (GENERATE, {"prompt_ids": [True]}),
        (GENERATE, {"ended": [2]}), (GENERATE, {"ended": [0, 1]}), (GENERATE, {"ended": [-1]}),
        (Drain("d", ""), {"then": "dance"}), (GENERATE, {"num_sequences": 3}), (GENERATE, {"num_sequences": 0}),
        (GENERATE, {"seed": -1}),
        (GENERATE, {"key": ["r", 1, "x", 0]}), (GENERATE, {"key": ["r", 1, "x", 0, -1]}), (GENERATE, {"key": None}),
        (READY, {"pages": [1]}), (READY, {"inline": True}), (READY, {"pool": None}), (READY, {"digests": [1, -1]}),
        (Drain("d", ""), {"node_id": ""}), (Drain("d", ""), {"node_id": "x" * 300}),
        (Prebuilt(WIRE_KEY, 7, 11, [], 3, 0, b""), {"committed": 0}),
    ],
)  # fmt: skip
def test_values_out_of_range_are_wire_errors(message: Message, changes: dict[str, Any]) -> None:
    with pytest.raises(WireError):
        decode(raw(message, **changes))


@pytest.mark.rule("H36")
@pytest.mark.parametrize(
    "changes",
    [
        {"temperature": math.nan}, {"temperature": -0.1}, {"top_p": 0.0}, {"top_p": math.inf}, {"min_p": 2.0},
        {"repetition_penalty": 0.0}, {"presence_penalty": math.nan}, {"frequency_penalty": -math.inf},
        {"logit_bias": [[1, math.nan]]}, {"logit_bias": [[1, 0.0]] * 301}, {"stop_token_ids": [1] * 65},
        {"max_tokens": 0}, {"min_tokens": -1}, {"top_k": -1}, {"num_logprobs": 21}, {"num_logprobs": -2},
        {"prompt_logprobs": 21}, {"prompt_logprobs": -2},
        {"max_tokens": 1 << 31}, {"min_tokens": 1 << 31}, {"top_k": 1 << 31}, {"temperature": 1e39},
        {"presence_penalty": -1e39}, {"logit_bias": [[1, 1e39]]},
    ],
)  # fmt: skip
def test_sampling_that_would_harm_is_a_wire_error(changes: dict[str, Any]) -> None:
    sampling = {**msgspec.to_builtins(WIRE_SAMPLING), **changes}
    with pytest.raises(WireError):
        decode(raw(GENERATE, sampling=sampling))


def test_limits_are_limits() -> None:
    small = WireLimits(max_prompt_tokens=4, max_control_bytes=700)
    assert decode(raw(GENERATE, prompt_ids=[1, 2, 3]), small)
    with pytest.raises(WireError, match="tokens"):
        decode(raw(GENERATE, prompt_ids=[1, 2, 3, 4]), small)
    with pytest.raises(WireError, match="700"):
        decode(raw(GENERATE, prompt_ids=[1] * 1000), small)


BOMB_ITEMS = 50_000
BOMB_HEAD = b"\xdd" + BOMB_ITEMS.to_bytes(4, "big")  # an array of BOMB_ITEMS items


@pytest.mark.parametrize("item", [b"\x80", b"\x90", b"\x91\x80"], ids=["maps", "arrays", "arrays of a map"])
@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_no_field_builds_what_it_may_not_hold(message: Message, item: bytes) -> None:
    """The defect: 11 MiB of empty maps took 700 MiB and 9 s before their type was looked at."""
    kind = type(message)
    head = bytes([0x80 | len(kind.__struct_fields__) + 1]) + msgpack.packb("t") + msgpack.packb(kind.__name__)
    for name in (*kind.__struct_fields__, "surprise"):
        data = head + msgpack.packb(name) + BOMB_HEAD + BOMB_ITEMS * item
        tracemalloc.start()
        try:
            with pytest.raises(WireError):
                decode(data)
            assert tracemalloc.get_traced_memory()[1] < len(data) + (256 << 10), name
        finally:
            tracemalloc.stop()


def test_a_prompt_of_a_million_tokens_passes() -> None:
    message = decode(raw(GENERATE, prompt_ids=list(range(1_000_000))))
    assert isinstance(message, Generate) and len(message.prompt_ids) == 1_000_000


def test_page_frames_must_fit_the_message() -> None:
    pages = [b"a" * 8, b"b" * 8]
    message, frames = decode_parts([encode(INLINE), *pages])
    assert message == INLINE and [bytes(frame) for frame in frames] == pages
    extra, missing, stray = [encode(INLINE), *pages, b"c"], [encode(INLINE)], [encode(Drain("d", "")), b""]
    wrong: tuple[list[bytes], ...] = ([], missing, extra, [encode(READY), *pages], stray)
    for parts in wrong:
        with pytest.raises(WireError):
            decode_parts(parts)
    with pytest.raises(WireError):
        decode_parts([encode(INLINE), *pages], WireLimits(max_frame_bytes=7))
    with pytest.raises(WireError):
        decode_parts([encode(INLINE), *pages], WireLimits(max_frames=1))


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=300))
def test_random_bytes_never_raise_anything_else(data: bytes) -> None:
    with pytest.raises(WireError):
        decode(data)


def decodes_or_wire_error(data: bytes) -> None:
    try:
        message = decode(data)
    except WireError:
        return
    assert encode(decode(encode(message))) == encode(message)  # as bytes, because no NaN equals itself


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(MESSAGES), st.data())
def test_truncated_and_mutated_messages_raise_nothing_else(message: Message, data: st.DataObject) -> None:
    encoded = bytearray(encode(message))
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    decodes_or_wire_error(bytes(encoded[: data.draw(st.integers(0, len(encoded)))]))
    decodes_or_wire_error(bytes(encoded))


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats() | st.binary(max_size=5)
json_like = st.recursive(
    scalars | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(MESSAGES), st.data())
def test_any_value_in_any_field_never_raises_anything_else(message: Message, data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(message.__struct_fields__))
    decodes_or_wire_error(raw(message, **{name: data.draw(json_like)}))


def test_the_wire_never_loads_torch() -> None:
    code = "import sys, shared.wire.codec, shared.wire.zeromq.link; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
