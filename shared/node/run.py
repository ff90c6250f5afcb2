"""Run a node from its configuration.

prefill_node/app.py and decode_node/app.py set the core plan and the environment, and then call `run_node`.

    build_model.py   the device, the model and its drafter
    build_memory.py  how many pages and rows the device has room for
    build_core.py    scheduler and engine around both
    warm_up.py       the first steps, before clients wait
    build_node.py    links to peers, and the node
"""

from __future__ import annotations

import os
import time
from contextlib import ExitStack
from functools import partial

from shared.config.machine.systemd import notify_socket
from shared.config.processes import NodeParts, NodeProcessConfig
from shared.core.errors import BatonError, ConfigError, DeviceLost, ModelChanged, RankLost
from shared.core.exit_codes import EXIT_CONFIG
from shared.device.cpu import do_nothing
from shared.device.faults import blames_device
from shared.device.malloc import keep_freed_memory
from shared.node.assembly.build_core import build_core
from shared.node.assembly.build_node import SideOf, build_node, open_links
from shared.node.assembly.warm_up import warm_up
from shared.node.loop.daemon import Daemon
from shared.node.loop.node import Node
from shared.node.machine.compiling import KernelLog, tell_of_kernels
from shared.node.machine.cores import NodeCores
from shared.node.machine.model_files import ModelFiles, files_of_model
from shared.node.machine.ready_port import ReadyPort
from shared.node.machine.recording import FolderRecording, open_recording
from shared.node.records.core import NodeCore
from shared.node.records.request_spans import RequestSpans
from shared.node.routers.early_peers import drop_early_messages
from shared.node.routers.sources import sources_of
from shared.node.routers.watch import RouterWatch
from shared.observe.library_logs import capture_libraries
from shared.observe.log import Logger, open_log
from shared.observe.service_manager import ServiceManager
from shared.observe.tracer import Tracer, open_tracer
from shared.ranks.leader import RankProcesses
from shared.wire.keys.keyring import ring_of_node

EXIT_FAILED = 1


def run_node(config: NodeProcessConfig, make_side: SideOf) -> int:
    """Return the exit code. Raise ConfigError for errors that the user can correct."""
    parts, asked = config.parts, config.parts.node
    routers, sources = sources_of(asked.router, asked.routers_file, has_keys=parts.security.has_keys)
    ring = ring_of_node(parts.security.keys, asked.node_id)
    node_id = ring.name if ring is not None else asked.node_id or f"{asked.role}-{os.getpid()}"
    log = open_log(node_id, parts.log)
    capture_libraries(log)
    keep_freed_memory()
    links = open_links(parts, node_id, time.time_ns() // 1000, ring)
    watch = RouterWatch(routers, sources, links.wakeup.set)
    core: NodeCore | None = None
    cores = NodeCores(config.cores, parts.parallel, node_id)
    others = RankProcesses(config, node_id, partial(end_process, log))
    node: Node | None = None
    ready: ReadyPort | None = None
    tracer: Tracer | None = None
    manager = ServiceManager(notify_socket())
    kernels = KernelLog(log)
    forget_kernels = tell_of_kernels(kernels, parts.sched.device)
    try:
        files = ModelFiles(files_of_model(parts.model.model, parts.spec))
        with drop_early_messages(links):
            core = build_core(config, log, links.wakeup.set, others, cores)
            files.keep_mapped()
            warm_up(core, log)
            cores.settle(core.model, log)
        tracer = open_tracer(node_id, parts.trace, log)
        node = build_node(parts, core, links, log, make_side, cores, routers, RequestSpans(tracer, core.engine.records))
        ready = ready_port_of(parts)
        check = partial(check_parts, others, files, open_recording(parts.probe, node_id, core.engine.records, log))
        make = partial(Daemon, check=check, cores=cores, watch=watch)
        daemon = make(node, links, log, asked.drain_s, ready=ready, manager=manager)
        watch.start()
        kernels.serving()
        log.info("ready", endpoint=links.endpoint, pid=os.getpid())
        code = daemon.run()
        check_at_exit(node, log)
    except Exception as error:  # routers get no message: the links close, and routers use other nodes
        if not (isinstance(error, RankLost | DeviceLost | ModelChanged) or blames_device(error)):
            raise
        tell_end(log, error, others, is_loading=core is None)
        return EXIT_FAILED
    finally:
        with ExitStack() as ends:  # the callbacks run in reverse order, each even if others raise
            ends.callback(cores.close)
            ends.callback(core.close if core is not None else do_nothing)
            ends.callback(links.close)
            ends.callback(core.streams.stop if core is not None else do_nothing)
            ends.callback(others.close)
            ends.callback(node.side.close if node is not None else do_nothing)
            ends.callback(node.adapters.close if node is not None else do_nothing)
            ends.callback(forget_kernels)
            ends.callback(watch.close)
            ends.callback(ready.close if ready is not None else do_nothing)
            ends.callback(tracer.close if tracer is not None else do_nothing)
            ends.callback(manager.close)
    log.info("stopped")
    return code


def tell_end(log: Logger, error: Exception, others: RankProcesses, *, is_loading: bool) -> None:
    """Log a sentence for what happened outside this process, and the error, with its traceback unless a rank was lost.

    Raise ConfigError if one ended a rank."""
    own: object = error.message if isinstance(error, ModelChanged) else error
    if isinstance(error, RankLost) and is_loading:
        others.wait_for_end()  # a ConfigError may be the reason
    try:
        others.check_ranks()
    except ConfigError:
        if not isinstance(error, RankLost):
            log.error("this node can't go on", error=own)
        raise
    except RankLost as ended:
        if isinstance(error, RankLost):
            own = error.message
        if own != ended.message:
            log.error("this node can't go on", error=own)
        own = ended.message
    log.error("this node can't go on", error=own)


def end_process(log: Logger, error: BatonError) -> None:
    """End this process as the loop would, which waits for a lost rank."""
    log.error("this node can't go on", error=error.message)
    os._exit(EXIT_CONFIG if isinstance(error, ConfigError) else EXIT_FAILED)


def ready_port_of(parts: NodeParts) -> ReadyPort | None:
    port, asked = parts.probe.ready_port, parts.node
    return ReadyPort(asked.bind_host, port, asked.silence_s) if port else None


def check_parts(others: RankProcesses, files: ModelFiles, recording: FolderRecording | None) -> None:
    """Called every round. Raise RankLost, ConfigError or ModelChanged if the node can't go on."""
    others.check_ranks()
    files.check_unchanged()
    if recording is not None:
        recording.look_for_file()


def check_at_exit(node: Node, log: Logger) -> None:
    """Log problems, don't raise."""
    try:
        node.ctx.core.kv.check_integrity(idle=node.idle)
    except BatonError as error:
        log.error("KV memory does not add up", error=error)
