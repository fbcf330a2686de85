"""Directories and files of the host in a machine, from the settings to its start."""

from dataclasses import replace

import pytest
from pydantic import ValidationError

from agent.conditions import Condition, ConditionType
from agent.config import Config, MachineSettings
from agent.extras import LINKED, NO_TARGET, SECRET
from agent.facts import Absent, Facts, Seen, Unseen
from agent.goal import MachineGoal
from agent.live import parse_live, render_live
from agent.observe.mounts import observe_sources
from agent.plan import plan
from agent.plan.diff import Said, diff
from agent.readiness import evaluate
from tests.example import facts
from tests.recorded import Host

DATA: dict[str, object] = {"source": "/srv/data", "target": "/mnt/data"}


def config(*mounts: dict[str, object]) -> Config:
    return Config.model_validate({"machines": {"gpu-node": {"extra_mounts": list(mounts)}}})


def goal(seen: Facts, *mounts: dict[str, object]) -> MachineGoal:
    (machine,) = plan(config(*mounts), seen).goal.machines
    return machine


def with_sources(**sources: Seen[str]) -> Facts:
    return replace(facts(), mount_sources={f"/srv/{name}": state for name, state in sources.items()})


def conditions(settings: Config, machine: MachineGoal, seen: Facts) -> dict[ConditionType, Condition]:
    found = evaluate(settings.machines["gpu-node"], machine, seen, Absent("none"), "")
    return {each.type: each for each in found}


def test_read_only_unless_said_otherwise() -> None:
    seen = with_sources(data="/srv/data", scratch="/srv/scratch")
    scratch = {"source": "/srv/scratch", "target": "/mnt/a:b", "read_only": False}
    lines = goal(seen, DATA, scratch).nspawn.content.decode().splitlines()
    assert "BindReadOnly=/srv/data:/mnt/data" in lines
    assert "Bind=/srv/scratch:/mnt/a\\:b" in lines


@pytest.mark.parametrize("state", [Absent("gone"), Unseen("no answer within 10 s"), "/var/lib/machines/other"])
def test_a_source_that_is_not_there_does_not_stop_the_machine(state: Seen[str]) -> None:
    """nspawn would end with an error. The last one is a link to where no source may be."""
    seen = with_sources(data=state)
    machine = goal(seen, DATA)
    assert b"/srv/data" not in machine.nspawn.content
    present = conditions(config(DATA), machine, seen)[ConditionType.DEVICES_PRESENT]
    assert "; asked for and not there: /srv/data for /mnt/data" in present.message


def test_a_machine_that_runs_is_told_to_restart_for_what_came_later() -> None:
    """A mount cannot be taken back from it, and pods may have mounted things below it: so none is made live."""
    without, seen = with_sources(data=Absent("gone")), with_sources(data="/srv/data")
    for started, now, reason in ((without, seen, "MachineRestartNeeded"), (seen, without, "NoReport")):
        live = goal(started, DATA).live
        running = replace(now, machines=(replace(now.machines[0], unit_state="active", live=live),))
        machine = goal(running, DATA)
        allowed = conditions(config(DATA), machine, running)[ConditionType.DEVICES_ALLOWED]
        assert allowed.reason == reason
        assert live.fixed == machine.live.fixed
        planned = plan(config(DATA), running)
        assert not any("change" in each.describe() for each in diff(planned, running, Said()).actions)


def test_other_settings_need_a_restart() -> None:
    seen = with_sources(data="/srv/data")
    fixed = [goal(seen, *mounts).live.fixed for mounts in ((), (DATA,), (DATA | {"read_only": False},))]
    assert len(set(fixed)) == 3
    assert fixed[0] == goal(facts()).live.fixed


def test_what_a_machine_started_with_is_noted() -> None:
    live = goal(with_sources(data="/srv/data"), DATA).live
    assert live.mounts == ("/mnt/data",)
    assert parse_live(render_live(live)) == live


def test_sources_are_looked_at_through_links(host: Host) -> None:
    host.file("/srv/disk/data/file")
    host.symlink("/srv/data", "disk/data")
    host.symlink("/srv/dangling", "disk/gone")
    mounts = [DATA | {"source": f"/srv/{name}", "target": f"/mnt/{name}"} for name in ("data", "dangling", "absent")]
    mounts.append({"source": "/srv/data/file", "target": "/etc/file"})
    seen = observe_sources(config(*mounts), host)
    assert seen["/srv/data"] == "/srv/disk/data"
    assert seen["/srv/data/file"] == "/srv/disk/data/file"
    assert isinstance(seen["/srv/dangling"], Absent)
    assert isinstance(seen["/srv/absent"], Absent)
    host.failing["/srv/data"] = PermissionError(13, "no", "/srv/data")
    assert isinstance(observe_sources(config(DATA), host)["/srv/data"], Unseen)


@pytest.mark.parametrize(
    "source",
    [
        *SECRET, *(f"{place}/below" for place in SECRET), "/", "/var", "/var/lib", "/etc", "/run", "/proc", "/proc/1",
        "/sys", "/dev", "/dev/kvm", "/root/data", "/tmp/data", "/run/user/0", "srv", "/srv/../etc", "/srv/a\nBind=/",
        "/srv/a ", "/srv/\\a",
    ],
)  # fmt: skip
def test_sources_that_are_refused(source: str) -> None:
    with pytest.raises(ValidationError):
        config(DATA | {"source": source})


@pytest.mark.parametrize(
    "target",
    [
        *(place for places in NO_TARGET.values() for place in places), *LINKED, "/", "/usr", "/usr/lib", "/etc", "/run",
        "/var", "/var/lib", "/dev/shm", "/etc/cdi/x", "/run/host-nvidia/0", "/run/unbounded-agent/handoff", "mnt",
        "/mnt/../etc",
    ],
)  # fmt: skip
def test_targets_that_are_refused(target: str) -> None:
    with pytest.raises(ValidationError):
        config(DATA | {"target": target})


@pytest.mark.parametrize("target", ["/mnt", "/srv/data", "/etc/resolv.conf", "/usr/local/lib/x", "/var/lib/kubelet"])
def test_usual_targets_are_taken(target: str) -> None:
    assert config(DATA | {"target": target}).machines["gpu-node"].extra_mounts[0].target == target


def test_one_place_is_mounted_once() -> None:
    with pytest.raises(ValidationError, match="a mount at /mnt/data is there twice"):
        config(DATA, DATA | {"source": "/srv/other", "target": "/mnt//data/"})


def test_a_host_without_gpus_has_them_too() -> None:
    bare = replace(with_sources(data="/srv/data"), vendors=())
    assert MachineSettings().beside_gpus is False
    assert goal(bare, DATA).live.mounts == ("/mnt/data",)
