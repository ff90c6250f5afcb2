"""Each checkout is measured by the benches that it has, wherever it keeps them."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks.run import Part, measure

BENCH = "import pathlib, sys; pathlib.Path(sys.argv[2]).write_text('1')\n"


@pytest.mark.parametrize("command", [("-m", "benchmarks.one"), ("benchmarks/one.py",)])
@pytest.mark.parametrize("folder", ["benchmarks", "tests/bench"])
def test_a_checkout_runs_its_own_benches(tmp_path: Path, folder: str, command: tuple[str, ...]) -> None:
    (tmp_path / folder).mkdir(parents=True)
    (tmp_path / folder / "one.py").write_text(BENCH)
    assert measure(Part("one", 1, command), Console(file=io.StringIO()), tmp_path) == 1


def test_our_own_bench_measures_the_code_of_an_old_checkout(tmp_path: Path) -> None:
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "__init__.py").write_text("AGE = 1\n")
    bench = tmp_path / "ours.py"
    bench.write_text("import benchmarks.report, shared\n" + BENCH.replace("'1'", "str(shared.AGE)"))
    assert measure(Part("ours", 1, ("-P", str(bench))), Console(file=io.StringIO()), tmp_path) == 1
