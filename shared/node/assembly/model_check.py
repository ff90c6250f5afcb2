"""Tell the launcher why nodes of these settings would refuse their model. Run as a process of its own:

    python -P .../launcher.py shared.node.assembly.model_check PARENT_PID --model ...   ->   a line of JSON

It reads config.json and the headers of files, no weights. The launcher itself loads no torch.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence

from shared.config.flags import add_flags, given_values
from shared.config.load import load
from shared.config.processes import NodeProcessConfig
from shared.core.errors import ConfigError
from shared.core.orphan_guard import die_with_parent
from shared.model.loading.load import check_model
from shared.node.assembly.build_model import load_options


def refused(flags: Sequence[str]) -> str:
    """Return the reason, or "". `flags`: a node's, as its command takes them."""
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, NodeProcessConfig)
    try:
        parts = load(NodeProcessConfig, given_values(parser.parse_args(flags))).parts
        parallel = parts.parallel
        check_model(parts.model.model, load_options(parts), num_stages=parallel.pp, is_divided=parallel.tp > 1)
    except ConfigError as error:
        return error.message
    return ""


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    print(json.dumps({"refused": refused(sys.argv[2:])}))
