"""Make training data: the model's answers to prompts, which are read from a file or invented.

The model invents prompts by continuing its chat template at the user's turn (like Magpie, arXiv 2406.08464). Files grow
line by line, so a restarted run makes only missing lines.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deploy.tools.head.data import TrainingAnswer, read_answers
from deploy.tools.head.generate import Generator, Task
from router.text.chat_prompt import chat_ids, chat_text
from router.text.conversation import Conversation
from router.text.interface import TextModel, decode_ids
from shared.core.errors import ConfigError

MARK = "\N{OBJECT REPLACEMENT CHARACTER}"  # takes the place of the user's words in a template
INVENTED_LIMIT = 160  # an invented prompt has at most this many ids


@dataclass(frozen=True, slots=True)
class InventedPrompt:
    """Settings for the answers. Prompts use `temperatures` in turn. `limit`: the most ids in an answer."""

    temperatures: tuple[float, ...]
    limit: int


def read_prompts(path: Path) -> list[str]:
    """Read one prompt per line: {"prompt": ...} or plain text. Raise ConfigError for an unreadable file or line."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"can't read {path}: {error}") from error
    return [_prompt(path, number, line) for number, line in enumerate(lines, 1) if line.strip()]


def _prompt(path: Path, number: int, line: str) -> str:
    if not line.startswith("{"):
        return line
    try:
        return str(json.loads(line)["prompt"])
    except (ValueError, KeyError) as error:
        raise ConfigError(f"{path}:{number} has no prompt: {error!r}") from error


def prompt_ids(text: TextModel, prompt: str) -> tuple[int, ...]:
    """Return a user message's ids in the chat template, as the API renders it."""
    return tuple(chat_ids(text, _one_turn(prompt)))


def _one_turn(prompt: str) -> Conversation:
    return Conversation([{"role": "user", "content": prompt}])


def user_turn(text: TextModel) -> tuple[int, ...]:
    """Return the ids that the chat template puts before the user's words.

    Raise ConfigError if the template changes these words.
    """
    before, mark, _ = chat_text(text, _one_turn(MARK)).partition(MARK)
    if not mark:
        raise ConfigError("this model's chat template changes the user's words, so the model can't invent prompts")
    return tuple(text.tokenizer.encode(before, add_special=False))


def invent(generator: Generator, text: TextModel, path: Path, count: int, told: Callable[[int], None]) -> list[str]:
    """Invent prompts until `path` has `count` different complete prompts, as {"prompt": ...} lines."""
    found = dict.fromkeys(read_prompts(path) if mend(path) else [])
    task = Task(0, user_turn(text), 1.0, INVENTED_LIMIT)

    def tasks() -> Iterator[Task]:
        while len(found) < count:
            yield task

    with path.open("a", encoding="utf-8") as file:
        for _, made in generator.run(tasks()):
            words = decode_ids(text.tokenizer, made).strip()
            if len(found) >= count or not words or made[-1] not in text.tokenizer.facts.eos_ids or words in found:
                continue
            found[words] = None
            file.write(json.dumps({"prompt": words}, ensure_ascii=False) + "\n")
            file.flush()
            told(len(found))
    return list(found)[:count]


def answer(
    generator: Generator,
    prompts: Sequence[tuple[int, ...]],
    invented: InventedPrompt,
    path: Path,
    told: Callable[[int, int], None],
) -> None:
    """Answer each prompt that has no answer in `path`. Then call `told` with the numbers of answers and prompts."""
    there = {one.prompt for one in read_answers(path)} if mend(path) else set()
    tasks = (
        Task(n, prompt, invented.temperatures[n % len(invented.temperatures)], invented.limit)
        for n, prompt in enumerate(prompts)
        if prompt not in there
    )
    done = sum(prompt in there for prompt in prompts)
    with path.open("a", encoding="utf-8") as file:
        for task, made in generator.run(tasks):
            file.write(line_of(TrainingAnswer(task.prompt, tuple(made), task.temperature)))
            file.flush()
            done += 1
            told(done, len(prompts))


def line_of(one: TrainingAnswer) -> str:
    return json.dumps({"p": one.prompt, "a": one.answer, "t": one.temperature}, separators=(",", ":")) + "\n"


def mend(path: Path) -> bool:
    """Drop a torn last line. Return whether the file exists. Raise ConfigError for a compressed file."""
    if not path.exists():
        return False
    if path.suffix == ".gz":
        raise ConfigError(f"{path} is compressed: it can be read but not added to")
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        path.write_bytes(whole)
    return True
