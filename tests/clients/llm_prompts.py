"""Simon Willison's `llm`: models from extra-openai-models.yaml, prompts, a conversation that goes on, its log."""

from __future__ import annotations

import json
import os
from typing import Any

from tally import Tally, from_arguments, own_tool

MODELS = """
- model_id: baton
  model_name: {model}
  api_base: {api}
- model_id: baton-completion
  model_name: {model}
  api_base: {api}
  completion: true
"""
SKY = "Why is the sky blue?"
GREEDY = ("-o", "temperature", "0", "-o", "max_tokens", "24")


def main(tally: Tally) -> None:
    (tally.folder / "extra-openai-models.yaml").write_text(MODELS.format(model=tally.model, api=tally.api))
    user: Any = {"role": "user", "content": SKY}
    first = answer(tally, [user])
    with tally.check("models"):
        assert "baton" in llm(tally, "models")
    with tally.check("prompt, streamed"):
        assert llm(tally, "-m", "baton", SKY, *GREEDY) == first
    with tally.check("conversation continued"):
        turns = [user, {"role": "assistant", "content": first}, {"role": "user", "content": "Is it so on Mars?"}]
        assert llm(tally, "-c", "Is it so on Mars?", *GREEDY) == answer(tally, turns)
    with tally.check("prompt, whole"):
        assert llm(tally, "-m", "baton", "--no-stream", SKY, *GREEDY) == first
    with tally.check("system prompt, stop, seed"):
        options = ("-o", "seed", "7", "-o", "stop", "the", "-o", "max_tokens", "40")
        texts = {llm(tally, "-m", "baton", "-s", "Be brief.", SKY, *options) for _ in range(2)}
        assert len(texts) == 1 and "the" not in texts.pop()
    with tally.check("usage in the log"):
        assert json.loads(llm(tally, "logs", "-n", "1", "--json"))[0]["input_tokens"] > 0
    with tally.check("completion model"):
        assert "Paris" in llm(tally, "-m", "baton-completion", "The capital of France is", *GREEDY)
    with tally.check("an error is told"):
        try:
            llm(tally, "-m", "baton", SKY, "-o", "stop", "x" * 9999)
        except RuntimeError as error:
            assert "a stop string has at most" in str(error), str(error)
        else:
            raise AssertionError("a stop string of 9999 characters was taken")


def answer(tally: Tally, messages: list[dict[str, Any]]) -> str:
    body = {"messages": messages, "max_tokens": 24, "temperature": 0}
    text: str = tally.post("/v1/chat/completions", body)["choices"][0]["message"]["content"]
    return text


def llm(tally: Tally, *arguments: str) -> str:
    printed = tally.run(own_tool("llm"), *arguments, env={**os.environ, "LLM_USER_PATH": str(tally.folder)})
    return printed.removesuffix("\n")


if __name__ == "__main__":
    main(from_arguments())
