"""Directories and files of the host in a machine, from the settings to the machine's start."""

import re
import threading

import pytest
from msgspec.structs import replace
from pydantic import ValidationError

from agent.config.settings import CONTROL_PATHS, LINK_DIRECTORIES, REFUSED_TARGETS, Config
from agent.host.observe.host import observe_nspawn_sources, observe_sources
from agent.host.plan.diff import diff
from agent.host.plan.goal import plan
from agent.host.plan.live_devices import Acknowledged
from agent.model.conditions import Condition, ConditionType
from agent.model.facts import Absent, Broken, Facts, MountSource, Seen, Unseen
from agent.model.goal import MachineGoal
from agent.system.deadlines import call_device, call_source
from tests.fakes.facts import evaluated, facts
from tests.fakes.host import Host

DATA: dict[str, object] = {"source": "/srv/data", "target": "/mnt/data"}


def config(*mounts: dict[str, object]) -> Config:
    return Config.validated({"machines": {"gpu-node": {"extra_mounts": list(mounts)}}})


def goal(seen: Facts, *mounts: dict[str, object]) -> MachineGoal:
    (machine,) = plan(config(*mounts), seen).goal.machines
    return machine


def at(path: str, *components: str) -> MountSource:
    """Return a source that exists, with further links and directories among its `components`."""
    parts = path.split("/")[1:]
    return MountSource(path, (*components, "/", *("/" + "/".join(parts[: end + 1]) for end in range(len(parts)))))


def with_sources(**sources: Seen[MountSource]) -> Facts:
    """Return a host with these sources in /srv, and two machines."""
    machines = (*facts().machines, *facts(machine="other").machines)
    return replace(facts(), machines=machines, mount_sources={f"/srv/{name}": each for name, each in sources.items()})


def conditions(settings: Config, machine: MachineGoal, seen: Facts) -> dict[ConditionType, Condition]:
    found = evaluated(settings.machines["gpu-node"], machine, seen)
    return {each.type: each for each in found}


@pytest.mark.parametrize("state", [Absent("gone"), Unseen("no answer within 10 s"), Broken("not for machines")])
def test_a_missing_source_does_not_stop_the_machine(state: Seen[MountSource]) -> None:
    """nspawn would exit with an error."""
    seen = with_sources(data=state)
    machine = goal(seen, DATA)
    assert b"/srv/data" not in machine.nspawn.content
    present = conditions(config(DATA), machine, seen)[ConditionType.DEVICES_PRESENT]
    assert "; requested but missing: /srv/data for /mnt/data" in present.message


@pytest.mark.parametrize(
    "other",
    [
        {"extra_mounts": [DATA | {"source": "/srv/outer"}]},
        {"extra_mounts": [DATA | {"source": "/disk"}]},
        {"nspawn": {"extra": {"Files": {"Bind": "/disk:/mnt"}}}},
        {"nspawn": {"extra": {"Files": {"BindReadOnly": ["/other", "-/disk"]}}}},
        *(
            {"nspawn": {"extra": {"Files": {"Bind": f"{source}:/mnt"}}}}
            for source in ("//disk", "/disk/.", "/srv/../disk", " /disk", r"/d\isk/")
        ),
        *(
            {"nspawn": {"extra": {"Files": {"Overlay": value}}}}
            for value in ("/lower:/disk", "/lower:/disk:/mnt", r"/a\:b:/c:/disk:/mnt")
        ),
    ],
)
def test_a_source_inside_another_mount_is_refused(other: dict[str, object]) -> None:
    """Real paths decide, whether or not the other mount is read-only, or exists already."""
    seen = with_sources(data=at("/disk/data", "/srv/data"), outer=at("/disk", "/srv/outer"))
    settings = Config.validated({"machines": {"gpu-node": {"extra_mounts": [DATA]}, "other": other}})
    (machine,) = (each for each in plan(settings, seen).goal.machines if each.name == "gpu-node")
    assert b"/mnt/data" not in machine.nspawn.content
    (why,) = machine.missing
    assert "the path to it leads through /disk, where machine other could put a link" in why


@pytest.mark.parametrize("files", [{"Bind": "/srv/link/sub/..:/mnt"}, {"Overlay": "/lower:/srv/link:/mnt"}])
def test_a_source_behind_a_link_of_nspawn_settings_is_refused(host: Host, files: dict[str, str]) -> None:
    """nspawn mounts what the link leads to, and checks nothing."""
    host.make_directory("/disk/data")
    host.make_directory("/disk/sub")
    host.symlink("/srv/link", "/disk")
    other = {"nspawn": {"extra": {"Files": files}}}
    data = DATA | {"source": "/disk/data"}
    settings = Config.validated({"machines": {"gpu-node": {"extra_mounts": [data]}, "other": other}})
    sources, nspawn_sources = observe_sources(settings, host), observe_nspawn_sources(settings, host)
    seen = replace(facts(), mount_sources=sources, nspawn_sources=nspawn_sources)
    (why,) = plan(settings, seen).goal.machines[0].missing
    assert "the path to it leads through /disk, where machine other could put a link" in why


