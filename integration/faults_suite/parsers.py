"""Every parser of outside text, as a function of bytes. The corpus has a directory for each."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from agent.config.load import load_config
from agent.dra.api import parse_kubeconfig
from agent.dra.claims import parse_checkpoint as parse_claims
from agent.host.observe.loader_cache import parse_listing
from agent.host.observe.machine_report import parse_report
from agent.host.observe.units import parse_device_allow
from agent.host.state.driver_roots import parse_handed, parse_manifest
from agent.host.state.granted import GRANTED
from agent.host.state.owned_files import OWNED_FILES
from agent.machine.containerd import files, tables
from agent.machine.containerd.active import argument, plugin_errors
from agent.machine.kubelet.device_plugin import parse_checkpoint
from agent.model.allocatable import parse_allocatable
from agent.model.dra_status import parse_dra_status
from agent.model.gpu_states import parse_gpu_states
from agent.model.handoff import parse_handoff
from agent.model.host_status import parse_host_status
from agent.model.json_document import parse_object
from agent.model.live import parse_live
from agent.model.node_files import parse_node_files
from agent.model.pci_address import as_in_sysfs
from agent.model.remembered import parse_remembered
from agent.system.files import System
from agent.system.kernel_log import parse_record
from agent.vendors.cdi import yaml_names
from agent.vendors.cdi.document import host_paths
from agent.vendors.cdi.names import device_names
from agent.vendors.drm.machine import parse_groups
from agent.vendors.nvidia.cdi import nvidia_ctk
from agent.vendors.nvidia.cdi import verify as cdi
from agent.vendors.nvidia.cdi.runtime_config import edit_runtime_config
from agent.vendors.nvidia.devices.gpus import parse_information
from agent.vendors.nvidia.devices.make_nodes import parse_parameters
from agent.vendors.nvidia.mig import parse_instance
from agent.vendors.nvidia.xid import parse_xid
from agent.vendors.proc_devices import parse_majors, parse_misc
from tests.fakes.machine import REQUEST

CORPUS = Path(__file__).parents[2] / "tests" / "data" / "fuzz_corpus"
Parser = Callable[[bytes], object]


def _of_text(parse: Callable[[str], object]) -> Parser:
    return lambda data: parse(data.decode(errors="surrogateescape"))


def _config(data: bytes) -> object:
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as directory:
        place = Path(directory, "etc/unbounded-agent/config.toml")
        place.parent.mkdir(parents=True)
        place.write_bytes(data)
        return load_config(System(_no_program, directory))


def _no_program(argv: tuple[str, ...], timeout: float) -> NoReturn:
    raise AssertionError(f"unexpected program: {argv}")


def _spec(data: bytes) -> object:
    """Check a specification. Other text than JSON is not checked: nvidia-ctk writes JSON."""
    try:
        spec = json.loads(data)
    except (ValueError, RecursionError):
        return None
    host_paths(spec)
    return cdi.verify(spec, REQUEST, {}, frozenset())


def _toml(data: bytes) -> object:
    """Read and edit containerd's main file."""
    document = files.parse("config.toml", data)
    tables.imports("/etc/containerd/config.toml", document)
    return files.with_import(data, "/etc/containerd/conf.d/*.toml")


PARSERS: dict[str, Parser] = {
    "allocatable": parse_allocatable,
    "cdi-names": _of_text(device_names),
    "cdi-spec": _spec,
    "cdi-yaml": _of_text(yaml_names.parse),
    "claims": parse_claims,
    "command-line": lambda data: argument(data, "config"),
    "conditions": parse_host_status,
    "config": _config,
    "containerd-config": _toml,
    "containerd-plugins": _of_text(plugin_errors),
    "containerd-version": _of_text(tables.parse_version),
    "dra-status": parse_dra_status,
    "gpu-states": parse_gpu_states,
    "granted": lambda data: GRANTED.parse("granted.json", data),
    "group": _of_text(parse_groups),
    "handed": lambda data: parse_handed("driver-roots.json", data),
    "handoff": parse_handoff,
    "kernel-log": parse_record,
    "kernel-message": _of_text(parse_xid),
    "kubeconfig": lambda data: parse_kubeconfig("/etc/kubernetes/kubelet.conf", data),
    "kubelet-checkpoint": parse_checkpoint,
    "ldconfig": _of_text(parse_listing),
    "live": parse_live,
    "manifest": lambda data: parse_manifest("0.json", data),
    "mig-capability": _of_text(parse_instance),
    "node": lambda data: parse_object("node", data),
    "node-files": lambda data: parse_node_files("node-files.json", data),
    "nvidia-ctk-version": _of_text(nvidia_ctk.parse_version),
    "nvidia-information": _of_text(parse_information),
    "nvidia-parameters": _of_text(parse_parameters),
    "nvidia-runtime-config": _of_text(edit_runtime_config),
    "owned": lambda data: OWNED_FILES.parse("owned.json", data),
    "pci-address": _of_text(as_in_sysfs),
    "proc-devices": _of_text(parse_majors),
    "proc-misc": _of_text(parse_misc),
    "remembered": lambda data: parse_remembered("remembered.json", data),
    "report": parse_report,
    "unit": _of_text(parse_device_allow),
}
