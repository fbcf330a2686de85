"""Intel's and AMD's GPUs in the machine: specification, verification, groups, links, containerd, the kubelet."""

import errno
import json
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
import tomlkit

from agent.machine.devices import GRANTED, withdraw_nodes
from agent.machine.kubelet import KUBELET_SOCKET, PLUGINS
from agent.machine.notes import Context, Notes
from agent.machine.run import run
from agent.model.device import DeviceNumber
from agent.model.handoff import GrantedDevice, Request
from agent.system.process import Completed
from agent.vendors.drm import machine as drm
from agent.vendors.drm.machine import AmdMachine, IntelMachine, parse_groups
from tests.fakes import machine as machine_root
from tests.fakes.kubelet import Kubelet
from tests.fakes.machine import EMPTY, REQUEST, Machine, failing, gpu_machine, systemctl

pytestmark = pytest.mark.scenario("004")

FIRST, SECOND, THIRD = "0000:00:02.0", "0000:4d:00.0", "0000:83:00.0"
LETTER = "abcd:00:02.0"
HOST_VIDEO, HOST_RENDER = 44, 993
VIDEO, RENDER = 44, 107
"""Group numbers of the machine: `render` has a different number from the host's."""
GROUP = f"root:x:0:\nvideo:x:{VIDEO}:\nmalformed\nrender:x:4294967295:\nrender:x:{RENDER}:me,you\n"
BY_PATH = "/dev/dri/by-path"


def card(number: int, address: str) -> tuple[GrantedDevice, ...]:
    return (
        GrantedDevice(f"/dev/dri/card{number}", "dri-card", 226, number, address),
        GrantedDevice(f"/dev/dri/renderD{128 + number}", "dri-render", 226, 128 + number, address),
    )


KFD = GrantedDevice("/dev/kfd", "kfd", 234, 0)
INTEL = Request("intel", (FIRST, SECOND), tuple(sorted((*card(0, FIRST), *card(1, SECOND)))))
AMD = Request("amd", (THIRD,), (*card(2, THIRD), KFD))


def hand(machine: Machine, *requests: Request) -> None:
    """Add the nodes of these requests, and publish them for a machine without NVIDIA's GPUs."""
    for device in (device for request in requests for device in request.devices):
        machine.put(device.path)
        gid = HOST_VIDEO if device.kind == "dri-card" else HOST_RENDER
        machine.nodes[device.path] = DeviceNumber(device.major, device.minor, 0o660, 0, gid)
    machine.hand(*requests, EMPTY)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """A machine whose host has only Intel's GPUs, with containerd 1.7, which has CDI off by default."""
    machine = gpu_machine(tmp_path / "machine")
    machine.put("/etc/group", GROUP)
    hand(machine, INTEL)
    return machine


