"""The goal is a pure function of configuration and facts."""

import random
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from agent.config.settings import Config, MachineSettings
from agent.host.plan.diff import diff
from agent.host.plan.goal import plan, select
from agent.host.plan.nspawn import (
    CONFIGURED,
    SYS_MODULE,
    before_start,
    before_stop,
    bindable,
    escape,
    fixed_lines,
    quote,
)
from agent.host.vendors import HOST_VENDORS
from agent.model.device import DeviceKind
from agent.model.facts import Absent, Broken, DeviceAllow, Facts, FileState, LiveSettings, Unseen, VendorFacts
from agent.model.goal import ReloadUnits, RemoveFile, Share, StageDriverRoot, WriteFile
from agent.model.paths import DRIVER_ROOTS_TARGET, device_allow_drop_in, nspawn_file, unit_drop_in
from tests.fakes.facts import CONFIG, facts, node, nvidia
from tests.fakes.node_settings import NEEDED, TOKEN_FILE

NODE = {**NEEDED, "bootstrap_token": TOKEN_FILE}


def configured(**settings: object) -> Config:
    return Config.validated({"machines": {"gpu-node": settings}})


def test_order_of_facts_does_not_matter() -> None:
    """Sources list in any order; the bytes on disk must not depend on it."""
    vendor = nvidia(8)
    devices = list(vendor.devices) if isinstance(vendor.devices, tuple) else []
    gpus = list(vendor.gpus)
    generator = random.Random(1)
    wanted = plan(CONFIG, facts(vendor)).goal
    for _ in range(20):
        generator.shuffle(devices)
        generator.shuffle(gpus)
        assert plan(CONFIG, facts(replace(vendor, devices=tuple(devices), gpus=tuple(gpus)))).goal == wanted


def network(**settings: object) -> dict[str, object]:
    """Return the settings of a machine's network."""
    return {"extra": {"Network": settings}}


NETWORKS: list[tuple[dict[str, object], bool]] = [
    ({}, False),
    ({"environment": {"SYSTEMD_NSPAWN_API_VFS_WRITABLE": "network"}}, True),
    ({"environment": {"SYSTEMD_NSPAWN_API_VFS_WRITABLE": "yes"}}, False),
    ({"virtual_ethernet": True}, True),
    (network(Private="yes"), True),
    (network(Private="On"), True),
    (network(Private="no"), False),
    (network(Private=["no", "yes"]), True),
    (network(Private=["yes", "no"]), False),
    (network(Private=[]), False),
    (network(Bridge="br0"), True),
    (network(Zone="z"), True),
    (network(MACVLAN=["eth0", "eth1"]), True),
    (network(Interface=[]), False),
    (network(Port="tcp:80"), False),
    (network(VirtualEthernet="yes"), True),
    (network(VirtualEthernet=["no", "yes"]), True),
    ({"virtual_ethernet": True} | network(VirtualEthernet="no"), False),
    ({"virtual_ethernet": True} | network(VirtualEthernet=[]), True),
]


@pytest.mark.parametrize(("settings", "private"), NETWORKS)
def test_sys_module_is_bound_if_nspawn_leaves_it_out(settings: dict[str, object], private: bool) -> None:
    """NVML looks for the driver's directory there."""
    machine = plan(configured(nspawn={"environment": {}} | settings), facts()).goal.machines[0]
    assert (SYS_MODULE in machine.nspawn.content.decode().splitlines()) is private


def test_lines_that_only_prepare_a_start_or_a_stop_need_no_restart() -> None:
    """A release that changes them must not call every running machine outdated."""
    config = configured(nspawn={"extra": {"Files": {"Bind": ["/srv/data"]}}})
    (machine,) = plan(config, facts()).goal.machines
    nspawn, drop_in = machine.nspawn.content, machine.drop_in.content
    assert f"{CONFIGURED}\nBind=/srv/data\n".encode() in nspawn
    older = nspawn.replace(f"{CONFIGURED}\n".encode(), b"").replace(f"{SYS_MODULE}\n".encode(), b"")
    lines = drop_in.decode().split("\n")
    kept = [line for line in lines if not line.startswith(("#", "TimeoutStopSec=", "After=", "DeviceAllow="))]
    shorter = "\n".join(kept).encode()
    for line in (*before_start("gpu-node"), *before_stop("gpu-node")):
        shorter = shorter.replace(f"{line}\n".encode(), b"")
    assert len(shorter) < len(drop_in) / 2
    assert fixed_lines(older, shorter) == fixed_lines(nspawn, drop_in)
    for changed in (nspawn.replace(b"VirtualEthernet=no", b"VirtualEthernet=yes"), nspawn.replace(b"/srv/data", b"/x")):
        assert fixed_lines(changed, drop_in) != fixed_lines(nspawn, drop_in)
    assert fixed_lines(nspawn, drop_in.replace(b"TasksMax=infinity", b"")) != fixed_lines(nspawn, drop_in)


