"""Flags, TOML files and the way back to an argv."""

from __future__ import annotations

import argparse

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.config.flags import add_flags, concerns_of, fields_of, given_values, to_argv
from shared.config.load import load
from shared.config.processes import ClusterConfig, NodeProcessConfig, RouterProcessConfig
from shared.config.settings.options import option_of
from shared.core.errors import ConfigError
from tests.support.cores.changed_config import replaced


def parse(process, argv, hidden=frozenset(), file=None, fixed=None):
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_flags(parser, process, hidden)
    return load(process, given_values(parser.parse_args(argv)), file, fixed)


def write(tmp_path, text):
    path = tmp_path / "node.toml"
    path.write_text(text, encoding="utf-8")
    return path


def test_flags_go_over_the_file_and_the_command_over_both(tmp_path):
    file = write(tmp_path, "[memory]\nkv_bytes = '1MiB'\npage_size = 8\n[node]\nrole = 'prefill'\nlease_s = 7\n")
    config = parse(NodeProcessConfig, ["--page-size", "32"], file=file, fixed={"node": {"role": "decode"}})
    assert (config.parts.memory.kv_bytes, config.parts.memory.page_size) == (1 << 20, 32)
    assert (config.parts.node.role, config.parts.node.lease_s) == ("decode", 7.0)


def test_one_file_serves_all_processes(tmp_path):
    file = write(tmp_path, "[router]\nport = 9\n[memory]\npage_size = 8\n[local]\nprefill = 2\n")
    assert parse(RouterProcessConfig, [], file=file).router.port == 9
    assert parse(NodeProcessConfig, [], file=file).parts.memory.page_size == 8
    assert parse(ClusterConfig, [], file=file).local.prefill == 2


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[memory]\npagesize = 8", "unknown key 'pagesize' in \\[memory\\]; did you mean 'page_size'"),
        ("[memori]\npage_size = 8", "unknown table \\[memori\\]; did you mean 'memory'"),
        ("[log]\nzzz = 8", "known are log_format, log_level"),
        ("memory = 3", "must be a table"),
        ("[memory]\npage_size = '8'", "page_size is '8'; it must be a whole number"),
        ("[memory]\npage_size = true", "must be a whole number"),
        ("[memory]\nprefix_cache = 1", "must be true or false"),
        ("[memory]\nkv_bytes = [1]", "number of bytes"),
        ("[memory]\nkv_bytes = '5 apples'", r"\[memory\] kv_bytes: '5 apples' is not a size"),
        ("[node]\nrouter = 'tcp://127.0.0.1:1'", "list of texts"),
        ("[cores]\ncpus = [0, 'a']", "list of whole numbers"),
        ("[memory", "not valid TOML"),
        ("[memory]\npage_size = 3", r"node.toml, \[memory\]: --page-size is 3"),
    ],
)
def test_a_bad_file_is_refused_with_the_place(tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        parse(NodeProcessConfig, [], file=write(tmp_path, text))


def test_a_missing_file_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="no such file"):
        load(NodeProcessConfig, {}, tmp_path / "nothing.toml")


def test_hidden_fields_have_no_flag(capsys):
    with pytest.raises(SystemExit):
        parse(NodeProcessConfig, ["--role", "prefill"], hidden=frozenset({"role"}))
    assert "unrecognized arguments: --role" in capsys.readouterr().err


def any_value(field, kind):
    declared = option_of(field)
    if kind is bool:
        return st.booleans()
    if declared.choices:
        return st.sampled_from(declared.choices)
    if kind is int:
        return st.integers(int(declared.low or 0), int(declared.high or 10**9))
    if kind is float:
        return st.floats(declared.low, declared.high)
    return st.just(field.default)


def some_changes(process):
    """Values of the free fields; those with rules of their own stay as they are."""
    ruled = {"page_size", "offload_bytes", "offload_disk_bytes", "prefill", "decode", "spec", "spec_topk"}
    ruled |= {"tp", "dp", "pp"}
    parts = {
        section: st.fixed_dictionaries(
            {field.name: any_value(field, kind) for field, kind in fields_of(settings) if field.name not in ruled}
        )
        for section, settings in concerns_of(process).items()
    }
    return st.fixed_dictionaries(parts)


@pytest.mark.parametrize("process", [NodeProcessConfig, RouterProcessConfig])
@given(data=st.data())
def test_to_argv_and_back_is_the_same(process, data):
    config = replaced(process(), **data.draw(some_changes(process)))
    assert parse(process, to_argv(config)) == config


def test_to_argv_keeps_lists_names_and_odd_texts():
    node = {"router": ("tcp://127.0.0.1:1", "ipc:///tmp/x"), "node_id": "--weird name"}
    config = replaced(NodeProcessConfig(), node=node, cores={"cpus": (0, 3)}, model={"model": "/a b/c.gguf"})
    assert parse(NodeProcessConfig, to_argv(config)) == config
    assert to_argv(NodeProcessConfig()) == []
