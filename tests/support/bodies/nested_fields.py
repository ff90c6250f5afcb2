"""Objects inside request bodies: by field, values that are taken and values that are refused by name."""

from __future__ import annotations

from typing import Any

Fields = dict[str, tuple[tuple[Any, ...], tuple[Any, ...]]]
SCHEMA = {"type": "object", "properties": {"a": {"type": ["string", "null"], "maxLength": 3, "default": None}}}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
ANYTHING = ((None, 1, "x", {"a": 1}), ())
MESSAGE_FIELDS: Fields = {
    "role": (("system", "developer", "user", "assistant", "tool", "function"), ("god", "", 1)),
    "content": (("x", "", [], ["x"], [{"type": "text", "text": "x"}], None), (1, [1])),
    "name": (("x", None), (1,)),
    "refusal": ((None, "", "no"), (1,)),
    "reasoning": (("x", None), (1,)),
    "reasoning_content": (("x", None), (1,)),
    "tool_call_id": (("c", None), (1,)),
    "tool_calls": ((None, [], [CALL]), ([{"id": "x"}], "x", [1])),
    "function_call": ((None, CALL["function"]), ("f", {"arguments": ""})),
    "audio": ((None,), ({"id": "x"},)),
    **dict.fromkeys(("annotations", "reasoning_details", "provider_specific_fields", "cache_control"), ANYTHING),
}
PART_FIELDS: Fields = {
    "type": (("text", "input_text", "output_text"), ("image_url", "input_audio", "file", "video_url", 1)),
    "text": (("x", ""), (1,)),
    "refusal": (("x", None), (1,)),
    "thinking": (("x", None), (1,)),
    **dict.fromkeys(("signature", "cache_control", "annotations"), ANYTHING),
    **dict.fromkeys(("title", "context", "source", "content", "name", "tool_name", "input", "url"), ANYTHING),
    **dict.fromkeys(("file", "filename", "file_data", "file_id", "file_url", "detail"), ANYTHING),
    **dict.fromkeys(("image_url", "input_audio", "audio_url", "video_url"), ANYTHING),
    **dict.fromkeys(("citations", "encrypted_content", "page_age"), ANYTHING),
}
CALL_FIELDS: Fields = {
    "function": ((CALL["function"],), ("f",)),
    "id": (("x", None), (1,)),
    "custom": (({"name": "f", "input": "x"}, None), ("f", {"input": "x"})),
    "type": (("function",), ("custom", "x", 1)),
    "index": ANYTHING,
}
FUNCTION_FIELDS: Fields = {
    "name": (("f",), (1,)),
    "arguments": (("{}", {}, {"a": 1}, "{cut", [1], 1, None), ()),
}
STREAM_FIELDS: Fields = {
    "include_usage": ((True, False, None), ("x", 1)),
    "continuous_usage_stats": ((True, False, None), ("x", 1)),
    "include_obfuscation": ((True, False, None), ("x",)),
}

FORMAT_FIELDS: Fields = {
    "type": (("text", "json_object"), ("xml", 1)),
    "json_schema": (({"name": "x", "schema": SCHEMA}, None), ("x",)),
}
SCHEMA_FIELDS: Fields = {
    "schema": ((SCHEMA, {}), ("x", 3, True)),
    "name": (("x", None), (1,)),
    "description": (("x", None), (1,)),
    "strict": ((True, False, None), ("x",)),
}
OUTPUTS_FIELDS: Fields = {
    "json": ((SCHEMA, "{}", None), (3, True)),
    "json_object": ((True, False, None), ("x",)),
    "regex": (("a", None), (1, "")),
    "choice": ((["a"], None), ("a", [1])),
    "grammar": (('start: "x"', None), (1, "")),
}
