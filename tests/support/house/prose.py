"""Find sentences that must be read twice.

    python -m tests.support.house.prose --check    what `make lint` asks: findings in files that are not exempt, and
                                                   test names that are too long
    python -m tests.support.house.prose --write    take files that have become clean off the list of exempt ones
    python -m tests.support.house.prose FILE ...   every finding in these files, exempt or not

It reads docstrings, comments, texts of raised errors, log lines and help in the product and in examples/, all pages
(`*.md`, without code), and the names of the tests. prose_exempt.txt lists the files that are still to be rewritten. The
list only shrinks: a listed file without findings is a finding, and nothing adds a line. Names have no such list.
"""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[3]
EXEMPT = Path(__file__).with_name("prose_exempt.txt")
PRODUCT = ("baton_serve", "router", "prefill_node", "decode_node", "shared", "deploy")
FOLDERS = (*PRODUCT, "conformance", "examples")
NOT_OURS = {".venv", "build", "dist", "bench-out", "node_modules"}
GENERATED = {"docs/messages.md", "docs/metrics.md", "docs/rules.md"}  # read where they come from
MAX_FIRST_SENTENCE = 20  # words of a docstring's first sentence
MAX_TEST_NAME = 60  # characters
# A habit, and what to write instead.
BANNED = {
    r"\bGives\b": 'say "Returns", "Raises" or "Makes"',
    r"\b(?:[Ww]hat (?:is|are)|[Tt]hose (?:that|who|which)|[Tt]hat which)\b(?![^.?!]*\?)": "name the thing with a noun",
    r"\b(?:[Ww]hoever|[Nn]obody|[Ww]hosoever)\b": "name who does it, or does not",
    r"\b[Ss]o (?:long|many|much|often)\b": "say the number, the time or the limit",
    r"(?<![Tt]here )\b(?:is|are|was|were) no(?! longer\b| more than\b| less than\b)\b": 'say "is not a"',
    r"\b[Bb]ut for\b": 'say "except"',
    r"\b(?:[Tt]hereof|[Tt]herein|[Hh]ereby|[Ww]hereof|[Ss]uch as are)\b": "say it in today's English",
}
PATTERNS = [(re.compile(pattern), advice) for pattern, advice in BANNED.items()]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
DOCUMENTED = (ast.Module, ast.ClassDef, *FUNCTIONS)
SENTENCE_END = re.compile(r"[.!?:](?=\s|$)|\n\s*\n")
LOG_CALLS = {"debug", "info", "warning", "error", "exception"}
HELP_CALLS = {"option", "add_argument", "add_parser", "add_argument_group", "ArgumentParser"}
CODE_IN_PAGE = re.compile(r"^```.*?^```$|`[^`]*`|\]\([^)]*\)", re.MULTILINE | re.DOTALL)


class Text(NamedTuple):
    """A piece of prose. `is_docstring`: its first sentence has a length."""

    line: int
    words: str
    is_docstring: bool = False


class Finding(NamedTuple):
    line: int
    what: str


def docstrings(tree: ast.Module) -> Iterator[Text]:
    for node in ast.walk(tree):
        if isinstance(node, DOCUMENTED) and (words := ast.get_docstring(node)):
            yield Text(node.body[0].lineno, words, True)


def comments(source: str) -> Iterator[Text]:
    """Lines of comments that stand below one another are one text."""
    last = -2
    run: list[str] = []
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        if token.start[0] != last + 1 and run:
            yield Text(last - len(run) + 1, " ".join(run))
            run = []
        run.append(token.string.lstrip("#").strip())
        last = token.start[0]
    if run:
        yield Text(last - len(run) + 1, " ".join(run))


