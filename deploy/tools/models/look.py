"""Find out what a model would do here: by its JSON files and its tensors' headers, with the code that loads it."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from deploy.hub import hub as hubs
from deploy.hub.headers import described, with_headers
from deploy.hub.hub import Hub
from deploy.hub.name import HubName, parse_hub_name
from deploy.hub.served import T5, check_served, reason_in
from deploy.tools.models.words import calls_and_thoughts
from shared.config.machine.gpus import has_driver
from shared.config.machine.host_memory import host_memory
from shared.config.models import shipped_model
from shared.config.models.gguf_parts import part_names
from shared.config.models.model_folder import ModelFolder, read_folder
from shared.config.models.model_path import resolve_model
from shared.core.errors import ConfigError
from shared.device.gpu import MemoryInfo
from shared.device.torch_cuda import TorchCuda
from shared.kv.layout import PlaneSpec, page_bytes, page_windows
from shared.model.formats.opened import EncoderFolder, LibraryFolder, LoadOptions, OpenedModel, open_named
from shared.model.llama.llama import kv_planes
from shared.model.llama.llama_compiled import obstacle_of_kind
from shared.model.math.interface import ModelSpec

PAGE_SIZE = 16  # a token takes as much in pages of any size
COMPILED, BY_KERNELS, OF_CODE = "Baton, as one compiled program", "Baton, kernel by kernel", "Baton, without files"
ON_GPU = "Baton, by GPU kernels"
FOLDERS = "models--*"  # of the hub's cache


@dataclass(frozen=True, slots=True)
class Outlook:
    """Where a fact is not known, its field is "" or 0. `refusal`: why `baton up` would not serve the model, or "".

    `stored`: the format of the numbers in the files. `kv_token_bytes`: of a token that all layers still read."""

    model: str
    refusal: str = ""
    family: str = ""
    program: str = ""
    stored: str = ""
    weights_bytes: int = 0
    kv_token_bytes: int = 0
    free_bytes: int = 0
    context: int = 0
    calls: str = ""
    thoughts: str = ""


def look_at(name: str, offline: bool = False, library: str = "auto") -> Outlook:
    """Return a refusal for what can't be had."""
    try:
        hub_name = parse_hub_name(name)
        if hub_name is not None:
            return look_at_hub(hub_name, hubs.hub_of_environment(offline), library)
        path = resolve_model(name).path
        if path is None:
            return Outlook(name, program=OF_CODE)
        return look_at_files(Outlook(name), name, read_folder(path), library)
    except ConfigError as error:
        return Outlook(name, refusal=error.message)


def look_at_hub(name: HubName, hub: Hub, library: str) -> Outlook:
    """Raise ConfigError if the hub can't be asked."""
    repository, outlook = described(name, hub), Outlook(str(name))
    try:
        check_served(repository, library)
    except ConfigError as error:
        family = repository.architecture or family_of(read_folder(repository.folder))
        return replace(outlook, family=family, refusal=error.message)
    cached = repository.folder / name.file
    if not name.file:
        with tempfile.TemporaryDirectory() as above:
            folder = read_folder(with_headers(repository, Path(above)))
            return look_at_files(outlook, str(folder.path), folder, library)
    if cached.is_file():
        return look_at_files(outlook, str(cached), read_folder(cached), library)
    num_bytes, free = sum(repository.sizes[part] for part in part_names(name.file)), memory_here()[1].free_bytes
    family = repository.architecture
    return replace(outlook, family=family, stored="GGUF", weights_bytes=num_bytes, free_bytes=free)


def look_at_files(outlook: Outlook, path: str, folder: ModelFolder, library: str) -> Outlook:
    """`path`: as for --model. The tensors may be holes. Raises ConfigError for wrong JSON files."""
    device, memory = memory_here()
    outlook = replace(outlook, family=family_of(folder), free_bytes=memory.free_bytes)
    try:
        outlook = opened_outlook(outlook, path, LoadOptions("auto", library=library, memory=memory), device)
        calls, thoughts = calls_and_thoughts(path, folder)
        return replace(outlook, calls=calls, thoughts=thoughts)
    except ConfigError as error:
        return replace(outlook, refusal=f"--model {outlook.model}: {reason_in(error, folder)}")


def family_of(folder: ModelFolder) -> str:
    return str(folder.text.get("model_type") or folder.config.get("model_type") or "")


def opened_outlook(outlook: Outlook, path: str, options: LoadOptions, device: str) -> Outlook:
    opened = open_named(path, options, device)
    if isinstance(opened, LibraryFolder):
        from shared.model.library import outlook as library_outlook  # imports the library

        found = library_outlook.look_at(opened.path, options, PAGE_SIZE)
        return replace(
            outlook,
            refusal=found.lacking,
            program=found.program,
            stored=found.stored,
            weights_bytes=found.weights_bytes,
            kv_token_bytes=token_bytes(found.planes),
            context=found.context,
        )
    if isinstance(opened, EncoderFolder):
        return replace(outlook, program=T5)
    return outlook if opened is None else own_outlook(outlook, opened, device)


def own_outlook(outlook: Outlook, opened: OpenedModel, device: str) -> Outlook:
    config, asked = opened.source.config, opened.options
    spec = ModelSpec(config.name, config.vocab_size, opened.context, asked.dtype, "", (), kv_dtype=asked.formats.kv)
    refusal, reason = "", obstacle_of_kind(config)
    try:
        opened.check_memory(config)
    except ConfigError as error:
        refusal = error.message
    return replace(
        outlook,
        refusal=refusal,
        family=config.family,
        program=ON_GPU if device != "cpu" else f"{BY_KERNELS}: {reason}" if reason else COMPILED,
        stored=opened.source.stored()[0],
        weights_bytes=opened.weights_bytes(config),
        kv_token_bytes=token_bytes(kv_planes(config, spec, PAGE_SIZE)),
        context=opened.context,
    )


def token_bytes(planes: tuple[PlaneSpec, ...]) -> int:
    return page_bytes(planes) * len(page_windows(planes)) // PAGE_SIZE


def memory_here() -> tuple[str, MemoryInfo]:
    """Return the kind of device that nodes would take, and its memory."""
    gpu = TorchCuda()
    if has_driver() and gpu.is_available():
        return "cuda", gpu.memory_info(gpu.current_device())
    total, available = host_memory()
    return "cpu", MemoryInfo(available, total)


def listed() -> Iterator[tuple[str, int]]:
    """Yield the shipped model, and the models in the hub's cache, each with its bytes on the disk."""
    try:
        shipped = resolve_model(shipped_model.NAME).path
    except ConfigError:
        shipped = None
    if shipped is not None:
        yield shipped_model.NAME, shipped.stat().st_size
    for folder in sorted(hubs.hub_of_environment(offline=True).cache.glob(FOLDERS)):
        blobs = [path for path in folder.glob("blobs/*") if path.is_file()]
        yield folder.name.removeprefix("models--").replace("--", "/", 1), sum(path.stat().st_size for path in blobs)