@pytest.mark.parametrize(
    "files",
    [{"Overlay": ["/disk:/upper", "/disk:/upper:/mnt", "/disk::/mnt"]}, {"OverlayReadOnly": "/lower:/disk:/mnt"}],
)
def test_a_source_inside_a_lower_layer_is_mounted(files: dict[str, object]) -> None:
    """A machine cannot change the lower layers of an overlay."""
    machines = {"gpu-node": {"extra_mounts": [DATA]}, "other": {"nspawn": {"extra": {"Files": files}}}}
    machine, _ = plan(Config.validated({"machines": machines}), with_sources(data=at("/disk/data"))).goal.machines
    assert machine.missing == ()


def test_a_link_that_a_machine_made_leads_nowhere(host: Host) -> None:
    """Its target does not count as granted either: other machines keep what exists."""
    host.file("/srv/a/file")
    host.file("/usr/share/models/data/file")
    host.symlink("/srv/a/sub", "/usr/share/models")
    machines = {
        "gpu-node": {"extra_mounts": [{"source": f"/srv/a{sub}", "target": f"/mnt{sub}"} for sub in ("", "/sub")]},
        "other": {"extra_mounts": [{"source": "/usr/share/models/data", "target": "/mnt"}]},
    }
    settings = Config.validated({"machines": machines})
    seen = replace(with_sources(), mount_sources=observe_sources(settings, host))
    one, other = plan(settings, seen).goal.machines
    assert b"/usr" not in one.nspawn.content
    assert one.missing == (
        "/srv/a/sub for /mnt/sub (the path to it leads through /srv/a, where machine gpu-node could put a link)",
    )
    assert b"BindReadOnly=/usr/share/models/data:/mnt" in other.nspawn.content


def test_a_running_machine_gets_later_mounts_at_its_next_start() -> None:
    """A mount cannot be withdrawn from a running machine, and pods may mount below it: so none is made live."""
    without, seen = with_sources(data=Absent("gone")), with_sources(data=at("/srv/data"))
    later = "; mounted at the machine's next start: /mnt/data"
    for started, now, expected in ((without, seen, True), (seen, seen, False), (seen, without, False)):
        live = goal(started, DATA).live
        running = replace(now, machines=(replace(now.machines[0], unit_state="active", live=live),))
        machine = goal(running, DATA)
        found = conditions(config(DATA), machine, running)
        assert found[ConditionType.DEVICES_PRESENT].message.endswith(later) == expected
        assert found[ConditionType.DEVICES_ALLOWED].reason == "NoReport", "Ready does not depend on it"
        assert live.fixed == machine.live.fixed
        planned = plan(config(DATA), running)
        assert not any("change" in each.describe() for each in diff(planned, running, Acknowledged()).actions)


def test_other_settings_need_a_restart() -> None:
    seen = with_sources(data=at("/srv/data"))
    fixed = [goal(seen, *mounts).live.fixed for mounts in ((), (DATA,), (DATA | {"read_only": False},))]
    assert len(set(fixed)) == 3
    assert fixed[0] == goal(facts()).live.fixed


def observed(host: Host, source: str, **mount: object) -> str:
    """Return the real path of a source, or what is wrong with it."""
    found = observe_sources(config(DATA | {"source": source} | mount), host)[source]
    return found.path if isinstance(found, MountSource) else f"{type(found).__name__}: {found.why}"


def test_sources_are_checked_through_links(host: Host) -> None:
    host.file("/srv/disk/data/file")
    host.symlink("/srv/data", "disk/data")
    host.symlink("/srv/dangling", "disk/gone")
    assert observed(host, "/srv/data") == "/srv/disk/data"
    assert observed(host, "/srv/data/file", target="/etc/file") == "/srv/disk/data/file"
    for absent in ("/srv/dangling", "/srv/absent"):
        assert observed(host, absent).startswith("Absent: ")
    host.failing["/srv/data"] = PermissionError(13, "no", "/srv/data")
    assert observed(host, "/srv/data").startswith("Unseen: ")


def test_only_root_may_change_the_path_to_a_source(host: Host) -> None:
    """Whoever may put a link there would choose what root in the machine sees. The source itself may be anybody's."""
    host.file("/home/alice/data/file")
    host.symlink("/srv/models", "/home/alice/data")
    host.symlink("/srv/home", "/home/alice")
    host.owners["/home/alice"] = (0o755, 1000)
    why = "Broken: /home/alice belongs to user 1000, not to root: the path could be redirected"
    for source, expected in (
        *(("/home/alice/data", why), ("/srv/models", why)),
        *(("/home/alice", "/home/alice"), ("/srv/home", "/home/alice")),
    ):
        assert observed(host, source) == expected
    host.owners["/home"] = (0o1777, 0)
    assert "users other than root can write in /home" in observed(host, "/home/alice"), "its owner could rename it"