@pytest.mark.parametrize(
    ("section", "key", "values"),
    [
        ("Exec", "ResolvConf", ([], "off", "replace-host", "replace-uplink")),
        ("Exec", "RestrictAddressFamilies", ([], "AF_UNIX AF_INET AF_INET6 AF_NETLINK AF_PACKET")),
        ("Files", "Bind", ([], "/dev/fuse", ["/dev/fuse", "/dev/net/tun"])),
        ("Files", "BindReadOnly", ([], "/sys/module", "/sys/module/nvidia")),
    ],
)
@pytest.mark.parametrize("node", [{}, {"node": NODE}])
def test_a_change_of_further_settings_needs_a_restart(
    section: str, key: str, values: tuple[object, ...], node: dict[str, object]
) -> None:
    """Also of a line that the agent could have written itself, without which a machine may run on."""
    fixed, compared = set[str](), set[bytes]()
    for value in values:
        config = configured(nspawn={"extra": {section: {key: value}}}, **node)
        (machine,) = plan(config, replace(facts(), systemd_version=261)).goal.machines
        fixed.add(machine.live.fixed)
        compared.add(b"\n".join(fixed_lines(machine.nspawn.content, machine.drop_in.content)))
    assert len(fixed) == len(compared) == len(values)


def test_a_machine_stops_before_what_its_pods_use() -> None:
    """At the host's shutdown. The order through prepare@ counts only while prepare@ itself is started or stopped."""
    prepare = Path(__file__).parents[3].joinpath("systemd/unbounded-agent-prepare@.service").read_text()
    drop_in = plan(CONFIG, facts()).goal.machines[0].drop_in.content.decode()
    (awaited, after) = ({*" ".join(re.findall(r"^After=(.*)$", text, re.M)).split()} for text in (prepare, drop_in))
    assert {"remote-fs.target", DRIVER_ROOTS_TARGET, "nvidia-fabricmanager.service"} <= after & awaited
    services = {service for vendor in HOST_VENDORS for service in vendor.services}
    assert services <= after & awaited
    assert not {"Requires", "BindsTo", "PartOf"} & {line.partition("=")[0] for line in drop_in.splitlines()}


@pytest.mark.parametrize("missing", [False, True])
def test_unseen_devices_and_a_missing_machine_change_nothing(missing: bool) -> None:
    """A failed observation is not an empty list, and the machine's file system may only be not mounted yet."""
    seen, why = facts(), "/dev: permission denied"
    if missing:
        seen = replace(seen, machines=(replace(seen.machines[0], root=Absent(why)),))
    else:
        seen = facts(VendorFacts("nvidia", devices=Unseen(why)))
        seen = replace(seen, files={path: FileState(b"old", owned=True) for path in seen.files})
    planned = plan(CONFIG, seen)
    assert planned.held == {"gpu-node": why}
    assert diff(planned, seen).actions == ()


@pytest.mark.parametrize(("systemd", "restricted"), [(257, False), (260, False), (261, True), (262, True)])
def test_the_address_families_of_a_node_are_allowed_where_nspawn_knows_the_setting(
    systemd: int, restricted: bool
) -> None:
    """systemd 261 announces a default without netlink, in which no node could work."""
    seen = replace(facts(), systemd_version=systemd)
    machine = plan(CONFIG, seen).goal.machines[0]
    line = b"\nRestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK AF_PACKET\n"
    assert (line in machine.nspawn.content) == restricted
    older = plan(CONFIG, replace(facts(), systemd_version=257)).goal.machines[0]
    assert machine.live.fixed == older.live.fixed, "an upgrade of systemd asks for no restart"
    files = {**seen.files, machine.nspawn.path: FileState(machine.nspawn.content, owned=True)}
    unseen = replace(seen, systemd_version=Unseen("time limit"), files=files)
    assert plan(CONFIG, unseen).goal.machines[0].nspawn == machine.nspawn, "an unknown version changes nothing"


