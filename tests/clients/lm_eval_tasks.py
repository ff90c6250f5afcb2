"""lm-eval-harness: a local task of generated answers, on local-completions and on local-chat-completions.

The right answers are Baton's own, asked for without lm-eval: all but one must count. Log-likelihood tasks are not
tried: they need echo logprobs on /v1/completions, which is not served.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tally import Tally, from_arguments, own_tool

PROMPTS = ("The capital of France is", "One, two, three,", "Water boils at", "The opposite of hot is")
TASK = """
task: baton_local
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: generate_until
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
generation_kwargs:
  until: ["\\n\\n"]
  max_gen_toks: 16
  do_sample: false
  temperature: 0
metric_list:
  - metric: exact_match
    aggregation: mean
    higher_is_better: true
"""
MODELS = {
    "local-completions": ("completions", ()),
    "local-chat-completions": ("chat/completions", ("--apply_chat_template",)),
}


def main(tally: Tally) -> None:
    for model, (path, flags) in MODELS.items():
        with tally.check(f"{model}, generate_until"):
            answers = [answer(tally, path, prompt) for prompt in PROMPTS]
            answers[-1] = "something else"
            tasks = write_task(tally.folder / model, answers)
            assert score(tally, model, path, tasks, flags) == 1 - 1 / len(PROMPTS)


def answer(tally: Tally, path: str, prompt: str) -> str:
    asked: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "stop": ["\n\n"]}
    asked |= {"messages": [{"role": "user", "content": prompt}]} if "chat" in path else {"prompt": prompt}
    choice = tally.post(f"/v1/{path}", asked)["choices"][0]
    text: str = choice["message"]["content"] if "chat" in path else choice["text"]
    return text


def write_task(folder: Path, answers: list[str]) -> Path:
    folder.mkdir()
    data = folder / "data.jsonl"
    rows = [{"prompt": prompt, "answer": text} for prompt, text in zip(PROMPTS, answers, strict=True)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "task.yaml").write_text(TASK.format(data=data))
    return folder


def score(tally: Tally, model: str, path: str, tasks: Path, flags: tuple[str, ...]) -> float:
    """Return the share of answers that lm-eval counts as right."""
    server = f"model={tally.model},base_url={tally.api}/{path},num_concurrent=2,tokenizer={tally.tokenizer}"
    arguments = ("--model", model, "--model_args", server, "--include_path", str(tasks), "--tasks", "baton_local")
    tally.run(own_tool("lm_eval"), *arguments, "--output_path", str(tasks / "out"), *flags)
    report = json.loads(next((tasks / "out").rglob("results_*.json")).read_text())
    found: float = report["results"]["baton_local"]["exact_match,none"]
    return found


if __name__ == "__main__":
    main(from_arguments())