def messages(tree: ast.Module) -> Iterator[Text]:
    """Yield the texts that people read: of raised errors, log lines, flags and their help."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and node.exc is not None:
            yield from literals(node.exc)
        elif isinstance(node, ast.Call) and is_told(node):
            yield from literals(node)


def is_told(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    if name in LOG_CALLS and isinstance(call.func, ast.Attribute):
        return "log" in ast.unparse(call.func.value).lower()
    return name in HELP_CALLS


def literals(node: ast.AST) -> Iterator[Text]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Constant) and isinstance(inner.value, str):
            yield Text(inner.lineno, inner.value)


def texts_of(path: Path) -> list[Text]:
    source = path.read_text("utf-8")
    if path.suffix == ".md":
        return [Text(1, CODE_IN_PAGE.sub(lambda found: "\n" * found[0].count("\n"), source))]
    tree = ast.parse(source)
    return [*docstrings(tree), *comments(source), *messages(tree)]


def findings(texts: Iterable[Text]) -> list[Finding]:
    found = set()
    for text in texts:
        for pattern, advice in PATTERNS:
            for match in pattern.finditer(text.words):
                line = text.line + text.words.count("\n", 0, match.start())
                found.add(Finding(line, f"{match[0]!r}: {advice}"))
        if text.is_docstring and (count := len(first_sentence(text.words).split())) > MAX_FIRST_SENTENCE:
            found.add(Finding(text.line, f"the first sentence has {count} words, {MAX_FIRST_SENTENCE} at most"))
    return sorted(found)


def first_sentence(words: str) -> str:
    end = SENTENCE_END.search(words)
    return words[: end.end()] if end else words


def all_files() -> list[Path]:
    sources = [path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")]
    pages = [path for path in ROOT.rglob("*.md") if not NOT_OURS & set(path.relative_to(ROOT).parts)]
    pages = [path for path in pages if path.relative_to(ROOT).as_posix() not in GENERATED]
    return sorted([*sources, *pages])


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def exempt_names() -> list[str]:
    return [line for line in EXEMPT.read_text("utf-8").splitlines() if line and not line.startswith("#")]


def complaints(found: dict[str, list[Finding]], exempt: Sequence[str]) -> list[str]:
    """Return the complaints about files and the list. `found` has every file, also those without findings."""
    said = [f"{name}:{one.line}: {one.what}" for name, many in found.items() if name not in exempt for one in many]
    clean = [name for name in exempt if not found.get(name)]
    said += [f"{name} has no findings: take it off {EXEMPT.name} (--write)" for name in clean]
    return said + [f"{EXEMPT.name} is not sorted"] * (list(exempt) != sorted(set(exempt)))


def write(found: dict[str, list[Finding]]) -> None:
    """Take files without findings off the list. Nothing is ever added."""
    kept = sorted({name for name in exempt_names() if found.get(name)})
    head = [line for line in EXEMPT.read_text("utf-8").splitlines() if line.startswith("#")]
    EXEMPT.write_text("\n".join([*head, *kept]) + "\n", "utf-8")


def long_test_names(path: Path) -> list[Finding]:
    """Return the tests whose names are too long. Every file is held to this: no list exempts one."""
    if path.suffix != ".py":
        return []
    functions = [node for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, FUNCTIONS)]
    return [
        Finding(node.lineno, f"{node.name} has {len(node.name)} characters, {MAX_TEST_NAME} at most")
        for node in functions
        if node.name.startswith("test_") and len(node.name) > MAX_TEST_NAME
    ]


def complaints_of_test_names() -> list[str]:
    return [
        f"{name_of(path)}:{one.line}: {one.what}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for one in long_test_names(path)
    ]


def findings_in(path: Path) -> list[Finding]:
    return sorted([*findings(texts_of(path)), *long_test_names(path)])


def main(arguments: Sequence[str]) -> int:
    if not arguments:
        print(__doc__)
        return 2
    if arguments[0] not in ("--check", "--write"):
        said = [f"{name}:{one.line}: {one.what}" for name in arguments for one in findings_in(Path(name))]
    else:
        found = {name_of(path): findings(texts_of(path)) for path in all_files()}
        if arguments[0] == "--write":
            write(found)
        said = complaints(found, exempt_names()) + complaints_of_test_names()
    print("\n".join(said) or "prose: clean")
    return 1 if said else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