def test_nouveau_is_named_and_vfio_is_not_a_fault() -> None:
    """vfio-pci has a GPU on purpose; nouveau was only faster."""
    vendor = nvidia()
    for driver, problems in (("nouveau", 2), ("vfio-pci", 0)):
        gpus = tuple(replace(gpu, driver=driver) for gpu in vendor.gpus)
        machine = plan(CONFIG, facts(replace(vendor, gpus=gpus))).goal.machines[0]
        assert len(machine.grants[0].problems) == problems
        assert machine.grants[0].nodes == ()


def test_a_host_without_gpus_is_skipped_and_removed_gpus_are_withdrawn() -> None:
    """A machine with settings stays configured, without nodes, when its last GPU is removed."""
    seen = facts(VendorFacts("nvidia"))
    planned = plan(CONFIG, seen)
    assert planned.skipped == {"gpu-node": "no GPU on this host"}
    assert diff(planned, seen).actions == ()
    path = nspawn_file("gpu-node")
    seen = replace(seen, files={**seen.files, path: FileState(b"with GPUs", owned=True)})
    actions = diff(plan(CONFIG, seen), seen).actions
    written = {action.path: action.content for action in actions if isinstance(action, WriteFile)}
    assert b"nvidia0" not in written[path]


def test_steps_come_in_a_safe_order() -> None:
    """Driver roots come before the handoff that names them, and a reload that no start needs after it."""
    seen = facts()
    kinds = [type(action) for action in diff(plan(CONFIG, seen), seen).actions]
    assert kinds == [WriteFile, WriteFile, ReloadUnits, StageDriverRoot, WriteFile, WriteFile]
    running = replace(seen, machines=(replace(seen.machines[0], unit_state="active"),))
    kinds = [type(action) for action in diff(plan(CONFIG, running), running).actions]
    assert kinds == [WriteFile, WriteFile, StageDriverRoot, WriteFile, WriteFile, ReloadUnits]


def test_files_of_a_machine_that_is_no_longer_configured_are_removed() -> None:
    """The record says what we own: only recorded files are removed, once they can be read."""
    seen = facts()
    gone, foreign = unit_drop_in("old"), nspawn_file("foreign")
    unread: dict[str, Broken | Unseen] = {nspawn_file("link"): Broken("a link"), nspawn_file("failed"): Unseen("EIO")}
    unread_files = {path: FileState(content, owned=True) for path, content in unread.items()}
    seen = replace(
        seen,
        files={
            **{**seen.files, **unread_files},
            gone: FileState(b"ours", owned=True),
            foreign: FileState(b"theirs", owned=False),
        },
    )
    actions = diff(plan(CONFIG, seen), seen).actions
    assert [action for action in actions if isinstance(action, RemoveFile)] == [RemoveFile(gone)]
    assert ReloadUnits() in actions
    running = replace(seen, machines=(replace(seen.machines[0], unit_state="active"),))
    assert ReloadUnits() in diff(plan(CONFIG, running), running).actions, "its unit is not looked at any more"


@pytest.mark.parametrize(
    "kept", [{"unit_state": "active"}, {"kept_from_boot_by": "unbounded-agent reset old"}], ids=["runs", "enabled"]
)
def test_a_machine_that_runs_or_starts_at_boot_keeps_settings_that_are_no_longer_configured(
    kept: dict[str, str],
) -> None:
    """Its next start would use the template's -U, which gives the whole root directory to other users."""
    seen = facts(machine="old")
    seen = replace(seen, files={nspawn_file("old"): FileState(b"ours", owned=True)}, vendors=(VendorFacts("nvidia"),))
    seen = replace(seen, machines=(replace(seen.machines[0], **kept),))
    planned = plan(Config(machines={}), seen)
    assert kept.get("kept_from_boot_by", "") in planned.held["old"]
    assert diff(planned, seen).actions == ()
    # `reset` removes the root file system first.
    without_root = replace(seen, machines=(replace(seen.machines[0], root=Absent("removed")),))
    actions = diff(plan(Config(machines={}), without_root), without_root).actions
    assert (RemoveFile(nspawn_file("old")) in actions) == ("unit_state" not in kept)


SET_PROPERTY = """\
# This is a drop-in unit file extension, created via "systemctl set-property"
# or an equivalent operation. Do not edit.
[Service]
DeviceAllow=
DeviceAllow=char-pts rw
DeviceAllow={device} rw
"""


def formerly_configured(unit_state: str, device: str) -> Facts:
    """Return a host with a machine that is no longer configured, and was given /dev/char/195:0 while it ran."""
    seen = facts(machine="old")
    live = LiveSettings("", (DeviceAllow("char-pts", "rw"), DeviceAllow("/dev/char/195:0", "rw")), {})
    files = {
        unit_drop_in("old"): FileState(b"ours", owned=True),
        device_allow_drop_in("old"): FileState(SET_PROPERTY.format(device=device).encode(), owned=False),
    }
    return replace(seen, machines=(replace(seen.machines[0], unit_state=unit_state, live=live),), files=files)


