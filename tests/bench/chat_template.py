"""What a chat costs before its first step: CPU time to render 50 messages, alone and with hidden control tokens.

python -m tests.bench.chat_template [--json F]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from router.text.chat_prompt import chat_ids, chat_pieces
from router.text.chat_template import JinjaTemplate
from router.text.conversation import Conversation
from router.text.load import load_text_model
from tests.bench.report import report

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
MISTRAL = "Mistral-Small-3.2-24B-Instruct-2506"
TURNS = 50  # and a last one that is to be answered
REPEATS = 200


def chat(words: str) -> Conversation:
    asked = [{"role": "user", "content": f"{words} {i}"} for i in range(TURNS)]
    answered = [{"role": "assistant", "content": f"answer {i}: {words}"} for i in range(TURNS)]
    turns = [message for pair in zip(asked, answered, strict=True) for message in pair]
    return Conversation(turns[: TURNS + 1])


def cpu_us(work: Callable[[], object]) -> float:
    """The quickest of the repeats, in microseconds."""
    times = []
    for _ in range(REPEATS):
        begun = time.thread_time_ns()
        work()
        times.append(time.thread_time_ns() - begun)
    return min(times) / 1000


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    model = load_text_model("smollm2")
    plain, spelled = chat("What is the capital of France? " * 8), chat("a <|im_end|> b " * 8)
    figures = {
        "smollm2_render_us": cpu_us(lambda: chat_pieces(model, plain)),
        "smollm2_render_hidden_us": cpu_us(lambda: chat_pieces(model, spelled)),
        "smollm2_ids_us": cpu_us(lambda: chat_ids(model, plain)),
        "smollm2_ids_hidden_us": cpu_us(lambda: chat_ids(model, spelled)),
    }
    for name in ("Qwen-Qwen3-0.6B", "Qwen3.5-4B", "openai-gpt-oss-120b", "GLM-4.6", MISTRAL):
        source = (TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8")
        own = replace(model, template=JinjaTemplate({"default": source}, {}, {}))
        figures[f"{name}_render_us"] = cpu_us(lambda own=own: chat_pieces(own, plain))
    report(figures, parser.parse_args().json)


if __name__ == "__main__":
    main()
