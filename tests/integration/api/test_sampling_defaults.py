"""Real routers give requests the sampling values that they leave out: each source, each API, and after a fault."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import gguf
import httpx
import pytest
from tokenizers import pre_tokenizers

from shared.wire.messages import Generate
from tests.support.clusters.router_fake_node import FakeNode
from tests.support.clusters.router_process import RouterProcess, eventually
from tests.support.machine.patience import HANG_GUARD_S
from tests.support.models import tiny_gguf
from tests.support.models.tiny_llama import VOCAB
from tests.support.web.hub_rig import write_tokenizer
from tests.support.worlds.lost_streams import Event, last_id

NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
NEUTRAL = (1.0, 1.0, 0, 0.0, 1.0)
OWN = (0.7, 0.8, 20, 0.05, 1.05)
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hi", "max_tokens": 4},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/messages": {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
}
HAS = {"/v1/completions": 5, "/v1/chat/completions": 5, "/v1/messages": 3, "/v1/responses": 2}  # of NAMES


def write_folder(folder: Path) -> Path:
    write_tokenizer(folder)
    (folder / "config.json").write_text(json.dumps({"vocab_size": VOCAB, "max_position_embeddings": 512}))
    own = {**dict(zip(NAMES, OWN, strict=True)), "do_sample": True, "eos_token_id": 0}
    (folder / "generation_config.json").write_text(json.dumps(own))
    return folder


def write_gguf(folder: Path) -> Path:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())

    def add(writer: gguf.GGUFWriter) -> None:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_list([*letters, "ab"])
        writer.add_token_merges(["a b"])
        writer.add_token_types([1] * (len(letters) + 1))
        writer.add_float32("general.sampling.temp", 0.7)
        writer.add_float32("general.sampling.top_p", 0.8)
        writer.add_int32("general.sampling.top_k", 20)
        writer.add_float32("general.sampling.min_p", 0.05)
        writer.add_float32("general.sampling.penalty_repeat", 1.05)
        writer.add_int32("general.sampling.mirostat", 0)

    return tiny_gguf.write(folder / "tiny.gguf", {}, more=add)


def write_file(folder: Path) -> Path:
    (folder / "own.json").write_text('{"temperature": 0.25, "seed": 1}')
    return folder / "own.json"


def start(source: str, folder: Path, *flags: str) -> RouterProcess:
    model = {"folder": write_folder, "gguf": write_gguf}.get(source, lambda _: "smollm2")(folder)
    wanted = {"neutral": "neutral", "file": str(write_file(folder))}.get(source, "model")
    return RouterProcess("--sampling-defaults", wanted, *flags, model=str(model))


def sampling_of(generate: Generate) -> tuple[float, ...]:
    return tuple(getattr(generate.sampling, name) for name in NAMES)


@pytest.mark.parametrize(
    ("source", "wanted", "unused"),
    [
        ("folder", OWN, "do_sample"),
        ("gguf", OWN, "mirostat"),
        ("table", (0.2, 0.9, 0, 0.0, 1.0), "none"),
        ("file", (0.25, 1.0, 0, 0.0, 1.0), "seed"),
        ("neutral", NEUTRAL, "none"),
    ],
)
def test_each_source_at_each_api(tmp_path: Path, source: str, wanted: tuple[float, ...], unused: str) -> None:
    router = start(source, tmp_path)
    node = FakeNode("decode", router.nodes, "d").start()
    try:
        with httpx.Client(base_url=router.url, timeout=HANG_GUARD_S) as client:

            def asked(path: str, own: dict[str, Any]) -> tuple[float, ...]:
                client.post(path, json=BODIES[path] | own).raise_for_status()
                return sampling_of(node.generates[-1])

            for path, known in HAS.items():
                assert asked(path, {}) == wanted
                assert asked(path, dict.fromkeys(NAMES[:known])) == wanted
                given = (0.5, 0.6, 7, 0.1, 1.2)[:known]
                assert asked(path, dict(zip(NAMES, given, strict=False))) == given + wanted[known:]
            card = client.get("/v1/models").json()["data"][0]
            assert tuple(card["sampling_defaults"][name] for name in NAMES) == wanted
            sliders = re.findall(r'type="range" id="(\w+)"', client.get("/").text)
            assert "temperature" in sliders and {*sliders} <= {*NAMES}  # the page looks them up there
    finally:
        node.stop()
        assert router.stop() == 0
    assert sum(f"unused={unused}" in line for line in router.lines) == 1


@pytest.fixture
def nodes(request: pytest.FixtureRequest) -> Iterator[list[FakeNode]]:
    started: list[FakeNode] = []
    yield started
    for node in started:
        node.stop()


def test_a_stream_keeps_them_when_its_node_dies(tmp_path: Path, nodes: list[FakeNode]) -> None:
    router = start("folder", tmp_path, "--resume-wait-s", str(HANG_GUARD_S))
    body = BODIES["/v1/chat/completions"] | {"max_tokens": 60, "stream": True}
    try:
        nodes.append(FakeNode("decode", router.nodes, "d0", burst=1).start())
        with ThreadPoolExecutor(1) as pool:
            answer = pool.submit(httpx.post, f"{router.url}/v1/chat/completions", json=body, timeout=HANG_GUARD_S)
            eventually(lambda: nodes[0].generates)
            nodes[0].paused.set()
            nodes.append(FakeNode("decode", router.nodes, "d1").start())
            nodes[0].stop()
            assert answer.result(HANG_GUARD_S).status_code == 200
        assert nodes[1].generates[0].key.attempt == 1
        assert sampling_of(nodes[1].generates[0]) == sampling_of(nodes[0].generates[0]) == OWN
    finally:
        assert router.stop() == 0


def events_of(text: str) -> list[Event]:
    return [Event(event) for event in text.split("\n\n")[:-1]]


def said_one_by_one(node: FakeNode, url: str, **asked: Any) -> str:
    """Return a stream whose node says a token when the one before has come: the last ones have events of their own."""
    came: list[str] = []

    def read() -> None:
        with httpx.stream("POST", url, timeout=HANG_GUARD_S, **asked) as answer:
            came.extend(answer.iter_text())

    node.paused.set()
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(read)
        eventually(lambda: node.num_running)
        for _ in range(4):
            before = len(came)
            node.say_one()
            eventually(lambda before=before: len(came) > before)
        reading.result(HANG_GUARD_S)
    return "".join(came)


def unnumbered(event: Event) -> str:
    return re.sub(r'"sequence_number":\d+', "", event.raw)  # under load, tokens share events


@pytest.mark.parametrize("path", BODIES)
def test_a_stream_keeps_them_at_another_router(tmp_path: Path, nodes: list[FakeNode], path: str) -> None:
    key = tmp_path / "key"
    key.write_text("sesame\n")
    key.chmod(0o600)
    flags = ("--api-key-file", str(key))
    routers = [start("folder", tmp_path, *flags)]
    routers.append(RouterProcess(*flags, model=str(tmp_path)))
    headers = {"Authorization": "Bearer sesame", "X-Stream-Ids": "1"}
    body = BODIES[path] | {"stream": True}
    try:
        nodes += [FakeNode("decode", router.nodes, f"d{i}").start() for i, router in enumerate(routers)]
        whole = events_of(said_one_by_one(nodes[0], routers[0].url + path, json=body, headers=headers))
        headers["Last-Event-ID"] = last_id(whole[:2])
        rest = httpx.post(routers[1].url + path, json=body, headers=headers, timeout=HANG_GUARD_S)
        assert rest.status_code == 200, rest.text
        assert unnumbered(events_of(rest.text)[-1]) == unnumbered(whole[-1])
        assert sampling_of(nodes[1].generates[0]) == sampling_of(nodes[0].generates[0]) == OWN
    finally:
        for router in routers:
            assert router.stop() == 0
