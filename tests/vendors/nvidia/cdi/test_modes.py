"""CDI specifications of nvidia-ctk's other modes.

The real nvidia-ctk 1.19.1 wrote `specs/nvidia-ctk-1.19.1-mode-*.json` for the commands of `mode_command`, with nodes
made by mknod(1) in a separate /dev and a driver root of empty files: there was no driver and no device.
"""

import errno
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agent.config.settings import MachineSettings
from agent.machine.cdi import publish_modes
from agent.machine.foreign_specs import NOTE
from agent.machine.notes import OWNED_COPY, Context, Notes, Owned
from agent.machine.run import REPORT, run
from agent.model.device import DeviceNumber
from agent.model.facts import VendorFacts
from agent.model.goal import DriverRoots
from agent.model.handoff import Request, Variable
from agent.model.paths import OWNED
from agent.model.text import MESSAGE_LIMIT
from agent.system.files import System
from agent.system.process import Completed, TimeLimitError
from agent.vendors.cdi import narrowed
from agent.vendors.nvidia.host import grant_nvidia
from agent.vendors.nvidia.machine import NvidiaMachine
from agent.vendors.nvidia.nvidia_ctk import GENERATE_LIMIT, MODES, verify_mode
from tests.fakes.cdi_modes import FS, GDRDRV, INFINIBAND, OTHERS, WANTED, answer, published, recorded
from tests.fakes.cdi_modes import machine as machine  # the fixture
from tests.fakes.machine import (
    DEVICES,
    EMPTY,
    GPUS,
    REQUEST,
    ROOT,
    Machine,
    containerd,
    failing,
    nvidia_ctk,
    recorded_spec,
    recorded_syncs,
)

UVERBS = {"path": "/dev/infiniband/uverbs0"}
ETC = {"hostPath": "/etc", "containerPath": "/etc"}
EDITS: list[tuple[str, Callable[[dict[str, Any]], None], str]] = [
    ("gds", lambda spec: spec.update(kind="nvidia.com/gpu"), "kind is 'nvidia.com/gpu', not nvidia.com/gds"),
    ("gds", lambda spec: edits(spec)["mounts"].append(ETC), "mount of '/etc'"),
    ("gds", lambda spec: edits(spec)["mounts"][0].update(containerPath="/etc"), "mount of '/run/udev'"),
    ("gds", lambda spec: edits(spec)["mounts"][0]["options"].remove("ro"), "mount of '/run/udev'"),
    ("gds", lambda spec: edits(spec)["deviceNodes"].pop(), "device all has no node /dev/nvidia-fs1"),
    ("mofed", lambda spec: edits(spec)["deviceNodes"][0].update(major=1), "is 1:122 in the specification, but"),
    ("mofed", lambda spec: edits(spec).update(hooks=[{"hookName": "prestart", "path": "/bin/sh"}]), "unexpected hook"),
    ("mofed", lambda spec: spec["containerEdits"]["env"].append("LD_PRELOAD=x"), "unexpected environment variable"),
    ("mofed", lambda spec: spec["containerEdits"].update(deviceNodes=[UVERBS]), "this mode"),
    ("imex", lambda spec: spec.update(devices=spec["devices"][:1]), "device all has no node"),
    ("management", lambda spec: spec["containerEdits"].pop("mounts"), "libcuda.so is not in it"),
]  # fmt: skip


NO_NODES: list[object] = [[], {}, [3], [{}], [{"path": [FS[0].path]}], [{"path": FS[0].path, "hostPath": "/dev/x"}]]