def spec(machine: Machine, vendor: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(machine.read(f"/etc/cdi/{vendor}.yaml"))
    return loaded


def devices(found: dict[str, Any]) -> dict[str, Any]:
    return {each["name"]: each["containerEdits"] for each in found["devices"]}


def nodes(edits: dict[str, Any]) -> list[str]:
    return [each["path"] for each in edits["deviceNodes"]]


def run_changes_nothing(machine: Machine) -> None:
    machine.calls.clear()
    run(machine)
    assert not [call for call in machine.calls if call[0] not in ("systemctl", "ctr")], "nothing has changed"


def settled(machine: Machine) -> None:
    run(machine)
    machine.program("systemctl", systemctl("active", time.monotonic_ns() // 1000))
    run(machine)
    machine.calls.clear()


def test_a_machine_with_intel_alone_is_set_up(machine: Machine) -> None:
    """CDI is off by default, so a drop-in turns it on. containerd reads none without a main file, which is made."""
    settled(machine)
    assert machine.conditions() == {
        "DevicesAllowed": ("True", "Opened"),
        "LibrariesLinked": ("True", "NotApplicable"),
        "CDISpecCurrent": ("True", "Verified"),
        "RuntimeConfigured": ("True", "ReadBack"),
        "RuntimeActive": ("True", "Running"),
        "GPUsAdvertised": ("Unknown", "NoKubelet"),
    }
    names = ("card0", FIRST, "card1", SECOND, "all")
    assert machine.report()["cdi_devices"] == [f"intel.com/gpu={name}" for name in names]
    drop_in = tomlkit.parse(machine.read_text("/etc/containerd/conf.d/99-cdi.toml")).unwrap()
    table = drop_in["plugins"]["io.containerd.grpc.v1.cri"]
    assert table == {"enable_cdi": True, "cdi_spec_dirs": ["/etc/cdi", "/var/run/cdi"]}
    main = tomlkit.parse(machine.read_text("/etc/containerd/config.toml"))
    assert main["imports"] == ["/etc/containerd/conf.d/*.toml"]
    run_changes_nothing(machine)


def test_the_spec_has_the_format_of_intels_tool(machine: Machine) -> None:
    """Each GPU has its two nodes and their links by PCI address, which the machine has like the host."""
    run(machine)
    found = spec(machine, "intel")
    assert (found["cdiVersion"], found["kind"]) == ("0.7.0", "intel.com/gpu")
    edits = devices(found)
    assert edits["card1"] == edits[SECOND]
    assert nodes(edits["card1"]) == ["/dev/dri/card1", "/dev/dri/renderD129"]
    assert sorted(nodes(edits["all"])) == [each.path for each in INTEL.devices]
    assert machine.read_link(f"{BY_PATH}/pci-{SECOND}-render") == "../renderD129"
    assert [each["hostPath"] for each in edits["card1"]["mounts"]] == [
        f"{BY_PATH}/pci-{SECOND}-card",
        f"{BY_PATH}/pci-{SECOND}-render",
    ]
    assert not {"hooks", "env", "containerEdits"} & {*found, *edits["all"]}
    # Nodes that a runtime makes get the machine's groups; bound nodes keep the host's numbers. Both can be opened.
    settled(machine)
    edits = devices(spec(machine, "intel"))["card0"]
    assert [(each["gid"], each["fileMode"]) for each in edits["deviceNodes"]] == [(VIDEO, 0o660), (RENDER, 0o660)]
    assert edits["additionalGids"] == sorted({HOST_VIDEO, HOST_RENDER, RENDER})
    machine.put("/etc/group", "root:x:0:\nvideo:x:44:\n")
    run(machine)
    assert "this machine has no group render" in machine.message("CDISpecCurrent")
    assert ("containerd", "--version") not in machine.calls, "its version is known"
    edits = devices(spec(machine, "intel"))["card0"]
    assert [each["gid"] for each in edits["deviceNodes"]] == [VIDEO, HOST_RENDER]
    machine.put("/etc/group", GROUP)
    run(machine)
    assert devices(spec(machine, "intel"))["card0"]["deviceNodes"][1]["gid"] == RENDER
    assert "no group" not in machine.message("CDISpecCurrent")


@pytest.mark.parametrize("version", ["v1.7.0", "v1.7.15"])
def test_a_containerd_without_support_for_groups_gets_none(machine: Machine, version: str) -> None:
    """Such a containerd would skip the specification. A newer one gets the groups in the first run that finds it."""
    machine.program("containerd", lambda argv: machine_root.containerd(machine, argv, version))
    settled(machine)
    found = spec(machine, "intel")
    assert found["cdiVersion"] == "0.5.0"
    assert not any("additionalGids" in each for each in devices(found).values())
    assert machine.conditions()["CDISpecCurrent"] == ("True", "Verified")
    why = f"containerd {version[1:]} does not support additionalGids (added in 1.7.16)"
    assert why in machine.message("CDISpecCurrent")
    run_changes_nothing(machine)
    machine.put("/usr/bin/containerd", "another build")
    machine.program("containerd", lambda argv: machine_root.containerd(machine, argv, "v1.7.16"))
    run(machine)
    assert spec(machine, "intel")["cdiVersion"] == "0.7.0"
    assert "additionalGids" not in machine.message("CDISpecCurrent")


@pytest.mark.parametrize("what", ["own build", "none", "dangling link"])
def test_a_containerd_of_unknown_version_counts_as_new(machine: Machine, what: str) -> None:
    """A missing containerd counts too: the machine may have another runtime."""
    if what == "own build":
        machine.program("containerd", "containerd somewhere (devel)\n")
    else:
        machine.drop("/usr/bin/containerd")
    if what == "dangling link":
        machine.link("/usr/bin/containerd", "/opt/containerd")
    assert machine.verdict("CDISpecCurrent") == ("True", "Verified")
    assert spec(machine, "intel")["cdiVersion"] == "0.7.0"


def test_nodes_that_everybody_opens_need_no_groups(machine: Machine) -> None:
    for path, number in machine.nodes.items():
        machine.nodes[path] = number._replace(mode=0o666)
    run(machine)
    found = spec(machine, "intel")
    assert found["cdiVersion"] == "0.5.0", "the lowest one for it"
    assert not any("additionalGids" in each for each in devices(found).values())
    # PCI addresses may begin with a letter: PCI domains of Hyper-V and VMD may.
    machine.hand(INTEL._replace(gpus=(LETTER,), devices=card(0, LETTER)), EMPTY)
    assert machine.verdict("CDISpecCurrent") == ("True", "Verified")
    assert list(devices(spec(machine, "intel"))) == ["card0", LETTER, "all"]


def test_amd_shares_one_node_among_its_gpus(machine: Machine) -> None:
    hand(machine, AMD._replace(gpus=(SECOND, THIRD), devices=(*card(1, SECOND), *card(2, THIRD), KFD)))
    run(machine)
    found = spec(machine, "amd")
    edits = devices(found)
    assert list(edits) == ["0", SECOND, "1", THIRD, "all"]
    assert nodes(edits["1"]) == ["/dev/dri/card2", "/dev/dri/renderD130", "/dev/kfd"]
    assert nodes(edits["all"]).count("/dev/kfd") == 1
    assert not any("mounts" in each for each in edits.values()), "amd-ctk writes none"
    assert edits["1"]["deviceNodes"][2] == {
        "path": "/dev/kfd", "type": "c", "major": 234, "minor": 0, "fileMode": 0o660, "permissions": "rw", "uid": 0,
        "gid": RENDER,
    }  # fmt: skip


def test_a_gpu_without_a_render_node_is_no_fault_of_nvidias_driver(machine: Machine) -> None:
    hand(machine, AMD._replace(gpus=(SECOND, THIRD), devices=(*card(1, SECOND), KFD)))
    assert machine.verdict("CDISpecCurrent") == ("False", "GPUMissing")
    assert f"does not list GPU {THIRD}: see DevicesAllowed, and the driver's lines in `dmesg` on the host" in (
        machine.message("CDISpecCurrent")
    )


def test_a_mixed_machine(machine: Machine) -> None:
    hand(machine, AMD)
    machine.hand(AMD, INTEL, REQUEST)
    settled(machine)
    assert machine.conditions()["CDISpecCurrent"] == ("True", "Verified")
    assert machine.conditions()["LibrariesLinked"] == ("True", "Linked")
    assert machine.entries("/etc/cdi") == ("amd.yaml", "intel.yaml", "nvidia.yaml")
    assert machine.entries("/etc/containerd/conf.d") == ("99-nvidia.toml",)
    assert all(each in machine.message("CDISpecCurrent") for each in machine.entries("/etc/cdi"))
    reported = machine.report()["cdi_devices"]
    assert {"amd.com/gpu=all", "intel.com/gpu=all", "nvidia.com/gpu=all"} <= set(reported)
    assert len(set(reported)) == len(reported)
    links = machine.entries(f"/{machine_root.LIBRARIES}")
    assert "libcuda.so.1" in links, "what one vendor does not need is not taken from another"


def test_one_vendors_fault_is_reported_and_holds_up_no_other(machine: Machine) -> None:
    hand(machine, AMD, INTEL)
    machine.drop("/dev/dri/renderD130")
    machine.nodes.pop("/dev/dri/renderD130")
    assert machine.verdict("CDISpecCurrent")[0] == "False"
    assert machine.conditions()["DevicesAllowed"] == ("False", "WrongNode")
    assert devices(spec(machine, "intel"))


def test_a_changed_spec_is_repaired_and_follows_the_grant(machine: Machine) -> None:
    machine.mounts = [device.path for device in INTEL.devices]
    settled(machine)
    before = machine.read("/etc/cdi/intel.yaml")
    machine.put("/etc/cdi/intel.yaml", before.replace(b'"minor": 128', b'"minor": 0'))
    run(machine)
    assert machine.read("/etc/cdi/intel.yaml") == before
    assert machine.report()["repairs"]["spec"] == 1
    settled(machine)
    machine.hand(INTEL._replace(gpus=(FIRST,), devices=card(0, FIRST)), EMPTY)
    run(machine)
    assert list(devices(spec(machine, "intel"))) == ["card0", FIRST, "all"]
    assert machine.entries(BY_PATH) == (f"pci-{FIRST}-card", f"pci-{FIRST}-render")
    machine.hand(EMPTY)
    run(machine)
    assert not machine.exists("/etc/cdi/intel.yaml")
    assert (machine.mounts, machine.entries(BY_PATH)) == ([], ())
    assert not machine.exists("/dev/dri/card0")


def test_a_gpu_that_is_added_while_the_disk_is_full_takes_no_other(machine: Machine) -> None:
    machine.hand(INTEL._replace(gpus=(FIRST,), devices=card(0, FIRST)), EMPTY)
    settled(machine)
    served = machine.report()["cdi_devices"]
    machine.hand(INTEL, EMPTY)
    machine.before_write = failing(errno.ENOSPC, "/etc/cdi/intel.yaml")
    assert machine.verdict("CDISpecCurrent") == ("False", "Failed")
    assert machine.report()["cdi_devices"] == served
    machine.before_write = lambda path: None
    run(machine)
    assert len(machine.report()["cdi_devices"]) == 5


# ---- containerd


def test_cdi_that_is_on_needs_no_drop_in(machine: Machine) -> None:
    """containerd 2 has it on, and so has a machine that had another vendor's GPUs: nothing is written or restarted."""
    main = '[plugins."io.containerd.cri.v1.runtime"]\nenable_cdi = true\ncdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]\n'
    machine.put("/etc/containerd/config.toml", f"version = 3\n{main}")
    machine.program("containerd", lambda argv: machine_root.containerd(machine, argv, "v2.1.9"))
    assert machine.verdict("RuntimeConfigured") == ("True", "ReadBack")
    assert machine.conditions()["RuntimeActive"] == ("True", "Running")
    assert not machine.exists("/etc/containerd/conf.d")


def test_defaults_of_a_containerd_without_a_main_file_do_not_count(machine: Machine) -> None:
    """It prints its defaults then. containerd 2 has CDI on in them."""
    defaults = b'version = 3\n[plugins."io.containerd.cri.v1.runtime"]\nenable_cdi = true\n'
    defaults += b'cdi_spec_dirs = ["/etc/cdi", "/var/run/cdi"]\n'

    def prints_defaults(argv: tuple[str, ...]) -> Completed:
        if "dump" in argv and not machine.exists(argv[2]):
            return Completed(0, defaults, b"")
        return machine_root.containerd(machine, argv, "v2.1.9")

    machine.program("containerd", prints_defaults)
    assert machine.verdict("RuntimeConfigured") == ("True", "ReadBack")
    assert machine.exists("/etc/containerd/config.toml")
    assert machine.exists("/etc/containerd/conf.d/99-cdi.toml")


def test_a_drop_in_for_cdi_alone_is_restored(machine: Machine) -> None:
    """CDI is on because of the drop-in itself, so that does not show that it, or one in a new place, is not needed."""
    settled(machine)
    drop_in = "/etc/containerd/conf.d/99-cdi.toml"
    before = machine.read_text(drop_in)
    machine.put(drop_in, before.replace("[plugins", 'root = "/srv"\n[plugins', 1))
    settled(machine)
    assert machine.read_text(drop_in) == before
    place = "/etc/cri/conf.d/20-cdi.part"
    machine.hand(INTEL, EMPTY, containerd_drop_in=place)
    settled(machine)
    assert (machine.exists(drop_in), machine.exists(place)) == (False, True)
    assert machine.conditions()["RuntimeConfigured"] == ("True", "ReadBack")


@pytest.mark.parametrize("place", ["/etc/containerd/conf.d/99-nvidia.toml", "/etc/cri/conf.d/20-gpu.part"])
def test_another_vendors_gpus_come_and_go(machine: Machine, place: str) -> None:
    """The vendor's drop-in replaces the one that only enabled CDI. It stays afterwards, because it enables CDI too.

    At a configured path, the one for CDI alone would have the same name: containerd would lose the handler, and restart
    twice.
    """
    configured = place if "/cri/" in place else ""
    machine.hand(INTEL, EMPTY, containerd_drop_in=configured)
    settled(machine)
    machine.hand(INTEL, REQUEST, containerd_drop_in=configured)
    settled(machine)
    before = machine.read(place)
    assert b"nvidia-container-runtime" in before
    for request in (EMPTY, REQUEST):
        machine.hand(INTEL, request, containerd_drop_in=configured)
        settled(machine)
        assert machine.read(place) == before
        assert machine.entries(place.rpartition("/")[0]) == (place.rpartition("/")[2],)
        assert machine.conditions()["RuntimeConfigured"] == ("True", "ReadBack")
        assert machine.conditions()["RuntimeActive"] == ("True", "Running")
        # The message does not say that our drop-in is missing.
        ours_alone = machine.message("RuntimeConfigured").endswith("shows CDI enabled; these GPUs need nothing else")
        assert ours_alone is (request == EMPTY)
    assert machine.report()["repairs"]["containerd"] == 0


# ---- two vendors in one machine


@pytest.fixture
def both(machine: Machine) -> Machine:
    hand(machine, INTEL, AMD)
    settled(machine)
    return machine


def test_a_handoff_that_cannot_be_read_again_withdraws_nothing(both: Machine) -> None:
    before = {name: Notes(both).load(f"{GRANTED}{name}") for name in ("intel", "amd")}
    without_one = AMD._replace(gpus=(), devices=())
    assert withdraw_nodes(Context.of(both, both.hand(without_one)), without_one, None) == ((), None)
    assert {name: Notes(both).load(f"{GRANTED}{name}") for name in ("intel", "amd")} == before
    assert both.exists("/dev/kfd")


def test_a_path_that_another_vendor_has_now_is_left_alone(both: Machine) -> None:
    """Card numbers change when drivers are loaded in a different order."""
    taken = INTEL._replace(devices=(*INTEL.devices, *(each._replace(pci_address=FIRST) for each in card(2, FIRST))))
    both.hand(taken, EMPTY)
    settled(both)
    assert both.exists("/dev/dri/card2")
    assert not both.exists("/dev/kfd")
    assert Notes(both).load(f"{GRANTED}amd") == {}


def test_a_node_to_be_bound_again_is_reported_whatever_else_is_wrong(both: Machine) -> None:
    """The host acts on the reason, and one vendor's permanent fault must not hide it."""
    (wrong,) = (each for each in AMD.devices if each.path == "/dev/dri/card2")
    both.nodes[wrong.path] = DeviceNumber(226, 200, 0o660, 0, HOST_VIDEO)
    first = INTEL.devices[0].path

    def opened(argv: tuple[str, ...]) -> Completed:
        lines = "".join(f"{errno.EIO * (path == first)} {path}\n" for path in argv[5:])
        return Completed(0, lines.encode(), b"")

    both.program("open_nodes", opened)
    Notes(both).save("opened-intel", {})
    assert both.verdict("DevicesAllowed") == ("False", "WrongNode")
    assert first in both.message("DevicesAllowed"), "the other fault is told as well"


def test_links_that_the_agent_did_not_make_stay_when_a_gpu_is_removed(machine: Machine) -> None:
    """This matters if the host's whole /dev/dri, with the links of its udev, is bound into the machine."""
    machine.make_directory(BY_PATH)
    machine.link(f"{BY_PATH}/pci-{SECOND}-card", "../card1")
    machine.link(f"{BY_PATH}/pci-0000:99:00.0-card", "../card9")
    settled(machine)
    assert machine.read_link(f"{BY_PATH}/pci-{SECOND}-render") == "../renderD129"
    machine.hand(INTEL._replace(gpus=(FIRST,), devices=card(0, FIRST)), EMPTY)
    run(machine)
    assert machine.read_link(f"{BY_PATH}/pci-{SECOND}-card") == "../card1"
    assert machine.read_link(f"{BY_PATH}/pci-0000:99:00.0-card") == "../card9"
    assert machine.read_link(f"{BY_PATH}/pci-{SECOND}-render") is None


# ---- verification


LIVE = {each.path: DeviceNumber(each.major, each.minor, 0o660, 0, HOST_RENDER) for each in INTEL.devices}


def document() -> dict[str, Any]:
    state = drm.MachineState(LIVE, {each.path: RENDER for each in INTEL.devices if each.kind == "dri-render"}, ())
    rendered = drm.render("intel.com/gpu", {FIRST: "card0", SECOND: "card1"}, INTEL, state)
    copied: dict[str, Any] = json.loads(json.dumps(rendered))
    return copied


def problems(document: object, request: Request = INTEL) -> tuple[str, ...]:
    return IntelMachine().verify(document, request, LIVE, ()).problems


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("minor", 1), ("major", 226.0), ("minor", False), ("uid", 0.0), ("permissions", "rwm"), ("gid", "render"),
        ("gid", True), ("gid", [HOST_RENDER]), ("hostPath", "/dev/sda"), ("fileMode", 0o666), ("path", "/dev/mem"),
        ("path", ["/dev/dri/card0"]),
    ],
)  # fmt: skip
def test_a_node_that_is_not_what_was_granted_is_refused(key: str, value: object) -> None:
    faulty = document()
    faulty["devices"][0]["containerEdits"]["deviceNodes"][0][key] = value
    assert problems(faulty) == ("it is not what this agent writes for the granted nodes: card0",)


def test_a_spec_of_another_format_is_refused() -> None:
    base = document()
    first, *others = base["devices"]
    edits = first["containerEdits"]
    foreign = others[1]["containerEdits"]["deviceNodes"]
    documents: tuple[dict[str, Any], ...] = (
        {"kind": "nvidia.com/gpu"}, {"cdiVersion": "1.1.0"}, {"cdiVersion": ["0.7.0"]},
        {"containerEdits": {"env": ["A=b"]}}, {"devices": []}, {"devices": [first, *others[:-1]]},
        {"devices": [{"name": "card0", "containerEdits": {}}, *others]},
    )  # fmt: skip
    of_device: tuple[dict[str, Any], ...] = (
        {"env": ["A=b"]}, {"additionalGids": [0]}, {"additionalGids": 5}, {"mounts": [{}]},
        {"deviceNodes": foreign + edits["deviceNodes"]},
    )  # fmt: skip
    for faulty in (
        None,
        {key: value for key, value in base.items() if key != "devices"},
        *(base | each for each in documents),
        *(base | {"devices": [first | {"containerEdits": edits | each}, *others]} for each in of_device),
    ):
        assert problems(faulty), faulty


def test_what_was_granted_is_missing_or_has_another_number() -> None:
    renumbered = INTEL._replace(devices=tuple(each._replace(minor=each.minor + 1) for each in INTEL.devices))
    assert any("was granted" in each for each in problems(document(), renumbered))
    there = {path: number for path, number in LIVE.items() if path != "/dev/dri/renderD129"}
    rendered = drm.render("intel.com/gpu", {FIRST: "card0"}, INTEL, drm.MachineState(there, {}, ()))
    for live in (there, LIVE):
        verdict = IntelMachine().verify(rendered, INTEL, live, ())
        assert (verdict.problems, verdict.missing_gpus) == ((), (SECOND,))


# ---- names and groups


def test_groups_by_name() -> None:
    assert parse_groups(GROUP) == {"root": 0, "video": VIDEO, "render": RENDER}
    assert parse_groups(f"many:x:{'9' * 5000}:\nsuper:x:²:\nvideo:x:{VIDEO}:\n") == {"video": VIDEO}


def test_a_spec_that_outranks_ours_is_named(machine: Machine) -> None:
    hand(machine, AMD)
    machine.put("/var/run/cdi/amd.json", json.dumps({"kind": "amd.com/gpu", "devices": [{"name": "0"}]}))
    assert machine.verdict("CDISpecCurrent") == ("False", "Shadowed")
    assert "remove /var/run/cdi/amd.json" in machine.message("CDISpecCurrent")
    assert "systemctl" not in machine.message("CDISpecCurrent")


# ---- the kubelet's checkpoint


def test_ids_of_plugins() -> None:
    intel = {"card0-0": FIRST, "card1-7": SECOND, "card1": SECOND, FIRST: FIRST, "card9-0": "card9", "all": ""}
    assert {name: IntelMachine().gpu_of(name, INTEL) for name in intel} == intel
    amd = {THIRD: THIRD, "amdgpu_xcp_30": "", "0": "", "all": ""}
    assert {name: AmdMachine().gpu_of(name, AMD) for name in amd} == amd


@pytest.mark.parametrize("monitoring", ["gpu.intel.com/i915_monitoring", "gpu.intel.com/monitoring"])
@pytest.mark.parametrize(
    ("ids", "condition", "message"),
    [
        (["card0-0", "card0-1", "card1-0", "card1-1"], ("True", "Advertised"), "gpu.intel.com/i915: 4"),
        (["card0-0"], ("False", "GPUsMissing"), f"not advertised, although granted: {SECOND};"),
        (
            ["card0-0", "card1-0", "card2-0"],
            ("False", "StaleGPUs"),
            "advertised, but not (or no longer) in the CDI specification: card2;",
        ),
    ],
)
def test_what_intels_plugin_advertises(
    machine: Machine, ids: list[str], condition: tuple[str, str], message: str, monitoring: str
) -> None:
    """The plugin advertises cards, each in shares. Its device for monitoring is no GPU of unknown id."""
    with ExitStack() as stack:
        kubelet = Kubelet(machine, stack)
        kubelet.listen(KUBELET_SOCKET)
        kubelet.listen(f"{PLUGINS}/gpu.intel.com-i915.sock")
        registered = {"gpu.intel.com/i915": ids, monitoring: ["all"]}
        kubelet.checkpoint(json.dumps({"Data": {"RegisteredDevices": registered}}))
        assert kubelet.condition() == condition
        assert message in kubelet.message()


def test_an_unused_plugin_says_nothing_against_another(machine: Machine) -> None:
    hand(machine, AMD, INTEL)
    with ExitStack() as stack:
        kubelet = Kubelet(machine, stack)
        kubelet.listen(KUBELET_SOCKET)
        assert kubelet.condition() == ("Unknown", "NoDevicePlugin")
        assert "amd.com/*" in kubelet.message()
        assert "gpu.intel.com/*" in kubelet.message()
        kubelet.listen(f"{PLUGINS}/amd.com_gpu")
        kubelet.checkpoint(json.dumps({"Data": {"RegisteredDevices": {"amd.com/gpu": [THIRD]}}}))
        assert kubelet.condition() == ("True", "Advertised")