@pytest.mark.parametrize("disk", ["/disk", "/disk[1]", "/disk*"])
def test_a_link_to_or_through_a_forbidden_directory(host: Host, disk: str) -> None:
    """It is refused even if that directory is itself a link, to a name like a pattern."""
    host.make_directory(f"{disk}/machines/other")
    host.make_directory("/etc/systemd/system")
    host.symlink("/var/lib/machines", f"{disk}/machines")
    host.symlink("/srv/units", "/etc/systemd/system")
    host.make_directory("/srv/data")
    host.symlink(f"{disk}/machines/other/data", "/srv/data")
    host.symlink("/srv/link", "/var/lib/machines/other/data")
    for source in (disk, f"{disk}/machines", f"{disk}/machines/other", "/srv/units"):
        assert "a path that controls the host or other machines" in observed(host, source)
    assert ", which controls the host or other machines" in observed(host, "/srv/link")


@pytest.mark.parametrize("name", ["d\udce9pot", "a\nBind=/etc/shadow:/mnt", "a ", "a\\b"])
def test_a_link_to_a_name_that_settings_cannot_have(host: Host, name: str) -> None:
    host.make_directory(f"/mnt/{name}")
    host.symlink("/srv/data", f"/mnt/{name}")
    why = "has a backslash, a control character, or a blank at its start or end"
    assert re.match(f"Broken: (?s:.*){why}", observed(host, "/srv/data"))


def test_a_dead_server_does_not_shorten_gpu_deadlines() -> None:
    """Each missed deadline halves only later ones of its own kind."""
    over = threading.Event()
    try:
        for number in range(4):
            with pytest.raises(TimeoutError):
                call_source(f"mount {number}", over.wait, 0.02)
        assert call_device("a GPU", lambda: threading.Event().wait(0.1), 0.4) is False
        with pytest.raises(TimeoutError):
            call_source("another mount", lambda: threading.Event().wait(0.1), 0.4)
    finally:
        over.set()


def refused(key: str, value: str, why: str = "") -> bool:
    """Return whether a mount with this source or target is refused, for this reason."""
    try:
        config(DATA | {key: value})
    except ValidationError as error:
        return why in str(error)
    return False


def test_sources_and_targets_that_are_refused() -> None:
    """A read-only mount is refused too: root in the machine can remount it."""
    sources = (
        *CONTROL_PATHS, *(f"{place}/below" for place in CONTROL_PATHS),
        "/", "/var", "/var/lib", "/etc", "/run", "/proc", "/proc/1",
        "/sys", "/dev", "/dev/kvm", "/root/data", "/tmp/data", "/run/user/0", "/run/udev", "/lib/modules", "srv",
        "/srv/../etc", "/srv/a\nBind=/", "/srv/a ", "/srv/\\a",
    )  # fmt: skip
    rights = (
        "/usr", "/usr/bin/nvidia-smi", "/usr/local", "/usr/lib", "/usr/lib/udev/rules.d", "/opt",
        "/opt/unbounded-agent/bin", "/etc/ssh", "/etc/cron.d", "/boot", "/etc/shadow", "/etc/passwd",
        "/etc/sudoers.d/x", "/etc/pam.d", "/etc/ld.so.preload", "/var/lib/machines/a", "/run/systemd",
        "/usr/local/lib/systemd/system", "/usr/local/lib", "/run/modprobe.d", "/usr/share/dbus-1", "/usr/share",
        "/usr/share/polkit-1/rules.d", "/etc/fstab", "/etc/crypttab", "/run/sysctl.d", "/usr/lib/modules-load.d",
        "/etc/network/if-up.d", "/usr/src", "/run/docker.sock", "/etc/nsswitch.conf", "/var/lib/dkms/nvidia",
    )  # fmt: skip
    targets = (
        *(path for paths in REFUSED_TARGETS.values() for path in paths), *LINK_DIRECTORIES,
        "/", "/usr", "/usr/lib", "/etc", "/run",
        "/var", "/var/lib", "/dev/shm", "/etc/cdi/x", "/run/host-nvidia/0", "/run/unbounded-agent/handoff", "mnt",
        "/mnt/../etc", "/run/systemd", "/etc/containerd", "/usr/bin",
    )  # fmt: skip
    why = "is, contains or lies below a path that controls the host"
    assert [source for source in sources if not refused("source", source)] == []
    assert [source for source in rights if not refused("source", source, why)] == []
    assert [target for target in targets if not refused("target", target)] == []


@pytest.mark.parametrize("source", ["/usr/share/models", "/usr/local/lib/models", "/etc/ssl/certs", "/lib64/x"])
def test_the_hosts_own_directories_are_not_writable(host: Host, source: str) -> None:
    assert len(config(DATA | {"source": source}).machines) == 1
    with pytest.raises(ValidationError, match=f"{source} is where the host keeps its own programs and settings"):
        config(DATA | {"source": source, "read_only": False})
    host.make_directory(source)
    host.symlink("/srv/data", source)
    assert observed(host, "/srv/data") == source
    written = observe_sources(config(DATA, DATA | {"target": "/mnt/b", "read_only": False}), host)["/srv/data"]
    assert isinstance(written, Broken)
    assert "set read_only = true" in written.why


def test_each_target_is_mounted_once() -> None:
    with pytest.raises(ValidationError, match="a mount at /mnt/data appears twice"):
        config(DATA, DATA | {"source": "/srv/other", "target": "/mnt//data/"})
