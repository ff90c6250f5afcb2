"""What users see stays as it is: flags, keys of files, metrics, HTTP paths, log events, environment variables."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator

import pytest

from tests.support.house.surface import REWRITE, SECTIONS, Trees, committed, difference, events, paths, variables


@pytest.mark.parametrize("section", SECTIONS)
def test_what_users_see_is_as_committed(section: str):
    changed = difference(section)
    if changed:
        pytest.fail(
            f"{section}: users see this change (- gone, + new)\n{changed}\n"
            f"Not intended: mend it. Intended: run `{REWRITE}`, commit the list, and tell users in CHANGELOG.md.",
            pytrace=False,
        )


def test_each_section_of_the_list_has_entries_and_nothing_else():
    assert list(committed()) == list(SECTIONS)
    assert all(committed().values())


@pytest.mark.parametrize(
    ("read", "source", "seen"),
    [
        (events, "self._log.info('up', url=url, **more)", ["info 'up' url= **="]),
        (events, "log.error(f'{name} ' + ('a' if x else 'b'))", ["error '{} a'", "error '{} b'"]),
        (events, "once.warning((peer, kind), 'dropped', why=kind)", ["warning 'dropped' why="]),
        (events, "logger.warning(text)", ["warning '{}'"]),
        (events, "def emit(self): self._log.write('info', text, {'logger': name})", ["key logger"]),
        (events, "ctx.drop(peer, 'Offer of a known request')", ["later 'Offer of a known request'"]),
        (paths, "Route('/x', Endpoint(rules, 'GET', x, needs_key=True))", ["GET /x needs_key=True"]),
        (paths, "chat = Endpoint(rules, 'POST', x)\nRoute('/chat', chat)", ["POST /chat"]),
        (variables, "os.environ['HOME'], os.getenv('TERM'), 'OMP_NUM_THREADS'", ["HOME", "OMP_NUM_THREADS", "TERM"]),
        (variables, "os.environ.get('LANG')", ["LANG"]),
    ],
)
def test_what_is_read_off_the_source(read: Callable[[Trees], Iterator[str]], source: str, seen: list[str]):
    assert sorted(line for line in read([ast.parse(source)]) if not line.startswith("launch ")) == seen
