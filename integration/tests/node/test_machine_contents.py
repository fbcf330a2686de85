"""Foreign content in a machine's image: it is left alone and named with advice, and what pods get shows the effect."""

import json
from pathlib import Path
from typing import Any

import pytest

from integration.bed.machine.node import KIND, MACHINE, Node, Pod
from integration.bed.process import run
from integration.bed.tools import MODULE, TOOLKIT, go, toolkit
from integration.bed.waiting import wait
from integration.conftest import Bed
from integration.tests.kubernetes.test_pods import expect_gpus, probe

pytestmark = pytest.mark.scenario("002")

ROOT = f"/var/lib/machines/{MACHINE}"
CUDA = "/usr/lib/x86_64-linux-gnu/libcuda.so.1"
OURS = "/etc/cdi/nvidia.yaml"
REFRESHED = "/var/run/cdi/nvidia.yaml"
REFRESH_UNITS = ("nvidia-cdi-refresh.path", "nvidia-cdi-refresh.service")


def settle(bed: Bed) -> dict[str, dict[str, Any]]:
    """Run the machine half now, without waiting for its timer; return the conditions after that."""
    bed.node.run("systemctl", "start", "unbounded-agent-gpu.service", timeout=120)
    return bed.conditions()


def spec_with(ours: dict[str, Any], **gpus: str) -> str:
    """Return a specification with our devices under other names: NAME="1" has what our device 1 has."""
    by_name = {device["name"]: device["containerEdits"] for device in ours["devices"]}
    devices = [{"name": name, "containerEdits": by_name[other]} for name, other in gpus.items()]
    return json.dumps({**ours, "devices": devices})


def cannot_start(node: Node, name: str) -> str:
    """Assert that a pod with a device that no runtime knows does not start; return the CRI's message."""
    finished = node.pod(Pod(("true",), cdi=(name,)), check=False)
    assert finished.status != 0
    return finished.stderr


# ---- which CDI specification wins, by NVIDIA's own reader


def names(*directories: Path) -> set[str]:
    program = toolkit() / "nvidia-ctk"
    argv: list[str | Path] = [program, "--quiet", "cdi", "list", *(f"--spec-dir={each}" for each in directories)]
    return {line.partition("=")[2] for line in run(argv).splitlines() if line.startswith(KIND)}


def test_nvidia_ctk_ranks_specs_as_conditions_assume(tmp_path: Path) -> None:
    """Within one directory, a name in two files is dropped; a later directory wins; invalid files are skipped."""
    edits = {"env": ["A=B"]}
    etc, run_ = tmp_path / "etc", tmp_path / "run"
    for path, devices in ((etc / "a.json", "12"), (etc / "b.yaml", "23"), (run_ / "c.json", "1")):
        path.parent.mkdir(exist_ok=True)
        listed = [{"name": name, "containerEdits": edits} for name in devices]
        path.write_text(json.dumps({"cdiVersion": "0.5.0", "kind": KIND, "devices": listed}))
    (etc / "c.yaml").write_text("kind: [")
    (etc / "d.json").write_text(json.dumps({"cdiVersion": "0.5.0", "kind": KIND, "devices": []}))
    (etc / "e.yml").write_text((etc / "a.json").read_text())
    assert names(etc) == {"1", "3"}
    assert names(run_) == {"1"}
    assert names(etc, run_) == {"1", "3"}


# ---- on the simulated host


@pytest.mark.exhaustive
def test_cuda_stub_in_the_image(ready: Bed) -> None:
    """A file, a foreign link and a directory take the place of libcuda.so.1; pods still have the driver's own."""
    for make, said in (
        (f"echo stub > {CUDA}", f"{CUDA} (a file)"),
        (f"mkdir -p /opt/stubs && echo stub > /opt/stubs/libcuda.so && ln -s /opt/stubs/libcuda.so {CUDA}",
         f"{CUDA} (a link to /opt/stubs/libcuda.so)"),
        (f"mkdir {CUDA}", f"{CUDA} (a directory)"),
    ):  # fmt: skip
        ready.node.shell(f"rm -rf {CUDA} && {make}")
        look = f"stat --format '%F %i' {CUDA}; readlink {CUDA} || true"
        before = ready.node.shell(look).stdout
        conditions = settle(ready)
        found = conditions["LibrariesLinked"]
        assert (found["status"], found["reason"]) == ("False", "Conflict")
        assert f"in the way of the driver's files, but not made by the agent: {said}" in found["message"]
        assert f"dpkg -S {CUDA}" in found["message"]
        assert conditions["CDISpecCurrent"]["status"] == "True"
        assert ready.node.shell(look).stdout == before
    expect_gpus(probe(ready.node, cdi=("1",)), {1})
    ready.node.run("rmdir", CUDA)
    assert settle(ready)["LibrariesLinked"]["reason"] == "Linked"


