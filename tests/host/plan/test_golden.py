"""The whole files that a machine starts with, as tests/data/golden has them, for settings that hold every line.

What a machine may do is decided by these lines alone.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
from msgspec.structs import replace

from agent.config.settings import Config
from agent.host.observe.machine import parse_device_allow
from agent.host.plan.goal import plan
from agent.model.device import DeviceKind
from agent.model.facts import Absent, Facts, Gpu, MountSource, ServiceDirectory, VendorFacts
from agent.model.goal import MachineGoal
from agent.model.handoff import OTHER_DEVICES
from tests.fakes.facts import facts, node, nvidia
from tests.fakes.golden import GOLDEN, expect_golden
from tests.fakes.node_settings import NEEDED, TOKEN_FILE

DATA = Path(__file__).parents[2] / "data"


class Case(NamedTuple):
    """A machine's settings, on a host with these GPUs."""

    settings: dict[str, Any]
    vendors: tuple[VendorFacts, ...]
    machine: str = "gpu-node"
    systemd: int = 257
    stub_resolver: bool = False
    mount_sources: tuple[str, ...] = ()


def drm(vendor: str, driver: str, gpu: str, minor: int, *shared: tuple[str, DeviceKind, int]) -> VendorFacts:
    """Return a host's only GPU of a vendor whose GPUs need only device nodes."""
    nodes = (
        node(f"/dev/dri/card{minor}", DeviceKind.DRI_CARD, 226, minor, gpu),
        node(f"/dev/dri/renderD{128 + minor}", DeviceKind.DRI_RENDER, 226, 128 + minor, gpu),
        *(node(path, kind, major, 0) for path, kind, major in shared),
    )
    return VendorFacts(vendor, (Gpu(gpu, vendor, driver),), nodes)


AMD = drm("amd", "amdgpu", "0000:41:00.0", 4, ("/dev/kfd", DeviceKind.KFD, 234))
INTEL = drm("intel", "xe", "0000:81:00.0", 5)
OTHER = VendorFacts(
    OTHER_DEVICES,
    devices=(
        node("/dev/fuse", DeviceKind.EXTRA, 10, 229),
        node("/dev/kvm", DeviceKind.KVM, 10, 232),
        node("/dev/strange:name", DeviceKind.EXTRA, 240, 3),
    ),
)
DAEMONS = (
    ServiceDirectory("mps", "/run/nvidia-mps", 9, writable=True),
    ServiceDirectory("persistenced", "/run/nvidia-persistenced", 7),
)
MOUNTS = [
    {"source": "/srv/models", "target": "/srv/models"},
    {"source": "/srv/scratch:2", "target": "/var/lib/scratch:2", "read_only": False},
    {"source": "/srv/not:there", "target": "/srv/gone"},
]
NODE = {**NEEDED, "bootstrap_token": TOKEN_FILE}
CASES = {
    "default": Case({}, (nvidia(),)),
    "relaxed": Case(
        {
            "device_mode": "rwm",
            "nspawn": {
                "capability": "all",
                "system_call_filter": "@keyring bpf @raw-io",
                "virtual_ethernet": True,
                "kmsg": False,
                "modules": False,
                "environment": {"SYSTEMD_LOG_LEVEL": 'debug "%n" \\ all'},
                "extra": {
                    "Exec": {"LimitNOFILE": "1048576"},
                    "Network": {"Bridge": "br0", "Port": ["tcp:6443", "tcp:10250"]},
                    "Files": {"Bind": ["/srv/a", "/srv/b"], "TemporaryFileSystem": "/scratch"},
                },
            },
        },
        (nvidia(1),),
        machine="GPU_node-2.example",
        systemd=252,
    ),
    "privileges": Case(
        {
            "mig_config": True,
            "mig_monitor": True,
            "imex_channels": True,
            "sockets": ["persistenced", "mps"],
            "devices": ["kvm"],
            "extra_devices": [{"path": "/dev/fuse", "mode": "rwm"}, {"path": "/dev/strange:name", "mode": "r"}],
        },
        (replace(nvidia(), services=DAEMONS), AMD, INTEL, OTHER),
    ),
    "node-with-mounts": Case(
        {"extra_mounts": MOUNTS, "node": NODE, "nspawn": {"virtual_ethernet": True}, "gpus": ["0000:02:00.0"]},
        (nvidia(),),
        mount_sources=("/srv/models", "/srv/scratch:2"),
    ),
    "no-gpus": Case({"node": NODE, "nspawn": {"environment": {}}}, (VendorFacts("nvidia"),), stub_resolver=True),
}


def observed(case: Case) -> Facts:
    template = (DATA / f"units/systemd-nspawn-{case.systemd}.service").read_text()
    sources = {each["source"]: Absent("not there") for each in case.settings.get("extra_mounts", ())}
    # The path that a link leads to is the one to bind.
    real = {each: MountSource(f"/mnt/data{each}", ("/srv", each)) for each in case.mount_sources}
    return replace(
        facts(machine=case.machine),
        vendors=case.vendors,
        template_device_allow=parse_device_allow(template),
        systemd_version=case.systemd,
        mount_sources=sources | real,
        stub_resolver=case.stub_resolver,
    )


def goal(case: Case) -> MachineGoal:
    config = Config.validated({"machines": {case.machine: case.settings}})
    (machine,) = plan(config, observed(case)).goal.machines
    return machine


@pytest.mark.parametrize("name", CASES)
def test_the_files_are_these(name: str) -> None:
    machine = goal(CASES[name])
    nspawn, drop_in = machine.nspawn, machine.drop_in
    expect_golden(f"{name}.nspawn", nspawn.content.decode())
    expect_golden(f"{name}.conf", drop_in.content.decode())
    assert (nspawn.mode, drop_in.mode) == (0o644, 0o644)


def test_the_digest_of_fixed_settings_is_this() -> None:
    """If it changes although no setting in the golden files did, change FIXED_FORM: running machines are as before."""
    expect_golden("default.fixed", f"{goal(CASES['default']).live.fixed}\n")


def test_no_file_is_left_over() -> None:
    """A case that was renamed would leave files that nothing compares."""
    names = {path.name for path in GOLDEN.iterdir()}
    assert names == {
        "node-files.txt",
        "default.fixed",
        *(f"{name}.{suffix}" for name in CASES for suffix in ("nspawn", "conf")),
    }
