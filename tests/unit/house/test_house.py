"""The tree's measures, on small sources."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from tests.support.house import house


def module(source: str, name: str = "router.one") -> house.Module:
    return house.Module(name, name.split(".")[0], source)


def fields(source: str) -> set[str]:
    (node,) = module(source).classes
    return house.fields_of(node)


def test_words_are_those_of_comments_and_docstrings() -> None:
    source = '"""One two."""\n\n# three\n# four five\nx = "not these"  # six\n\ndef f():\n    """Seven."""\n'
    assert module(source).num_words() == 7


def test_lines_of_code_are_neither_docstrings_nor_comments() -> None:
    source = '"""One\ntwo."""\n\n# three\nx = (  # six\n    1,\n)\n\ndef f():\n    """Seven."""\n    y = """a\nb"""\n'
    assert module(source).num_code_lines() == 3 + 1 + 2


def test_a_row_has_medians_and_shares() -> None:
    source = '"""One two."""\n# three\ndef f():\n    """Four."""\n    x = 1\n\ndef g(): ...\n'
    assert house.row("router", [module(source)]) == "| router | 1 / 7 | 7, 7 | 2, 3, 3 | 0.50 | 0.143 | 1.33 |"


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("class A:\n    a: int\n    b: str = ''\n    c = 1\n", {"a", "b"}),
        ("class A:\n    def __init__(self):\n        self.a, self.b = 1, 2\n        self.c.d = self.e\n", {"a", "b"}),
        ("class A:\n    def f(self):\n        self.a = 1\n", set()),
    ],
)
def test_fields_are_annotated_or_assigned_at_first(source: str, found: set[str]) -> None:
    assert fields(source) == found


def test_names_are_counted_outside_of_interfaces() -> None:
    source = """
class Port(Protocol):
    def take(self): ...
    def give(self): ...
class Whole:
    def take(self): ...
    def give(self): ...
class Part:
    def take(self): ...
    def close(self): ...
    def __len__(self): ...
def take():
    def take(): ...
