"""Run `baton prove`: one running server by one_server.py, or each cell in three passes, which are compared.

`fresh`     One request after another, with nothing cached.
`again`     The same requests once more, with prompts from the prefix cache if the cell has one.
`together`  All requests at once, with shared batches, and with chunks beside running rows.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from deploy.cluster.own_cluster import own_cluster
from deploy.hub.local_model import local_path
from deploy.router_http import read_api_key
from deploy.router_url import all_of, parse_url
from deploy.tools.prove.cases import CASES
from deploy.tools.prove.cells import CELLS, Cell, chosen_cells
from deploy.tools.prove.client import ProveClient
from deploy.tools.prove.compare import Answers, ComparedRow, Difference, differences, table
from deploy.tools.prove.partings import NOISE
from shared.config import core_plan
from shared.config.core_plan import CorePlan
from shared.config.models import shipped_model
from shared.config.models.model_folder import read_folder
from shared.config.models.model_path import resolve_model
from shared.config.settings.hub_settings import OFFLINE_HELP
from shared.core.errors import ConfigError

PASSES = ("fresh", "again", "together")
EXIT_DIFFERENT = 1
MAX_TOKENS = {False: 24, True: 48}  # with one URL: longer
DESCRIPTION = """\
baton prove: a request's tokens depend only on model, prompt, sampling and seed. This checks it on your
model and your machine, with the same requests in every way that nodes can run them.

  baton prove URL                      any running OpenAI-compatible server: are its streams the same alone, in a
                                       crowd, from caches? are its log-probabilities, usage and JSON true?
  baton prove                          the default model, with its own cluster for each way
  baton prove --model FILE             your model: a file, a folder or org/name
  baton prove --cells handoff,zmq      only these, compared with the plainest way
  baton prove URL URL                  two Baton clusters against each other

Names the first request and token that differ, and how near a tie it was. Exits with 1 if any differs; with one URL,
differences that rounding may explain count as noise, and any untrue figure also makes it 1.

If the library transformers runs the model, its logits are first compared with the library's own (--model-library).

--layers also computes the differing token twice in this process: plainly, and in the chunks, pages and hand-off of
the way that differed. It compares each layer's input and names the first layer whose output differs. Batch mates,
streams and sockets are not replayed: if no layer differs, look there. For two URLs give --model too.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("words", nargs="*", metavar="URL", help="running routers (default: clusters of its own)")
    parser.add_argument(
        "--url", action="append", default=[], metavar="URL", help="the same as the argument URL; repeat it for two URLs"
    )
    parser.add_argument(
        "--model",
        help=f"model of the command's own clusters (default: {shipped_model.NAME}), or of the server at URL (default: "
        "its first)",
    )
    parser.add_argument(
        "--model-library",
        default="auto",
        choices=("auto", "baton", "transformers"),
        help="whose layers run the model (default: %(default)s)",
    )
    parser.add_argument("--offline", action="store_true", help=OFFLINE_HELP)
    parser.add_argument(
        "--dtype",
        choices=tuple(NOISE),
        help="number format (default: float32; of the server at URL: bfloat16); its rounding bounds the noise",
    )
    parser.add_argument("--cells", default="all", metavar="LIST", help="any of: " + ", ".join(c.name for c in CELLS))
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", help="limit of each answer (default: 24; of the server at URL: 48)"
    )
    parser.add_argument(
        "--salt", default="", metavar="TEXT", help="begin prompts like an earlier run (default: random)"
    )
    parser.add_argument(
        "--metrics", action="append", default=[], metavar="URL", help="where the server's /metrics are, if not at URL"
    )
    parser.add_argument("--json", action="store_true", help="print the report on the server at URL as JSON")
    parser.add_argument("--layers", action="store_true", help="name the layer at which the first answer differs")
    parser.add_argument("--api-key-file", type=Path, metavar="FILE", help="file with the running routers' key")
    parser.add_argument("--ca", type=Path, metavar="FILE", help="CA of the server's certificate, if not a public CA")


