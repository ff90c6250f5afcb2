"""lm-eval-harness: a local task of generated answers, on local-completions and on local-chat-completions, and one of
log-likelihoods.

The right answers are Baton's own, asked for without lm-eval: all but one must count. So are the log-likelihoods; that
they are transformers' is tests/integration/models/test_scores_equal_transformers.py's to show.
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
LIKELY = """
task: baton_local
dataset_path: json
dataset_kwargs:
  data_files:
    test: {data}
test_split: test
output_type: loglikelihood
doc_to_text: "{{{{prompt}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list:
  - metric: acc
    aggregation: mean
    higher_is_better: true
"""
CITIES = (" Paris.", " four, five", " a hundred degrees.", " cold.")  # the prompts end without a space
SLACK = 1e-3
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

    with tally.check("local-completions, loglikelihood"):
        tasks = write_task(tally.folder / "likely", list(CITIES), LIKELY)
        found = likelihoods(tally, tasks)
        for prompt, ending, (value, is_greedy) in zip(PROMPTS, CITIES, found, strict=True):
            wanted, is_best = own_likelihood(tally, prompt, ending)
            assert abs(value - wanted) < SLACK and is_greedy == is_best, (prompt, ending, value, wanted)


def likelihoods(tally: Tally, tasks: Path) -> list[tuple[float, bool]]:
    """Return what lm-eval has measured, and whether each ending was the likeliest one."""
    server = f"model={tally.model},base_url={tally.api}/completions,num_concurrent=2,tokenizer={tally.tokenizer}"
    arguments = ("--model", "local-completions", "--model_args", server, "--include_path", str(tasks))
    tally.run(
        own_tool("lm_eval"), *arguments, "--tasks", "baton_local", "--output_path", str(tasks / "out"), "--log_samples"
    )
    lines = next((tasks / "out").rglob("samples_*.jsonl")).read_text().splitlines()
    samples = sorted((json.loads(line) for line in lines), key=lambda sample: sample["doc_id"])
    return [(float(value), str(best) == "True") for value, best in (sample["resps"][0][0] for sample in samples)]


def own_likelihood(tally: Tally, prompt: str, ending: str) -> tuple[float, bool]:
    """The same, asked for in one request."""
    begin = len(tally.post("/tokenize", {"prompt": prompt})["tokens"])
    asked = {"prompt": prompt + ending, "max_tokens": 0, "echo": True, "logprobs": 1}
    logprobs = tally.post("/v1/completions", asked)["choices"][0]["logprobs"]
    own, best = logprobs["token_logprobs"][begin:], logprobs["top_logprobs"][begin:]
    return sum(own), all(value == max(top.values()) for value, top in zip(own, best, strict=True))


def answer(tally: Tally, path: str, prompt: str) -> str:
    asked: dict[str, Any] = {"max_tokens": 16, "temperature": 0, "stop": ["\n\n"]}
    asked |= {"messages": [{"role": "user", "content": prompt}]} if "chat" in path else {"prompt": prompt}
    choice = tally.post(f"/v1/{path}", asked)["choices"][0]
    text: str = choice["message"]["content"] if "chat" in path else choice["text"]
    return text


def write_task(folder: Path, answers: list[str], task: str = TASK) -> Path:
    folder.mkdir()
    data = folder / "data.jsonl"
    rows = [{"prompt": prompt, "answer": text} for prompt, text in zip(PROMPTS, answers, strict=True)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "task.yaml").write_text(task.format(data=data))
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
