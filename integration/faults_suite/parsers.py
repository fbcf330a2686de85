"""Every parser of outside text, as a function of bytes. The corpus has a directory for each."""

import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from agent.config.load import load_config
from agent.dra.claims import parse_checkpoint as parse_claims
from agent.host.gpu_tests import parse_results
from agent.host.leave import parse_answer
from agent.host.observe.host import parse_listing
from agent.host.observe.machine import parse_device_allow, parse_report
from agent.host.state.gpus import GRANTED, REMEMBERED
from agent.host.state.records import HANDED, MANIFEST, OWNED_FILES
from agent.machine import containerd, containerd_tables
from agent.machine.containerd import argument, plugin_errors
from agent.machine.kubelet import allocations, parse_checkpoint
from agent.model.contract import (
    parse_allocatable,
    parse_dra_status,
    parse_gpu_states,
    parse_health_questions,
    parse_host_status,
    parse_leave_request,
    parse_node_files,
    parse_test_request,
)
from agent.model.device import as_in_sysfs
from agent.model.facts import parse_live
from agent.model.handoff import parse_handoff
from agent.model.json_document import parse_object
from agent.system.api_server import parse_kubeconfig
from agent.system.devices import parse_record
from agent.system.files import System
from agent.vendors import cdi_yaml
from agent.vendors.cdi import device_names, host_paths
from agent.vendors.drm.machine import parse_groups
from agent.vendors.host_vendor import parse_majors, parse_misc
from agent.vendors.nvidia import nvidia_ctk
from agent.vendors.nvidia import verify as cdi
from agent.vendors.nvidia.contract import parse_instance
from agent.vendors.nvidia.devices import parse_information, parse_kernel_message
from agent.vendors.nvidia.driver import parse_parameters
from agent.vendors.nvidia.machine import edit_runtime_config
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
    document = containerd.parse("config.toml", data)
    containerd_tables.imports("/etc/containerd/config.toml", document)
    return containerd.with_import(data, "/etc/containerd/conf.d/*.toml")


PARSERS: dict[str, Parser] = {
    "allocatable": parse_allocatable,
    "cdi-names": _of_text(device_names),
    "cdi-spec": _spec,
    "cdi-yaml": _of_text(cdi_yaml.parse),
    "claims": parse_claims,
    "command-line": lambda data: argument(data, "config"),
    "conditions": parse_host_status,
    "config": _config,
    "containerd-config": _toml,
    "containerd-plugins": _of_text(plugin_errors),
    "containerd-version": _of_text(containerd_tables.parse_version),
    "dra-status": parse_dra_status,
    "gpu-states": parse_gpu_states,
    "gpu-test-request": parse_test_request,
    "gpu-test-results": parse_results,
    "granted": lambda data: GRANTED.parse("granted.json", data),
    "group": _of_text(parse_groups),
    "handed": lambda data: HANDED.parse("driver-roots.json", data),
    "handoff": parse_handoff,
    "health-questions": parse_health_questions,
    "kernel-log": parse_record,
    "kernel-message": _of_text(parse_kernel_message),
    "kubeconfig": lambda data: parse_kubeconfig("/etc/kubernetes/kubelet.conf", data),
    "kubelet-checkpoint": lambda data: (parse_checkpoint(data), allocations(data)),
    "ldconfig": _of_text(parse_listing),
    "leave-answer": parse_answer,
    "leave-request": parse_leave_request,
    "live": parse_live,
    "manifest": lambda data: MANIFEST.parse("0.json", data),
    "mig-capability": _of_text(parse_instance),
    "node": lambda data: parse_object("node", data),
    "node-files": lambda data: parse_node_files("node-files.json", data),
    "nvidia-ctk-version": _of_text(nvidia_ctk.parse_version),
    "nvidia-information": _of_text(parse_information),
    "nvidia-parameters": _of_text(parse_parameters),
    "nvidia-runtime-config": _of_text(edit_runtime_config),
    "nvlink-errors": _of_text(nvidia_ctk.parse_link_errors),
    "owned": lambda data: OWNED_FILES.parse("owned.json", data),
    "pci-address": _of_text(as_in_sysfs),
    "proc-devices": _of_text(parse_majors),
    "proc-misc": _of_text(parse_misc),
    "remembered": lambda data: REMEMBERED.parse("remembered.json", data),
    "report": parse_report,
    "unit": _of_text(parse_device_allow),
}