def add_arguments(): ...
"""
    counts = house.counted_names([module(source)])
    assert +counts == {"take": 2}


def test_imports_are_those_of_the_tree_lazy_ones_too() -> None:
    names = {"router.one", "router.two", "shared", "shared.core", "shared.core.keys"}
    source = "import json\nimport router.two\nfrom shared.core import keys\ndef f():\n    from shared import other\n"
    assert house.imports_of(module(source), names) == {"router.two", "shared.core.keys", "shared"}


def test_circles_are_whole_and_found_once() -> None:
    graph = {"a": {"b"}, "b": {"c", "d"}, "c": {"a"}, "d": {"e"}, "e": {"d"}, "f": {"a", "f"}}
    assert list(house.circles(graph)) == [["d", "e"], ["a", "b", "c"]]


def test_a_report_has_every_package_and_list(tmp_path: Path) -> None:
    for package in ("router", "shared", "tests"):
        (tmp_path / package / "core").mkdir(parents=True)
    wide = "class Wide:\n" + "".join(f"    f{n}: int\n" for n in range(house.MOST_FIELDS + 1))
    (tmp_path / "router" / "one.py").write_text(wide + "def f(): ...\n" * (house.MOST_DEFINITIONS + 1))
    (tmp_path / "shared" / "core" / "two.py").write_text("class Wide: ...\nimport router.one\n")
    (tmp_path / "tests" / "three.py").write_text("x = 1\n")
    lines = list(house.report(tmp_path))
    assert [line.split("|")[1].strip() for line in lines[2:6]] == ["router", "shared", "**product**", "tests"]
    assert "- 17 router.one.Wide" in lines and "- 9 f" in lines and "- Wide: router, shared.core" in lines
    assert lines[-1] == "\ncircles of imports, lazy ones too: 0"


# What mirrors an outside shape: JSON of an API or of a file, metrics, a table that a tool writes.
OUTSIDE = {
    "router.api.fields.fields.GenerationFields",
    "router.api.openai.responses_input.InputItem",
    "router.api.ask.parts.AnyPart",
    "router.api.openai.responses.ResponsesRequest",
    "shared.model.math.config.LlamaConfig",
    "deploy.tools.traffic.figures.record.RequestRecord",
    "deploy.tools.traffic.figures.outcome.RequestRow",
    "deploy.tools.traffic.figures.summary.Summary",
}
# The others of today, which may lose fields and never gain one.
WIDE = {
    "shared.engine.plan.StepPlan": 24,  # the columns of one step, which every step makes and reads as they are
    "shared.engine.step_arrays.StepArrays": 23,  # one copy sends all of them to the device
    "shared.gpu_kernel.edits.Edits": 18,  # the arguments of two kernels, which take tensors only
    "shared.wire.messages.Generate": 18,  # a wire message, whose shape two versions share
}


def test_classes_have_few_fields(product: list[house.Module]) -> None:
    large = house.large_classes(product)
    widths = {name: len(house.fields_of(node)) for name, node in large.items() if name not in OUTSIDE}
    assert large.keys() >= OUTSIDE, "a class that is narrow again, or is gone"
    assert widths == WIDE


def test_no_module_imports_itself_by_way_of_others(product: list[house.Module]) -> None:
    assert house.import_circles(product) == []


@pytest.fixture(scope="module")
def product() -> list[house.Module]:
    return house.modules_in(house.ROOT, house.PRODUCT)


def test_no_class_name_is_in_two_packages(product: list[house.Module]) -> None:
    assert house.shared_class_names(product) == []


def test_a_function_s_name_is_defined_at_most_eight_times(product: list[house.Module]) -> None:
    assert house.most(house.counted_names(product), house.MOST_DEFINITIONS) == []


def test_files_are_counted_without_those_that_make_a_package() -> None:
    names = ("a", "a.one", "a.two", "a.b", "a.b.three", "c.four")
    assert house.num_files([module("", name) for name in names]) == {"a": 2, "a.b": 1, "c": 1}


@pytest.mark.parametrize(
    ("low", "found"),
    [
        ("", {}),
        ("import a.top\n", {"a": [[".", "low"]]}),
        ("def f():\n    from a.high import one\n", {"a": [["high", "low"]]}),
    ],
)
def test_circles_of_rooms_are_found(low: str, found: dict[str, list[list[str]]]) -> None:
    top = module("from a.low import two\n", "a.top")
    high = module("from a.low.two import x\n", "a.high.one")
    assert house.room_circles([top, high, module(low, "a.low.two"), module("", "b.c.d")]) == found


def test_a_folder_has_at_most_24_files(product: list[house.Module]) -> None:
    beside = house.modules_in(house.ROOT, ("benchmarks", "conformance"))
    assert house.most(house.num_files([*product, *beside]), house.MOST_FILES) == []


def test_rooms_import_each_other_in_no_circle(product: list[house.Module]) -> None:
    beside = house.modules_in(house.ROOT, ("benchmarks", "conformance"))
    found = house.room_circles([*product, *beside])
    assert found == {"deploy": [[".", "cluster", "ray", "tools"]]}  # the command line starts tools, and they start it


def test_the_sources_of_this_tree_are_read() -> None:
    found = house.modules_in(house.ROOT, ["router"])
    assert "router.app" in {one.name for one in found} and all(isinstance(one.tree, ast.Module) for one in found[:3])


def test_no_folder_of_tests_is_too_full() -> None:
    assert house.full_rooms(house.ROOT) == [], "divide it, or find a better room: docs/where_tests_go.md"


@pytest.mark.parametrize(
    ("folder", "most"),
    [
        ("tests/unit", house.MOST_FILES),
        ("tests/unit/shared/kv", house.MOST_FILES),
        ("tests/support/models", house.MOST_FILES),
        ("tests/simulation", house.MOST_IN_A_TESTS_FOLDER),
    ],
)
def test_a_folder_with_one_file_more_is_too_full(tmp_path: Path, folder: str, most: int) -> None:
    (tmp_path / folder).mkdir(parents=True)
    for number in range(most):
        (tmp_path / folder / f"test_{number}.py").touch()
    (tmp_path / folder / "data.json").touch()
    assert house.full_rooms(tmp_path) == []
    (tmp_path / folder / "test_more.py").touch()
    assert house.full_rooms(tmp_path) == [f"{most + 1} {folder}"]


def test_no_two_unit_tests_have_one_file_name() -> None:
    """Mutants and docs/rules.md name tests by file name, without the folder."""
    names = [path.name for path in (house.ROOT / "tests" / "unit").rglob("test_*.py")]
    assert len(names) > 400 and len(names) == len(set(names))


IMPORT = re.compile(r"^ *(?:from|import) ([\w.]+)(?: import (\([^)]*\)|.*))?", re.MULTILINE)


def test_tests_of_shared_borrow_nothing_from_above() -> None:
    """Nor do their helpers, except those that read the whole tree."""
    waiting = sorted((house.ROOT / "tests" / "unit" / "shared").rglob("*.py"))
    borrowed = []
    for path in waiting:
        for module, names in IMPORT.findall(path.read_text("utf-8")):
            if module.startswith(("deploy", "benchmarks")):
                borrowed.append(f"{path.name}: {module}")
            places = [module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))]
            files = [house.ROOT / f"{place.replace('.', '/')}.py" for place in places if is_rig(place)]
            waiting += [file for file in files if file not in waiting and file.exists()]
    assert len(waiting) > 200 and not borrowed


def is_rig(module: str) -> bool:
    return module.startswith("tests.support.") and not module.startswith("tests.support.house")


def test_every_module_of_the_product_has_a_user_there(product: list[house.Module]) -> None:
    """What only tests or benches use, belongs to them. Processes and images name what they start."""
    starters = [house.ROOT / "Makefile", *(house.ROOT / "deploy").rglob("Dockerfile*")]
    texts = {path.name: path.read_text("utf-8") for path in starters} | {one.name: one.source for one in product}
    imported = {name for text in texts.values() for name in IMPORT.findall(text)}
    whole = {module for module, _ in imported} | {
        f"{module}.{one}" for module, names in imported for one in re.findall(r"\w+", names)
    }
    rooms = {one.name.rpartition(".")[0] for one in product}
    idle = {one.name for one in product if not one.name.endswith("__main__")} - whole - rooms
    assert not [
        name
        for name in idle
        if not any(name in text or name.replace(".", "/") in text for user, text in texts.items() if user != name)
    ]
