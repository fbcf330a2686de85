"""Machines in which nvidia-ctk made specifications in different modes."""

import json
from pathlib import Path
from typing import Any

import pytest

from agent.model.handoff import GrantedDevice, Request
from agent.system.process import Completed
from agent.vendors.nvidia.nvidia_ctk import MODES
from tests.fakes.machine import (
    DEVICES,
    REQUEST,
    SPEC,
    Machine,
    gpu_machine,
    nvidia_ctk,
    recorded_spec,
)

FS = (GrantedDevice("/dev/nvidia-fs0", "nvidia-fs", 237, 0), GrantedDevice("/dev/nvidia-fs1", "nvidia-fs", 237, 1))
INFINIBAND = (
    GrantedDevice("/dev/infiniband/rdma_cm", "infiniband", 10, 122),
    GrantedDevice("/dev/infiniband/uverbs0", "infiniband", 231, 192),
)
GDRDRV = GrantedDevice("/dev/gdrdrv", "gdrcopy", 236, 0)
OTHERS = Request("other-devices", (), (GDRDRV, *INFINIBAND, *FS))
CHANNELS = tuple(
    GrantedDevice(f"/dev/nvidia-caps-imex-channels/channel{number}", "imex-channel", 509, number) for number in (0, 1)
)
SWITCHES = (
    GrantedDevice("/dev/nvidia-nvswitch0", "nvswitch", 510, 0),
    GrantedDevice("/dev/nvidia-nvswitchctl", "nvswitch", 510, 255),
)
WANTED = REQUEST._replace(devices=(*DEVICES, *CHANNELS, *SWITCHES), cdi_modes=tuple(MODES))


def recorded(mode: str) -> dict[str, Any]:
    """Return a new copy of the recorded specification, with the version that the agent publishes."""
    loaded: dict[str, Any] = json.loads((SPEC.parent / f"nvidia-ctk-1.19.1-mode-{mode}.json").read_text())
    return loaded | {"cdiVersion": "0.5.0"}


def published(mode: str) -> str:
    return f"/etc/cdi/nvidia-{mode}.yaml"


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    machine = gpu_machine(tmp_path)
    for device in (*CHANNELS, *SWITCHES, *OTHERS.devices):
        machine.node(device.path, device.major, device.minor)
        machine.mounts.append(device.path)
    machine.make_directory("/run/udev")
    answer(machine, {})
    machine.hand(WANTED, OTHERS)
    return machine


def answer(machine: Machine, instead: dict[str, object], version: str = "1.19.1") -> None:
    """Script nvidia-ctk so that it writes the recordings, or what a test gives `instead`, by mode."""

    def program(argv: tuple[str, ...]) -> Completed:
        mode = next((each.removeprefix("--mode=") for each in argv if each.startswith("--mode=")), "")
        found = instead.get(mode, recorded(mode) if mode in MODES else recorded_spec())
        return found if isinstance(found, Completed) else nvidia_ctk(machine, argv, found, version)

    machine.program("nvidia-ctk", program)
