"""A whole cluster through the CLI, spoken to with the openai SDK, as a user would. HashLM, so that ids are exact."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import httpx
import openai
import pytest

from shared.core.keys import sequence_seed
from shared.core.sampling_params import SamplingParams
from tests.support.clusters.cluster import Cluster, baton_up
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.oracles.hashlm_reference import reference_run, reference_stream

EOS = 95
TOOLS = ("--tool-format", "hermes")
LONG = "The quick brown fox jumps over the lazy dog, again and again, until the prefill node has seen enough of it. "


@pytest.fixture(scope="module", params=["shm", "zmq", "gloo"])
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    log = tmp_path_factory.mktemp("up") / "up.log"
    with baton_up(log, "--model", "hashlm", "--transport", request.param, "--heartbeat-s", "0.1", *TOOLS) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def client(cluster: Cluster) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0) as client:
        yield client


def ids_of(text: str) -> list[int]:
    return [ord(char) - 32 for char in text]


def text_of(ids: list[int]) -> str:
    return "".join(chr(32 + i) for i in ids if i != EOS)


def test_greedy_completion_equals_the_reference(client: openai.OpenAI) -> None:
    prompt = LONG * 3
    answer = client.completions.create(model="hashlm", prompt=prompt, max_tokens=40, temperature=0)
    expected = reference_run(ids_of(prompt), SamplingParams(40, temperature=0.0, stop_token_ids=(EOS,)), 0, 40)
    assert answer.choices[0].text == text_of(expected.ids)
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == len(prompt)
    assert answer.usage.completion_tokens == len(expected.ids)


def test_streams_of_many_clients_equal_the_reference(client: openai.OpenAI, cluster: Cluster) -> None:
    prompts = [LONG[: 20 + 37 * i % 100] * (1 + i % 4) + str(i) for i in range(24)]

    def one(i: int) -> list[int]:
        ids: list[int] = []
        stream = client.completions.create(
            model="hashlm",
            prompt=prompts[i],
            max_tokens=60,
            temperature=0.8,
            seed=i,
            frequency_penalty=0.3,
            stream=True,
            extra_body={"return_token_ids": True, "ignore_eos": True},
        )
        for chunk in stream:
            for choice in chunk.choices:
                ids.extend(getattr(choice, "token_ids", None) or [])
        return ids

    with ThreadPoolExecutor(12) as pool:
        got = list(pool.map(one, range(len(prompts))))
    sampling = SamplingParams(60, temperature=0.8, frequency_penalty=0.3)
    for i, prompt in enumerate(prompts):
        assert got[i] == reference_stream(ids_of(prompt), sampling, i, 60), f"stream {i}"
    cluster.eventually(cluster.at_rest, "all pages and rows are back")
    assert cluster.pages_partition()


def test_n_answers_are_the_sequences_of_their_own_seeds(client: openai.OpenAI) -> None:
    prompt = LONG * 2 + "n"
    answer = client.completions.create(
        model="hashlm", prompt=prompt, n=3, max_tokens=24, seed=5, extra_body={"ignore_eos": True}
    )
    for choice in answer.choices:
        expected = reference_stream(ids_of(prompt), SamplingParams(24), sequence_seed(5, choice.index), 24)
        assert choice.text == text_of(expected)
    assert len({choice.text for choice in answer.choices}) == 3


def test_the_second_time_the_prompt_is_cached(client: openai.OpenAI) -> None:
    prompt = "cached? " * 20
    answers = [client.completions.create(model="hashlm", prompt=prompt, max_tokens=8, temperature=0) for _ in range(2)]
    assert answers[0].choices[0].text == answers[1].choices[0].text
    details = [answer.usage.prompt_tokens_details for answer in answers if answer.usage is not None]
    assert details[1] is not None and details[1].cached_tokens is not None
    assert details[1].cached_tokens >= 144


def test_a_salt_keeps_cached_prompts_apart(client: openai.OpenAI) -> None:
    def cached(salt: str | None) -> int:
        answer = client.completions.create(
            model="hashlm", prompt="salted? " * 20, max_tokens=8, temperature=0, extra_body={"cache_salt": salt}
        )
        assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
        return answer.usage.prompt_tokens_details.cached_tokens or 0

    assert [cached(salt) > 0 for salt in ("mine", None, "yours", "mine", None)] == [False] * 3 + [True] * 2


def test_allowed_tokens_and_bad_words(client: openai.OpenAI) -> None:
    """Nothing but digits, no 3, no 1 behind a 1, and no 1 behind 68."""
    digits, bad = ids_of("0123456789"), ["3", "11", "681"]
    answer = client.completions.create(
        model="hashlm",
        prompt=LONG,
        max_tokens=200,
        seed=3,
        extra_body={"allowed_token_ids": digits, "bad_words": bad, "ignore_eos": True},
    )
    words = tuple(tuple(ids_of(space + word)) for word in bad for space in ("", " "))
    sampling = SamplingParams(200, allowed_token_ids=tuple(digits), bad_words=words)
    text = answer.choices[0].text
    assert text == text_of(reference_stream(ids_of(LONG), sampling, 3, 200))
    assert set(text) == set("012456789") and not [word for word in bad if word in text]
    free = reference_stream(ids_of(LONG), SamplingParams(200, allowed_token_ids=tuple(digits)), 3, 200)
    assert [word for word in bad if word in text_of(free)] == bad, "without the words they would stand there"


def test_a_json_schema_is_followed(client: openai.OpenAI) -> None:
    schema = {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 8}, "warm": {"type": "boolean"}},
        "required": ["city", "warm"],
        "additionalProperties": False,
    }
    answer = client.chat.completions.create(
        model="hashlm",
        messages=[{"role": "user", "content": LONG}],
        seed=5,
        n=3,
        max_completion_tokens=200,
        response_format={"type": "json_schema", "json_schema": {"name": "weather", "schema": schema, "strict": True}},
    )
    for choice in answer.choices:
        told = json.loads(choice.message.content or "")
        assert choice.finish_reason == "stop" and set(told) == {"city", "warm"} and isinstance(told["warm"], bool)
    assert len({choice.message.content for choice in answer.choices}) == 3


def test_a_call_that_is_required_is_one(client: openai.OpenAI) -> None:
    """By a model that knows nothing of tools: the grammar alone makes the call, and the schema holds."""
    parameters = {
        "type": "object",
        "properties": {"unit": {"enum": ["C", "F"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["unit", "days"],
        "additionalProperties": False,
    }
    for seed in range(3):
        answer = client.chat.completions.create(
            model="hashlm",
            messages=[{"role": "user", "content": LONG}],
            seed=seed,
            max_completion_tokens=200,
            tool_choice="required",
            parallel_tool_calls=False,
            tools=[{"type": "function", "function": {"name": "weather", "parameters": parameters}}],
        )
        (choice,) = answer.choices
        assert choice.finish_reason == "tool_calls" and choice.message.tool_calls is not None
        (call,) = choice.message.tool_calls
        arguments = json.loads(call.function.arguments)  # type: ignore[union-attr]
        assert arguments["unit"] in ("C", "F") and 1 <= arguments["days"] <= 9 and len(arguments) == 2


def test_other_names_of_structured_output(client: openai.OpenAI) -> None:
    def text(**fields: object) -> str:
        answer = client.completions.create(model="hashlm", prompt=LONG, max_tokens=60, seed=1, extra_body=fields)
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].text

    assert re.fullmatch("[0-9]{3}-[a-f]{2}", text(guided_regex="[0-9]{3}-[a-f]{2}"))
    assert text(structured_outputs={"choice": ["north", "south"]}) in ("north", "south")
    assert re.fullmatch("(yes|no)!", text(ebnf='root ::= ("yes" | "no") "!"'))
    with pytest.raises(openai.BadRequestError, match="uniqueItems"):
        text(guided_json={"type": "array", "uniqueItems": True})


def test_chat_stream_with_usage(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="hashlm",
        messages=[{"role": "user", "content": LONG}],
        max_completion_tokens=16,
        logprobs=True,
        top_logprobs=2,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"ignore_eos": True},
    )
    chunks = list(stream)
    entries = [e for c in chunks for choice in c.choices if choice.logprobs for e in choice.logprobs.content or []]
    assert len(entries) == 16 and all(len(entry.top_logprobs) == 2 for entry in entries)
    assert chunks[-1].usage is not None and chunks[-1].usage.completion_tokens == 16


def test_a_client_that_hangs_up_frees_its_pages(cluster: Cluster) -> None:
    for prompt_len in (10, 2000):
        body = {"model": "hashlm", "prompt": "x" * prompt_len, "max_tokens": 1500, "stream": True, "ignore_eos": True}
        with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=HANG_GUARD_S) as answer:
            assert answer.status_code == 200
            next(answer.iter_lines())
        cluster.eventually(cluster.at_rest, "pages are back after the hang-up")
    assert cluster.metrics()[("baton_requests_total", 'outcome="abort"')] >= 2


def test_models_health_and_errors(client: openai.OpenAI, cluster: Cluster) -> None:
    model = client.models.list().data[0]
    assert model.id == "hashlm"
    assert httpx.get(f"{cluster.url}/health", timeout=HANG_GUARD_S).status_code == 200
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="hashlm", prompt="x", max_tokens=-2)
    assert "max_tokens" in str(caught.value)
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="no-such-model", prompt="x")