@pytest.mark.parametrize(
    ("unit_state", "device", "removed"),
    [
        ("inactive", "/dev/char/195:0", [device_allow_drop_in("old"), unit_drop_in("old")]),
        ("failed", "/dev/char/195:0", [device_allow_drop_in("old"), unit_drop_in("old")]),
        # This permission is not ours.
        ("inactive", "/dev/char/10:229", [unit_drop_in("old")]),
        ("active", "/dev/char/195:0", []),
    ],
)
def test_a_removed_machine_starts_without_our_permissions(unit_state: str, device: str, removed: list[str]) -> None:
    """systemd keeps what `set-property` has set until the host reboots, and applies it to the machine's next start."""
    seen = formerly_configured(unit_state, device)
    planned = plan(Config(machines={"other": MachineSettings()}), replace(seen, vendors=(VendorFacts("nvidia"),)))
    actions = diff(planned, seen).actions
    assert [action.path for action in actions if isinstance(action, RemoveFile)] == removed
    assert (ReloadUnits() in actions) is bool(removed)
    unread, unseen = FileState(Unseen("EIO"), owned=False), Unseen("EIO")
    for without in (
        replace(seen, files={**seen.files, device_allow_drop_in("old"): unread}),
        replace(seen, machines=(replace(seen.machines[0], live=None, live_unseen="EIO"),)),
        replace(seen, template_device_allow=unseen),
    ):
        actions = diff(planned, without).actions
        assert RemoveFile(unit_drop_in("old")) not in actions, "without it, no later pass would find these permissions"


def test_a_configured_machine_keeps_set_properties() -> None:
    """Its drop-in takes precedence over that setting."""
    seen = formerly_configured("inactive", "/dev/char/195:0")
    seen = replace(seen, files={**facts(machine="old").files, **seen.files})
    actions = diff(plan(Config(machines={"old": MachineSettings()}), seen), seen).actions
    assert not [action for action in actions if isinstance(action, RemoveFile)]


def test_an_unusual_node_is_refused_by_name_and_holds_up_nothing() -> None:
    vendor = nvidia()
    assert isinstance(vendor.devices, tuple)
    odd = node("/dev/nvidia1\nBoot=no", DeviceKind.GPU, 195, 1, "0000:02:00.0")
    machine = plan(CONFIG, facts(replace(vendor, devices=(*vendor.devices, odd)))).goal.machines[0]
    assert "Boot=no" not in machine.nspawn.content.decode()
    assert any(r"/dev/nvidia1\nBoot=no" in problem for grant in machine.grants for problem in grant.problems)


@given(st.text(max_size=40))
def test_bind_paths_survive_their_escape(name: str) -> None:
    """systemd's rule: a backslash makes the next character literal, a colon separates."""
    path = f"/dev/{name}"
    if not bindable(path):
        return
    parts, current, characters = [], "", iter(escape(path))
    for character in characters:
        if character == "\\":
            current += next(characters)
        elif character == ":":
            parts.append(current)
            current = ""
        else:
            current += character
    assert [*parts, current] == [path]
    assert "\n" not in escape(path)


@given(st.text(st.characters(exclude_categories=["Cc", "Cs"]) | st.sampled_from('\\"%'), max_size=40))
def test_quoted_values_survive(value: str) -> None:
    """Unquoting and expanding %% restores the value (systemd.syntax(7))."""
    inner = quote(value)[1:-1]
    assert re.sub(r"\\(.)", r"\1", inner).replace("%%", "%") == value
    assert not inner.replace("%%", "").count("%")


@pytest.mark.parametrize("initialised", [False, True])
def test_a_gpu_that_is_named_by_an_unknown_uuid(initialised: bool) -> None:
    """The driver knows a GPU's UUID only once something has used the GPU."""
    vendor = nvidia()
    if not initialised:
        vendor = replace(vendor, gpus=(replace(vendor.gpus[0], uuid=""), *vendor.gpus[1:]))
    (problem,) = select((vendor,), ["GPU-99999999-0000-0000-0000-000000000000"], Share()).problems
    assert problem.startswith("GPU GPU-99999999-0000-0000-0000-000000000000 is not on this host")
    assert (f", or is one of {vendor.gpus[0].pci_address}, whose UUIDs are unknown" in problem) is not initialised