def edits(spec: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = spec["devices"][0]["containerEdits"]
    return found


def generations(machine: Machine) -> list[str]:
    found = [each.removeprefix("--mode=") for call in machine.calls for each in call if each.startswith("--mode=")]
    machine.calls.clear()
    return found


def spec_of(machine: Machine, mode: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(machine.read(published(mode)))
    return loaded


def test_each_mode_is_published_next_to_the_gpus_spec(machine: Machine) -> None:
    run(machine)
    for mode in MODES:
        assert spec_of(machine, mode) == recorded(mode)
        assert f"{published(mode)} has {MODES[mode].kind}" in machine.message("CDISpecCurrent")
    assert machine.conditions()["CDISpecCurrent"] == ("True", "Verified")
    assert machine.exists("/etc/cdi/nvidia.yaml")
    # The report's device names show that these kinds are separate from GPUs.
    kinds = {name.partition("=")[0] for name in machine.report()["cdi_devices"]}
    assert kinds == {"nvidia.com/gpu"}
    assert sorted(generations(machine)) == sorted(["nvml", *MODES])


def test_a_mode_is_made_again_only_for_its_own_inputs(machine: Machine) -> None:
    """A removed GPU causes only specifications that name GPUs to be made again: NVML may hang meanwhile."""
    run(machine)
    generations(machine)
    run(machine)
    assert generations(machine) == []
    assert Notes(machine).load(NOTE) == {}, "our own files are not read as foreign ones"
    machine.put("/etc/cufile.json", "{}")
    run(machine)
    assert generations(machine) == ["gds"]
    machine.put(published("mofed"), "{}")
    run(machine)
    assert generations(machine) == ["mofed"]
    assert spec_of(machine, "mofed") == recorded("mofed")
    machine.hand(WANTED._replace(environment=(Variable("A", "B"),)), OTHERS)
    run(machine)
    assert generations(machine) == ["nvml"]
    without = WANTED._replace(gpus=GPUS[:1], devices=tuple(each for each in WANTED.devices if each != DEVICES[1]))
    machine.hand(without, OTHERS)
    run(machine)
    assert set(generations(machine)) == {"nvml", "management"}
    nodes = {each["path"] for each in edits(spec_of(machine, "management"))["deviceNodes"]}
    assert nodes & {"/dev/nvidia0", "/dev/nvidia1"} == {"/dev/nvidia0"}
    machine.nodes[GDRDRV.path] = machine.nodes[GDRDRV.path]._replace(mode=0o600)
    run(machine)
    assert "gdrcopy" in generations(machine)


GRANTED = (*WANTED.devices, *OTHERS.devices)
LIVE = {each.path: DeviceNumber(each.major, each.minor) for each in GRANTED}
PRESENT = {"/run/udev", *(f"{ROOT}/{file.target}" for file in REQUEST.files)}


@pytest.mark.parametrize(("mode", "edit", "expected"), EDITS, ids=[f"{mode}-{expected}" for mode, _, expected in EDITS])
def test_a_spec_with_anything_else_is_refused(mode: str, edit: Callable[[dict[str, Any]], None], expected: str) -> None:
    spec, request = recorded(mode), MODES[mode].request(WANTED, GRANTED)
    assert verify_mode(MODES[mode], spec, request, LIVE, PRESENT) == ()
    edit(spec)
    assert expected in "; ".join(verify_mode(MODES[mode], spec, request, LIVE, PRESENT))


def test_a_malformed_specification_is_an_error_of_the_tool(machine: Machine) -> None:
    run(machine)
    malformed: tuple[object, ...] = ([3], {}, [{}], [{"name": "all"}], recorded("gds")["devices"] * 2)
    for number, devices in enumerate(malformed):
        answer(machine, {"nvml": recorded_spec() | {"devices": devices}, "gds": recorded("gds") | {"devices": devices}})
        machine.put("/usr/bin/nvidia-ctk", f"build {number}")
        assert machine.verdict("CDISpecCurrent") == ("False", "GenerationFailed")
        assert machine.message("CDISpecCurrent").count("nvidia-ctk wrote a malformed CDI specification: ") == 2
    assert spec_of(machine, "gds") == recorded("gds"), "what was published stays"


def fails(machine: Machine, *modes: str, why: bytes = b"level=error") -> None:
    """Let nvidia-ctk fail in these modes."""
    answer(machine, dict.fromkeys(modes, Completed(1, b"", why)))


def test_a_failure_leaves_what_was_published(machine: Machine) -> None:
    run(machine)
    fails(machine, "gds")
    machine.put("/etc/cufile.json", "{}")
    run(machine)
    assert spec_of(machine, "gds") == recorded("gds")
    assert "; ModeNotServed: gds: " in machine.message("CDISpecCurrent")
    assert "level=error; the published CDI specification is out of date; " in machine.message("CDISpecCurrent")
    answer(machine, {})
    run(machine)
    assert "ModeNotServed" not in machine.message("CDISpecCurrent")


def test_ready_does_not_depend_on_modes(machine: Machine) -> None:
    printed = b"time=1 level=info msg=Selecting\n" * 100 + b'time=2 level=error msg="empty device edits"\n'
    fails(machine, *MODES, why=printed)
    assert machine.verdict("CDISpecCurrent") == ("True", "Verified")
    message = machine.message("CDISpecCurrent")
    assert message.startswith("/etc/cdi/nvidia.yaml has "), "what GPUs have is not cut off"
    assert "NotInSpec (the generator leaves them out): /dev/nvidia-caps-imex-channels/channel0, " in message
    why = '/usr/bin/nvidia-ctk: exit code 1: time=2 level=error msg="empty device edits"'
    assert all(f" {mode}: {why}" in message for mode in MODES)
    assert len(message) < MESSAGE_LIMIT


def test_a_failure_for_gpus_costs_no_mode(machine: Machine) -> None:
    fails(machine, "nvml")
    assert machine.verdict("CDISpecCurrent") == ("False", "GenerationFailed")
    assert all(f"; {published(mode)} has " in machine.message("CDISpecCurrent") for mode in MODES)


def test_a_mode_that_the_tool_lacks(machine: Machine) -> None:
    answer(machine, {}, "1.18.2")
    assert machine.verdict("CDISpecCurrent") == ("True", "Verified")
    why = (
        "nvidia-ctk is 1.18.2, but 1.19.0 is needed for mode nvswitch (install nvidia-container-toolkit 1.19.1 or newer"
    )
    assert f"; ModeNotServed: nvswitch: {why}" in machine.message("CDISpecCurrent")
    assert sorted(generations(machine)) == sorted({"nvml", *MODES} - {"nvswitch"})


def test_groups_of_nodes_are_left_out_for_an_old_containerd(machine: Machine) -> None:
    """Before 1.7.16, containerd skips a whole specification with additionalGids."""
    spec = recorded("gdrcopy")
    edits(spec)["additionalGids"] = [44]
    answer(machine, {"gdrcopy": spec})
    machine.nodes[GDRDRV.path] = machine.nodes[GDRDRV.path]._replace(gid=44)
    machine.program("containerd", lambda argv: containerd(machine, argv, "v1.7.15"))
    for _ in range(2):
        run(machine)
        assert edits(spec_of(machine, "gdrcopy")) == edits(recorded("gdrcopy"))
        assert spec_of(machine, "gdrcopy")["cdiVersion"] == "0.5.0"
        assert machine.message("CDISpecCurrent").count("containerd 1.7.15 does not support additionalGids") == 1
    generations(machine)
    machine.put("/usr/bin/containerd", "a newer one")
    machine.program("containerd", lambda argv: containerd(machine, argv, "v1.7.24"))
    run(machine)
    assert set(generations(machine)) == {"nvml", *MODES}
    assert edits(spec_of(machine, "gdrcopy"))["additionalGids"] == [44]
    assert "additionalGids" not in machine.message("CDISpecCurrent")


@pytest.mark.parametrize("made", [True, False], ids=["made anew", "the tool fails"])
def test_a_removed_node_leaves_the_spec_before_the_machine(machine: Machine, made: bool) -> None:
    """nvidia-ctk lists the nodes in /dev, where the removed one still exists."""
    run(machine)
    fails(machine, *(() if made else ("gds",)))
    machine.hand(WANTED, OTHERS._replace(devices=(GDRDRV, *INFINIBAND, FS[0])))
    at_withdrawal = []

    def umount(argv: tuple[str, ...]) -> Completed:
        at_withdrawal.append([node["path"] for node in edits(spec_of(machine, "gds"))["deviceNodes"]])
        machine.mounts.remove(argv[-1])
        return Completed(0, b"", b"")

    machine.program("umount", umount)
    run(machine)
    assert at_withdrawal == [["/dev/nvidia-fs0"]]
    assert edits(spec_of(machine, "gds"))["mounts"] == edits(recorded("gds"))["mounts"]
    assert ("out of date" in machine.message("CDISpecCurrent")) is not made


def test_every_edit_is_narrowed() -> None:
    """This includes edits that all devices share. A node without a number counts as the existing one.

    Containers get the number that is written, so a node with another one is not the granted one.
    """
    nodes = [{"path": each.path} for each in FS]
    shared = {"deviceNodes": nodes, "env": ["A=B"]}
    spec = {"devices": [{"name": "all", "containerEdits": {"deviceNodes": nodes}}], "containerEdits": shared}
    assert narrowed(spec, Request("nvidia", (), FS[1:])) == {
        "devices": [{"name": "all", "containerEdits": {"deviceNodes": nodes[1:]}}],
        "containerEdits": {"deviceNodes": nodes[1:], "env": ["A=B"]},
    }
    numbered = [each | {"major": 237, "minor": number} for number, each in enumerate(nodes)]
    written = {"devices": [{"name": "all", "containerEdits": {"deviceNodes": numbered}}]}
    narrow: Any = narrowed(written, Request("nvidia", (), (FS[0]._replace(major=240), FS[1])))
    assert edits(narrow)["deviceNodes"] == numbered[1:]


def test_nothing_is_left_of_a_spec(machine: Machine) -> None:
    run(machine)
    fails(machine, "gdrcopy", why=b"level=error " + b"x" * 1000)
    machine.hand(WANTED, OTHERS._replace(devices=(GDRDRV._replace(minor=1),)))
    run(machine)
    assert not machine.exists(published("gdrcopy"))
    assert published("gdrcopy") not in json.loads(machine.read(OWNED))["paths"]
    message = machine.message("CDISpecCurrent")
    assert "; ModeNotServed: gdrcopy: " in message
    assert "xxx; removed /etc/cdi/nvidia-gdrcopy.yaml, which had no granted device left" in message


@pytest.mark.parametrize("unreadable", ["state/spec-nvidia-gds.json", "state/foreign-specs.json"])
def test_a_fault_elsewhere_does_not_outdate_a_spec(machine: Machine, unreadable: str) -> None:
    run(machine)
    machine.before_read = failing(errno.EIO, unreadable)
    run(machine)
    assert "; ModeNotServed: gds: [Errno 5] Input/output error: " in machine.message("CDISpecCurrent")
    assert "out of date" not in machine.message("CDISpecCurrent")
    assert spec_of(machine, "gds") == recorded("gds")


@pytest.mark.parametrize("disk", ["full", "somebody wrote"])
def test_a_spec_that_cannot_be_narrowed_is_removed(machine: Machine, disk: str) -> None:
    run(machine)
    fails(machine, "gds")
    machine.hand(WANTED, OTHERS._replace(devices=(FS[1],)))
    if disk == "full":
        machine.before_write = failing(errno.ENOSPC, published("gds"))
    else:
        machine.put(published("gds"), "kind: nvidia.com/gds\ndevices: []\n")
    run(machine)
    assert not machine.exists(published("gds"))
    machine.before_write = lambda path: None
    answer(machine, {})
    run(machine)
    assert [node["path"] for node in edits(spec_of(machine, "gds"))["deviceNodes"]] == [FS[1].path]


@pytest.mark.parametrize(
    "spec",
    [
        *(None, [], {}, {"devices": 3}, {"devices": [], "containerEdits": []}),
        *({"devices": [{"name": "all", "containerEdits": {"deviceNodes": nodes}}]} for nodes in NO_NODES),
    ],
)
def test_nothing_is_left_of_a_malformed_spec(spec: object) -> None:
    assert narrowed(spec, Request("nvidia", (), FS)) is None
    assert verify_mode(MODES["gds"], spec, Request("nvidia", (), FS), {}, ())


def test_without_a_device_there_is_no_spec(machine: Machine) -> None:
    run(machine)
    machine.hand(WANTED, OTHERS._replace(devices=INFINIBAND))
    run(machine)
    assert not machine.exists(published("gds"))
    assert machine.exists(published("mofed"))
    assert machine.conditions()["CDISpecCurrent"] == ("True", "Verified")
    assert machine.message("CDISpecCurrent").endswith("; no devices for mode gds, gdrcopy")
    machine.hand(EMPTY._replace(cdi_modes=("mofed", "management")), OTHERS)
    run(machine)
    assert spec_of(machine, "mofed") == recorded("mofed"), "a machine without GPUs"
    assert machine.conditions()["CDISpecCurrent"] == ("True", "NotApplicable")
    assert machine.message("CDISpecCurrent").endswith("; no devices for mode management")


@pytest.mark.parametrize("requests", [(WANTED._replace(cdi_modes=()), OTHERS), (EMPTY,), ()])
def test_a_spec_that_is_no_longer_configured_is_removed(machine: Machine, requests: tuple[Request, ...]) -> None:
    run(machine)
    machine.hand(*requests)
    run(machine)
    assert not any(machine.exists(published(mode)) for mode in MODES)
    assert not any(published(mode) in json.loads(machine.read(OWNED))["paths"] for mode in MODES)


def foreign(kind: str) -> str:
    return json.dumps({"cdiVersion": "0.5.0", "kind": kind, "devices": [{"name": "all"}]})


def test_foreign_devices_are_not_made_useless(machine: Machine) -> None:
    """If the agent published the same names, runtimes would give those devices to no pod."""
    machine.put("/etc/cdi/site.yaml", foreign("nvidia.com/gds"))
    machine.put(published("mofed"), "{}")
    collides = "/etc/cdi/nvidia-gds.yaml is not published, because pods already get nvidia.com/gds=all from"
    run(machine)
    for _ in range(2):
        assert not machine.exists(published("gds"))
        assert f"; ModeNotServed: gds: {collides}" in machine.message("CDISpecCurrent")
        generations(machine)
        run(machine)
        assert generations(machine) == [], "what collides is not made again each minute"
    assert "was not written by the agent" in machine.message("CDISpecCurrent")
    assert machine.read(published("mofed")) == b"{}", "a file of somebody else in the place of ours"
    machine.drop("/etc/cdi/site.yaml")
    run(machine)
    assert spec_of(machine, "gds") == recorded("gds")
    machine.put("/etc/cdi/site.yaml", foreign("nvidia.com/gds"))
    run(machine)
    assert machine.exists(published("gds")), "ours was there first"
    both = "/etc/cdi/nvidia-gds.yaml and /etc/cdi/site.yaml define the same names, so no pod can get nvidia.com/gds=all"
    assert f"; ModeNotServed: gds: {both}" in machine.message("CDISpecCurrent")
    assert machine.conditions()["CDISpecCurrent"] == ("True", "Verified")


@pytest.mark.parametrize("mode", ["management", "mofed"])
def test_a_spec_that_outranks_a_mode_is_named(machine: Machine, mode: str) -> None:
    """Also in a machine without GPUs."""
    other, kind = "/var/run/cdi/other.yaml", MODES[mode].kind
    machine.put(other, foreign(kind))
    if mode == "mofed":
        machine.hand(EMPTY._replace(cdi_modes=(mode,)), OTHERS)
    run(machine)
    assert spec_of(machine, mode) == recorded(mode), "it is what remains when the other goes"
    expected = f"; ModeNotServed: {mode}: pods get {kind}=all from {other} instead of {published(mode)}, whose"
    assert expected in machine.message("CDISpecCurrent")
    machine.drop(other)
    run(machine)
    assert "ModeNotServed" not in machine.message("CDISpecCurrent")


@pytest.mark.parametrize("recorded", [True, False])
def test_a_mode_of_a_later_release_is_reported(machine: Machine, recorded: bool) -> None:
    """A file that was recorded is a newer image's, of which nobody here can tell what may stay. Otherwise it stays."""
    machine.hand(WANTED._replace(cdi_modes=("quantum",)), OTHERS)
    machine.put(published("quantum"), "{}")
    Owned(machine).claim(published("quantum"))
    for path in (OWNED, OWNED_COPY) if not recorded else ():
        machine.put(path, "")
    run(machine)
    unknown = "; ModeNotServed: quantum: the image's agent does not support this mode"
    assert unknown in machine.message("CDISpecCurrent")
    assert machine.exists(published("quantum")) is not recorded


def test_no_mode_starts_nvml(machine: Machine) -> None:
    """nvidia-ctk finds a file that cannot be loaded: `--library-search-path` precedes every other directory."""
    seen = {}

    def program(argv: tuple[str, ...]) -> Completed:
        mode = next((each.removeprefix("--mode=") for each in argv if each.startswith("--mode=")), "")
        if mode in MODES:
            first = next(each for each in argv if each.startswith("--library-search-path=")).partition("=")[2]
            names = ("libnvidia-ml.so.1", "libnvidia-sandboxutils.so.1")
            seen[mode] = {machine.read(f"{first}/{name}") for name in names}
        return nvidia_ctk(machine, argv, recorded(mode) if mode in MODES else recorded_spec())

    machine.program("nvidia-ctk", program)
    run(machine)
    assert seen == {mode: {b""} for mode in MODES}
    for mode in MODES:
        assert machine.entries(f"/run/unbounded-agent/state/cdi-nvidia-{mode}") == ()


def test_time_is_left_to_report(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    """nvidia-ctk hangs in every mode, and twice for GPUs: TimeoutStartSec= could end the run before the report."""
    now, limits = [0.0], []

    def runner(argv: tuple[str, ...], timeout: float) -> Completed:
        if not argv[0].endswith("nvidia-ctk") or argv[1:3] != ("cdi", "generate"):
            return machine.programs[argv[0].rpartition("/")[2]](argv)
        limits.append(timeout)
        now[0] += timeout
        raise TimeLimitError

    hanging, handoff = System(runner, str(machine.tree)), machine.hand(WANTED, OTHERS)
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    modes, _, _ = publish_modes(Context.of(hanging, handoff), NvidiaMachine(), WANTED)
    assert limits == [8, 2]
    assert "; ModeNotServed: gds: /usr/bin/nvidia-ctk: stopped after its time limit of 8 s; mofed: " in modes
    assert modes.count("not generated yet: too little was left of the 10 s for all modes (the next") == 4
    unit = Path("systemd/machine/unbounded-agent-gpu.service").read_text()
    allowed = float(unit.partition("\nTimeoutStartSec=")[2].partition("\n")[0])
    assert 2 * GENERATE_LIMIT + sum(limits) <= 0.8 * allowed


@pytest.mark.parametrize(
    ("modes", "devices", "accepted"),
    [
        (["gds"], {}, False), (["gds"], {"devices": ["nvidia-fs"]}, True),
        (["mofed"], {"devices": ["nvidia-fs"]}, False),
        (["gdrcopy"], {"devices": ["gdrcopy"]}, True), (["imex"], {}, False), (["imex"], {"imex_channels": True}, True),
        (["nvswitch", "management"], {}, True), (["nvswitch", "nvswitch"], {}, False), (["csv"], {}, False),
    ],
)  # fmt: skip
def test_a_mode_needs_its_devices(modes: list[str], devices: dict[str, object], accepted: bool) -> None:
    settings = {"cdi_modes": modes, **devices}
    if accepted:
        granted = grant_nvidia(VendorFacts("nvidia"), MachineSettings.validated(settings), DriverRoots(()), ())
        assert granted.cdi_modes == tuple(modes)
        return
    with pytest.raises(ValidationError):
        MachineSettings.validated(settings)


def test_the_report_does_not_wait_for_the_disk(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    synced = recorded_syncs(machine, monkeypatch)
    run(machine)
    assert synced.index(published("gds")) > synced.index(REPORT)