@pytest.mark.exhaustive
def test_same_names_in_etc_cdi_leave_no_device(ready: Bed) -> None:
    """Runtimes drop names that are in both files; other names still work."""
    theirs = f"{ROOT}/etc/cdi/site.json"
    ready.guest.write(theirs, spec_with(ready.node.spec(), **{"1": "1", "site": "2"}).encode())
    assert f"unresolvable CDI devices {KIND}=1" in cannot_start(ready.node, "1")
    expect_gpus(probe(ready.node, cdi=("site",)), {2})
    found = settle(ready)["CDISpecCurrent"]
    assert (found["status"], found["reason"]) == ("False", "NamesCollide")
    assert f"{OURS} and /etc/cdi/site.json define the same names, so no pod can get {KIND}=1;" in found["message"]
    assert "remove /etc/cdi/site.json" in found["message"]
    ready.guest.write(theirs, spec_with(ready.node.spec(), site="2").encode())
    found = settle(ready)["CDISpecCurrent"]
    assert (found["status"], found["reason"]) == ("True", "Verified")
    assert f"/etc/cdi/site.json has further devices of this kind: {KIND}=site" in found["message"]
    expect_gpus(probe(ready.node, cdi=("1",)), {1})


@pytest.mark.exhaustive
def test_spec_in_var_run_cdi_outranks_ours(ready: Bed) -> None:
    """A pod that requests GPU 1 gets the other file's device of this name. A broken file has no effect."""
    ready.node.shell(f"mkdir -p /var/run/cdi && printf %s {KIND!r} > /var/run/cdi/broken.json")
    theirs = spec_with(ready.node.spec(), **{"1": "5"})
    script = f"cat > {REFRESHED} <<'EOF'\n{theirs}\nEOF"
    ready.node.shell(script)
    expect_gpus(probe(ready.node, cdi=("1",)), {5})
    found = settle(ready)["CDISpecCurrent"]
    assert (found["status"], found["reason"]) == ("False", "Shadowed")
    assert f"pods get {KIND}=1 from {REFRESHED} instead of {OURS}, because" in found["message"]
    ready.node.run("rm", REFRESHED)
    found = settle(ready)["CDISpecCurrent"]
    assert (found["status"], found["reason"]) == ("True", "Verified")
    assert "/var/run/cdi/broken.json is not a valid CDI specification, so runtimes skip it" in found["message"]
    expect_gpus(probe(ready.node, cdi=("1",)), {1})


@pytest.mark.exhaustive
def test_nvidias_own_refresh_service(ready: Bed) -> None:
    """The image masks these units of NVIDIA's packages. They are named if they are enabled, and again once they ran."""
    source = Path(run([go(), "list", "-m", "-f", "{{.Dir}}", TOOLKIT], cwd=MODULE)) / "deployments/systemd"
    for unit in REFRESH_UNITS:
        # The mask is a link at the same path.
        ready.run("rm", f"{ROOT}/etc/systemd/system/{unit}")
        ready.guest.write(f"{ROOT}/etc/systemd/system/{unit}", (source / unit).read_bytes())
    ready.node.run("systemctl", "enable", *REFRESH_UNITS)
    found = settle(ready)["CDISpecCurrent"]
    assert (found["status"], found["reason"]) == ("True", "Verified")
    assert f"{' and '.join(REFRESH_UNITS)} are enabled and would write {REFRESHED}" in found["message"]
    ready.node.run("systemctl", "start", "nvidia-cdi-refresh.service", timeout=120)
    found = settle(ready)["CDISpecCurrent"]
    assert (found["status"], found["reason"]) == ("False", "Shadowed")
    units = " ".join(REFRESH_UNITS)
    advice = f"`systemctl disable --now {units}; systemctl mask {units}`, then remove {REFRESHED}"
    assert advice in found["message"]
    ready.node.shell(advice.strip("`").replace("`, then remove", "; rm"))
    found = settle(ready)["CDISpecCurrent"]
    assert (found["status"], found["reason"]) == ("True", "Verified")
    assert "nvidia-cdi-refresh" not in found["message"]


def test_image_without_our_half(ready: Bed) -> None:
    """Nothing in the machine answers: the condition says so, with advice."""
    ready.run("sh", "-c", f"rm -rf {ROOT}/usr/lib/unbounded-agent; find {ROOT}/etc {ROOT}/usr/lib/systemd "
              "-name 'unbounded-agent*' -delete -o -name '50-unbounded-agent.conf' -delete")  # fmt: skip
    ready.run("systemctl", "restart", f"systemd-nspawn@{MACHINE}.service", timeout=200)
    active = ("systemctl", "is-active", "--quiet", "containerd.service")
    wait("containerd runs", lambda: ready.node.run(*active, check=False).status == 0, 180, ready.evidence)
    conditions = ready.conditions()
    assert conditions["MachineRunning"]["status"] == "True"
    for kind in ("DevicesAllowed", "LibrariesLinked", "CDISpecCurrent", "RuntimeConfigured", "RuntimeActive", "Ready"):
        assert (conditions[kind]["status"], conditions[kind]["reason"]) == ("Unknown", "NoReport"), kind
    assert "its image lacks the machine half" in conditions["Ready"]["message"]
    assert "containerfiles/" in conditions["Ready"]["message"]
    journal = ready.run("journalctl", "-M", MACHINE, "-b", "-u", "unbounded-agent-gpu", check=False)
    assert "No entries" in journal.stdout