def run(args: argparse.Namespace) -> int:
    urls = all_of(args.words, args.url)
    args.max_tokens = MAX_TOKENS[len(urls) == 1] if args.max_tokens is None else args.max_tokens
    if not 1 <= args.max_tokens <= 1024:
        raise ConfigError(f"--max-tokens is {args.max_tokens}; it must be from 1 to 1024")
    if len(urls) == 1:
        from deploy.tools.prove.one_server import prove_one  # needs packages, which --help does not

        return prove_one(urls[0], args)
    args.model, args.dtype = args.model or shipped_model.NAME, args.dtype or "float32"
    if args.dtype == "float16":
        raise ConfigError("--dtype float16 is only for a running server: give its URL")
    if args.layers or not urls:
        args.model = local_path(args.model, args.offline, library=args.model_library)
    if not urls:
        print_check(args)
    cells = [Cell(str(one), "as it runs", ()) for one in urls] or chosen_cells(args.cells)
    reference: Answers = ()
    rows: list[ComparedRow] = []
    found: list[tuple[str, str, Difference]] = []
    for cell in cells:
        print(f"{cell.name}: {cell.about} ...", flush=True)
        with address_of(cell, args, is_running=bool(urls)) as base:
            client = ProveClient(parse_url(base), args.max_tokens, read_api_key(args.api_key_file), args.ca)
            passes = [client.one_by_one(CASES), client.one_by_one(CASES), client.together(CASES)]
            handed_over = client.handed_over()
        reference = reference or passes[0]
        different = judge(reference, passes)
        rows.append(ComparedRow(cell.name, cell.about, shares(reference, different), handed_over, client.cached_tokens))
        found += [(cell.name, name, one) for name, ones in different.items() for one in ones]
    print("\n" + table(PASSES, rows))
    if found and args.layers:
        print("\n" + layer_of(found[0], cells, reference, args))
    return report(found, len(cells))


def print_check(args: argparse.Namespace) -> None:
    """Print what the check of a library's model finds. Raises ConfigError if the model is refused."""
    from shared.model.formats.choice import uses_library

    path = resolve_model(args.model).path
    if path is None or not uses_library(read_folder(path), args.model_library):
        return
    core_plan.apply(CorePlan())
    from shared.model.formats.opened import LoadOptions
    from shared.model.library.loading import load_library_model  # loads torch and the library

    print(f"check: {load_library_model(path, LoadOptions(args.dtype)).report}", flush=True)


def layer_of(
    found: tuple[str, str, Difference], cells: Sequence[Cell], reference: Answers, args: argparse.Namespace
) -> str:
    core_plan.apply(CorePlan())
    from deploy.tools.prove.layers import mode_of, name_layer  # loads torch

    name, _, first = found
    flags = next(cell.flags for cell in cells if cell.name == name)
    case = next(index for index, one in enumerate(CASES) if one.name == first.case)
    wanted = reference[case][first.choice]
    print(f"layers: loading {args.model} ...", flush=True)
    return name_layer(args.model, args.dtype, wanted.prompt_ids, wanted.ids[: first.position], mode_of(flags))


def judge(reference: Answers, passes: Sequence[Answers]) -> dict[str, list[Difference]]:
    names = [case.name for case in CASES]
    return {name: differences(names, reference, answers) for name, answers in zip(PASSES, passes, strict=True)}


def shares(reference: Answers, different: Mapping[str, Sequence[Difference]]) -> tuple[str, ...]:
    total = sum(len(answer) for answer in reference)
    return tuple(f"{total - len(different[name])}/{total}" for name in PASSES)


def report(found: Sequence[tuple[str, str, Difference]], num_cells: int) -> int:
    if not found:
        print(f"\nAll tokens are equal in {num_cells * len(PASSES)} runs of {len(CASES)} requests.")
        return 0
    cell, name, first = found[0]
    print(f"\n{len(found)} answers differ. The first one: {cell}, {name}, {first}")
    return EXIT_DIFFERENT


@contextlib.contextmanager
def address_of(cell: Cell, args: argparse.Namespace, *, is_running: bool) -> Iterator[str]:
    if is_running:
        yield cell.name
        return
    with tempfile.TemporaryDirectory(prefix="baton-prove-") as folder:
        flags = ("--model", args.model, "--model-library", args.model_library, "--dtype", args.dtype, *cell.flags)
        with own_cluster(flags, Path(folder) / "up.log") as base:
            yield base
