"""The command line: what it hands to whom, what it says, and what it must not load."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import types
from dataclasses import replace

import pytest

from deploy import cli
from deploy.cluster import local, own_cluster, ports, ready
from deploy.cluster.facts import ClusterFacts, find_facts
from shared.config import core_plan
from shared.config.core_plan import CorePlan
from shared.config.flags import concerns_of, fields_of, given_values
from shared.config.load import load, read_file
from shared.config.processes import ClusterConfig, NodeParts, NodeProcessConfig, RouterProcessConfig
from shared.config.settings.local_settings import LocalConfig
from shared.config.settings.options import flag_name
from shared.config.settings.removed import REMOVED
from shared.config.settings.router_settings import RouterConfig
from shared.config.settings.settings import ModelConfig, NodeConfig
from shared.observe.log import open_log
from tests.support.cores.changed_config import replaced
from tests.support.machine.ports import free_port

ROUTER = "tcp://127.0.0.1:7001"


@pytest.fixture
def apps(monkeypatch):
    """Stands in for the three apps; records (app, config) and the core plan that was applied before it ran."""
    calls = []
    monkeypatch.setattr(core_plan, "apply", lambda plan: calls.append(("cores", plan)))
    for name in ("router.app", "prefill_node.app", "decode_node.app"):

        def run(config, name=name):
            calls.append((name, config))
            return 7

        monkeypatch.setitem(sys.modules, name, types.SimpleNamespace(run=run))
    return calls


@pytest.mark.parametrize(
    ("argv", "app", "kind"),
    [
        (["router", "--port", "9"], "router.app", RouterProcessConfig),
        (["prefill", "--router", ROUTER], "prefill_node.app", NodeProcessConfig),
        (["decode", "--router", ROUTER], "decode_node.app", NodeProcessConfig),
    ],
)
def test_a_daemon_gets_its_cores_first_and_then_its_config(apps, argv, app, kind):
    assert cli.main([*argv, "--model", "hashlm", "--cpus", "0"]) == 7
    (first, plan), (name, config) = apps
    assert (first, plan) == ("cores", CorePlan(cpus=(0,)))
    assert name == app and isinstance(config, kind)
    if kind is NodeProcessConfig:
        assert config.parts.node.role == argv[0]


def test_the_model_may_be_named_without_a_flag(apps):
    assert cli.main(["router", "hashlm", "--port", "9"]) == 7
    assert cli.main(["router", "hashlm", "--model", "hashlm"]) == 7
    assert [config.model.model for name, config in apps if name == "router.app"] == ["hashlm"] * 2


def shown(capsys, *argv):
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 0
    return capsys.readouterr().out


def test_help_shows_the_usual_flags_and_help_all_every_one(capsys):
    texts = [shown(capsys, "up", word) for word in ("--help", "--help-all")]
    short, whole = ({word.strip(",") for word in text.split() if word.startswith("--")} for text in texts)
    flags = {flag_name(field.name) for kind in concerns_of(ClusterConfig).values() for field, _ in fields_of(kind)}
    every = flags - {flag_name(name) for name in cli.DEALT_BY_UP}
    assert every <= whole and len(every & short) < 20 < len(every)
    assert {"--model", "--dtype", "--kv-bytes", "--port", "--api-key-file"} <= short
    assert cli.USUAL_FLAGS - {name.removeprefix("--").replace("-", "_") for name in every} <= {
        "router", "node_endpoint", "bind_host", "threads", "sampling_defaults",
    }  # fmt: skip
    assert 'packed_bytes = "20GiB"' in texts[1]


@pytest.mark.parametrize("columns", ["40", "80", "200"])
@pytest.mark.parametrize("name", cli.COMMANDS)
def test_help_all_shows_a_file_with_all_defaults(capsys, monkeypatch, tmp_path, name, columns):
    monkeypatch.setenv("COLUMNS", columns)
    text, command, file = shown(capsys, name, "--help-all"), cli.COMMANDS[name], tmp_path / "all.toml"
    assert max(map(len, text.splitlines())) <= max(int(columns), 74)
    lines = re.finditer(r'^\[\w+\]|^  \w+ = (?:\[\]|"[^"]*"|\S+)', text, re.MULTILINE)
    file.write_text("\n".join(line[0] for line in lines))
    keys = [(table, key) for table, values in read_file(file).items() for key in values]
    every = [
        (table, field.name) for table, kind in concerns_of(command.process).items() for field, _ in fields_of(kind)
    ]
    assert keys == [(table, key) for table, key in every if key not in command.hidden]
    role = {"node": {"role": "decode"}}
    assert load(command.process, {}, file, role) == load(command.process, {}, None, role)


def test_help_all_of_a_tool_has_the_flags_of_its_words(capsys):
    texts = [shown(capsys, "head", word) for word in ("--help", "--help-all")]
    assert [text.count("--max-new") for text in texts] == [0, 2]
    assert "--system" in shown(capsys, "ask", "--help-all")


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_flag_or_key_is_refused_by_name(capsys, tmp_path, name):
    for argv in ([flag_name(name)], [flag_name(name), "3"], [f"{flag_name(name)}=3"]):
        with pytest.raises(SystemExit) as ended:
            cli.main(["up", *argv])
        assert ended.value.code == 2 and f"{flag_name(name)} is gone: {REMOVED[name]}" in capsys.readouterr().err
    file = tmp_path / "old.toml"
    file.write_text(f"[limits]\n{name} = 3")
    assert cli.main(["up", "--config", str(file)]) == 2
    assert f"[limits] {name} is gone: {REMOVED[name]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["up", "hashlm", "--model", "smollm2"], "two models are named, hashlm and --model smollm2"),
        (["prefill", "--model", "hashlm"], "--router is missing"),
        (["decode", "--router", "tcp://1.2.3.4:5"], "`baton keys"),
        (["decode", "--bind-host", "0.0.0.0", "--router", "tcp://127.0.0.1:1"], "`baton keys"),
        (["router", "--node-endpoint", "tcp://0.0.0.0:1"], "`baton keys"),
        (["router", "--host", "0.0.0.0"], "proxy that speaks TLS"),
        (["router", "--model", "/nothing/here"], "no such file or folder"),
        (["up", "--model", "/nothing/here"], "no such file or folder"),
        (["up", "--prefill", "0", "--decode", "0"], "leaves no node"),
        (["up", "--config", "/nothing.toml"], "no such file"),
    ],
)
def test_what_can_not_work_is_said_and_ends_with_2(apps, capsys, argv, message):
    status = cli.main(argv)
    assert status == 2 and apps == []
    error = capsys.readouterr().err
    assert message in error and error.startswith("baton") and "Traceback" not in error


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["up", "--kv-bytes", "many"], "--kv-bytes: 'many' is not a size"),
        (["decode", "--cpus", "a"], "--cpus: 'a' is not a list of numbers"),
        (["up", "--port", "x"], "--port: invalid int value"),
        (["up", "--dtype", "int4"], "--dtype: invalid choice"),
        (["sideways"], "invalid choice: 'sideways'"),
    ],
)
def test_a_flag_that_can_not_be_read_is_named(capsys, argv, message):
    with pytest.raises(SystemExit) as ended:
        cli.main(argv)
    assert ended.value.code == 2 and message in capsys.readouterr().err


def test_flags_may_not_be_shortened(capsys):
    with pytest.raises(SystemExit):
        cli.main(["up", "--pref", "2"])
    assert "unrecognized arguments" in capsys.readouterr().err


def parsed(argv):
    """The configuration that a child started with this argv would run with."""
    args = cli.make_parser().parse_args(argv)
    command = cli.COMMANDS[args.command]
    fixed = {"node": {"role": command.fixed_role}} if command.fixed_role else {}
    return args, load(command.process, given_values(args), None, fixed)


def cluster(**local_fields):
    return ClusterConfig(
        local=LocalConfig(**local_fields),
        nodes=NodeParts(model=ModelConfig(model="hashlm", dtype="float32"), node=NodeConfig(transport="zmq")),
        router=RouterConfig(port=8123, node_endpoint="tcp://127.0.0.1:9999"),
    )


def specs_of(config, cores=(0, 1)):
    """The children where nothing has to be dealt out."""
    routers = [
        replace(config.router, router_id=name, port=config.router.port + index)
        for index, name in enumerate(config.router_names)
    ]
    return specs_with(config, routers, cores)


def specs_with(config, routers, cores=(0, 1)):
    facts = ClusterFacts(replace(config, local=config.local.on_gpus(0)), tuple(routers), cores)
    return local.child_specs(facts, parent_pid=42)


def announce(config, num_routers=1):
    routers = [replace(config.router, port=config.router.port + index) for index in range(num_routers)]
    ready.announce(ClusterFacts(config, tuple(routers), (0,)))


def test_several_routers_get_own_ports_and_every_node_dials_all():
    config, port = cluster(routers=2), free_port(2)
    routers = ports.deal_routers(replace(config, router=replace(config.router, port=port)))
    assert [(router.router_id, router.port) for router in routers] == [("router-0", port), ("router-1", port + 1)]
    specs = specs_with(config, routers)
    assert [(spec.name, spec.vital) for spec in specs[:3]] == [
        ("router-0", True),
        ("router-1", True),
        ("prefill-0", False),
    ]
    configs = [parsed(spec.argv[4:])[1] for spec in specs]
    endpoints = tuple(one.router.node_endpoint for one in configs[:2])
    assert len(set(endpoints)) == 2 and all(one.parts.node.router == endpoints for one in configs[2:])


def test_any_ports_are_different_ones():
    routers = ports.deal_routers(replaced(cluster(routers=8), router={"port": 0}))
    numbers = [port for one in routers for port in (one.port, int(one.node_endpoint.rpartition(":")[2]))]
    assert len(set(numbers)) == 16


def test_ports_end_somewhere():
    with pytest.raises(cli.ConfigError, match="65535"):
        ports.deal_routers(replaced(cluster(routers=64), router={"port": 65500}))


def test_each_router_is_announced(capsys):
    announce(cluster(), num_routers=3)
    text = capsys.readouterr().out
    assert [f"http://127.0.0.1:{8123 + index}\n" in text for index in range(3)] == [True] * 3


def test_children_may_use_up_the_time_that_requests_get():
    config = replaced(cluster(), timeouts={"shutdown_s": 100.0}, node={"drain_s": 200.0})
    assert [spec.stop_s for spec in specs_of(config)] == [105.0, 205.0, 205.0]


def test_a_tool_waits_until_its_own_cluster_has_stopped(monkeypatch):
    monkeypatch.setattr(own_cluster, "STOP_TIMEOUT_S", 0.1, raising=False)
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(7)))"
    program = [sys.executable, "-I", "-S", "-c", f"{code}; print('up', flush=True)\nwhile True: time.sleep(0.05)"]
    with subprocess.Popen(program, stdout=subprocess.PIPE) as process:
        process.stdout.readline()
        own_cluster.stop(process)
    assert process.returncode == 7


def test_a_tool_s_own_cluster_is_ready_when_it_says_so(tmp_path):
    """Only `baton up` knows how many nodes it starts: with one GPU it is one."""
    log, ended = tmp_path / "log", types.SimpleNamespace(poll=lambda: 2)
    log.write_text(f"decode-0 ready\n\n{ready.READY}: http://127.0.0.1:1\n")
    own_cluster.wait_ready(ended, log, 0.0)
    log.write_text("baton up: no such model\n")
    with pytest.raises(cli.ConfigError, match="did not start:\nbaton up: no such model"):
        own_cluster.wait_ready(ended, log, 300.0)


def test_children_share_the_cores_and_the_memory():
    specs = specs_of(cluster(prefill=4, decode=4))
    configs = [parsed(spec.argv[4:])[1] for spec in specs]
    assert [config.cores.cpus for config in configs] == [(0,)] + [(0,), (1,)] * 4
    assert sum(config.parts.memory.mem_fraction for config in configs[1:]) == pytest.approx(0.8)


@pytest.mark.parametrize("name", ["tp", "pp"])
@pytest.mark.parametrize(("both", "decode", "sizes"), [(2, 0, [2, 2]), (4, 1, [4, 1]), (1, 2, [1, 2])])
def test_prefill_and_decode_nodes_may_differ_in_ranks_and_stages(name, both, decode, sizes):
    config = replaced(cluster(prefill=1, decode=1), parallel={name: both})
    specs = specs_of(replace(config, local=replace(config.local, **{f"decode_{name}": decode})))
    assert [getattr(parsed(spec.argv[4:])[1].parts.parallel, name) for spec in specs[1:]] == sizes


def test_a_taken_port_is_refused_before_anything_starts():
    with ports.bound("127.0.0.1", 0) as taken:
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(cli.ConfigError, match=f"--port {port}: can't serve.*choose another"):
            ports.deal_routers(ClusterConfig(router=RouterConfig(port=port)))


def test_port_0_means_any_and_nodes_get_one_of_their_own():
    (router,) = ports.deal_routers(ClusterConfig(router=RouterConfig(port=0)))
    assert router.port > 0 and router.router_id == "router"
    assert router.node_endpoint.startswith("tcp://127.0.0.1:")
    assert router.node_endpoint != f"tcp://127.0.0.1:{router.port}"


def answer_once(listener, reply):
    connection, _ = listener.accept()
    with connection:
        connection.recv(4096)
        connection.sendall(reply)


def reply(status, body):
    return f"HTTP/1.1 {status} x\r\nContent-Length: {len(body)}\r\n\r\n{body}".encode()


def nodes(*ready):
    return json.dumps({"nodes": [{"ready": each} for each in ready]})


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (reply(200, nodes(True, True)), True),
        (reply(200, nodes(True)), False),
        (reply(200, nodes(True, False)), False),
        (reply(503, nodes(True, True)), False),
        (reply(200, "[1]"), False),
        (reply(200, "not json"), False),
        (b"nonsense\r\n\r\n", False),
    ],
)
def test_ready_is_a_router_with_all_nodes(answer, expected):
    with ports.bound("127.0.0.1", 0) as listener:
        listener.listen()
        server = threading.Thread(target=answer_once, args=(listener, answer))
        server.start()
        assert ready.is_ready("127.0.0.1", listener.getsockname()[1], num_nodes=2) is expected
        server.join()


def test_nobody_there_is_not_ready():
    assert ready.is_ready("127.0.0.1", ports.free_port("127.0.0.1"), num_nodes=0) is False


def test_the_announcement_can_be_pasted(capsys):
    announce(cluster())
    text = capsys.readouterr().out
    body = json.loads(text.split("-d '")[1].split("'\n")[0])
    assert body["model"] == "hashlm" and "http://127.0.0.1:8123/v1/chat/completions" in text


def test_what_has_an_encoder_is_not_asked_to_chat(capsys, tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "t5"}')
    (tmp_path / "model.safetensors").touch()
    config = replaced(cluster(), model={"model": str(tmp_path)}, router={"port": 0})
    facts = find_facts(config, open_log("up", config.nodes.log))
    ready.announce(facts)
    text = capsys.readouterr().out
    body = json.loads(text.split("-d '")[1].split("'\n")[0])
    address = f"http://127.0.0.1:{facts.routers[0].port}/v1/completions"
    assert body["prompt"] and address in text and "browser" not in text


@pytest.mark.parametrize("stream", ["stdout", "stderr"])
def test_a_full_disk_behind_its_output_ends_nothing(monkeypatch, stream):
    with open("/dev/full", "w", buffering=1) as full:
        monkeypatch.setattr(sys, stream, full)
        announce(cluster())
        ready.write_line("a line")
        monkeypatch.undo()
        with contextlib.suppress(OSError):
            full.close()


def test_ipv6_addresses_are_bracketed():
    assert ready.url("::1", 80) == "http://[::1]:80"
    assert ready.url("127.0.0.1", 80) == "http://127.0.0.1:80"


def test_the_command_itself_loads_neither_torch_nor_numpy():
    code = "import sys, deploy.cli; print(sorted({'torch', 'numpy', 'zmq', 'transformers'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def starts_alone(*command):
    """Return a command that runs `command` as the first process of a namespace, as a container does."""
    alone = ["unshare", "--pid", "--fork", "--kill-child"]
    if not shutil.which("unshare") or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("this machine makes no namespace of processes")
    return [*alone, *command]


def test_a_container_s_first_process_ends_during_its_start():
    code = "import os, signal, sys; from deploy import cli; cli.run = lambda *_: os.kill(1, signal.SIGTERM) or 0"
    program = starts_alone(sys.executable, "-c", f"{code}; sys.exit(cli.main(['up']))")
    assert subprocess.run(program, check=False).returncode == 143


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize("before", [signal.SIG_DFL, signal.SIG_IGN])
def test_only_a_first_process_needs_a_handler(monkeypatch, first, before):
    monkeypatch.setattr(os, "getpid", lambda: 1 if first else 2)
    kept = signal.signal(signal.SIGTERM, before)
    try:
        cli.main([])
        assert (signal.getsignal(signal.SIGTERM) is before) is not (first and before is signal.SIG_DFL)
    finally:
        signal.signal(signal.SIGTERM, kept)
