"""A later nvidia-ctk: what is dangerous is refused, what is harmless is published, and the rest is left out."""

import json
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.machine.run import run
from agent.model.device import DeviceNumber
from agent.model.handoff import GrantedDevice
from agent.vendors.cdi import normalised
from agent.vendors.machine_vendor import Verdict
from agent.vendors.nvidia.contract import HOOK
from agent.vendors.nvidia.nvidia_ctk import with_additions, with_no_gpu
from agent.vendors.nvidia.verify import Sieve, is_gpu_name, verify
from tests.fakes.cdi_modes import answer, published, recorded
from tests.fakes.cdi_modes import machine as machine  # the fixture
from tests.fakes.cdi_specs import LIVE, Spec
from tests.fakes.machine import LIBRARIES, REQUEST, ROOT, Machine, gpu_machine, nvidia_ctk, recorded_spec

NULL = DeviceNumber(1, 3, 0o666)
VOID = {
    "hostPath": "/dev/null",
    "containerPath": "/var/run/nvidia-container-devices/void",
    "options": ["ro", "nosuid", "nodev", "bind"],
}
"""The mount that nvidia-ctk adds to each specification since 1.20.2."""
CUDA = f"{LIBRARIES}/libcuda.so.550.163.01"
SMI = f"{ROOT}/usr/bin/nvidia-smi"
ICD = "vulkan/icd.d/nvidia_icd.json"
UUIDS = tuple(f"GPU-11111111-2222-3333-4444-55555555555{index}" for index in (0, 1))


def mount(source: str, target: str, *options: str) -> Spec:
    return {"hostPath": source, "containerPath": target, "options": list(options or ("ro", "nosuid", "nodev", "bind"))}


def hook(*arguments: str, path: str = HOOK, **more: object) -> Spec:
    return {"hookName": "createContainer", "path": path, "args": ["nvidia-cdi-hook", *arguments], **more}


def added(key: str, value: object) -> Callable[[Spec], object]:
    return lambda edits: edits.setdefault(key, []).append(value)


def to_hook(index: int, *arguments: str) -> Callable[[Spec], object]:
    """Return an edit of one of the two hooks for the driver's files. (Devices have no hooks.)"""

    def edit(edits: Spec) -> None:
        for each in edits.get("hooks", [])[index : index + 1]:
            each["args"].extend(arguments)

    return edit


def to_first(key: str, **members: object) -> Callable[[Spec], object]:
    return lambda edits: edits[key][0].update(members) if key in edits else None


Edit = Callable[[Spec], object]
HARMLESS: dict[str, tuple[Edit, str]] = {
    "void": (added("mounts", VOID), "mount of /dev/null"),
    "void in /run": (added("mounts", VOID | {"containerPath": "/run/nvidia-container-devices/void"}), "of /dev/null"),
    "granted node": (
        added("mounts", mount("/dev/nvidiactl", "/dev/nvidiactl", "ro", "bind")),
        "mount of /dev/nvidiactl",
    ),
    "data elsewhere": (added("mounts", mount(f"{ROOT}/usr/share/{ICD}", f"/usr/local/share/{ICD}")), ""),
    "NVIDIA's variable": (added("env", "NVIDIA_CTK_NEW_FEATURE=v2"), "NVIDIA_CTK_NEW_FEATURE=v2"),
}
"""Edits of containerEdits, and how the message names them."""
UNKNOWN: dict[str, tuple[Edit, str]] = {
    "edits": (lambda edits: edits.update(intelRdt={"closID": "x"}), "unknown key intelRdt"),
    "node's key": (to_first("deviceNodes", annotations={"a": "b"}), "key annotations of device node /dev/nvidia"),
    "mount's key": (to_first("mounts", idMappings=[{"size": 1}]), "key idMappings of mount of"),
    "mount's option": (lambda edits: edits["mounts"][0]["options"].append("noatime"), "unexpected option 'noatime'"),
    "null elsewhere": (added("mounts", VOID | {"containerPath": "/etc/nvidia/x"}), "unexpected '/etc/nvidia/x'"),
    "request by mount": (
        added("mounts", VOID | {"containerPath": "/var/run/nvidia-container-devices/all"}),
        "unexpected '/var/run/nvidia-container-devices/all'",
    ),
    "no such device": (added("mounts", mount("/dev/nvidia-new", "/dev/nvidia-new")), "mount of '/dev/nvidia-new'"),
    "node elsewhere": (added("mounts", mount("/dev/nvidia0", "/dev/zero", "ro")), "node /dev/nvidia0 at unexpected"),
    "hidden node": (added("mounts", mount("/dev/nvidiactl", "/dev/nvidiactl")), "mount of device node /dev/nvidiactl"),
    "program elsewhere": (added("mounts", mount(SMI, "/usr/local/bin/nvidia-smi")), "/usr/local/bin/nvidia-smi"),
    "hook": (added("hooks", hook("chmod", "--mode", "755", "--path", "/dev/dri")), "['chmod']"),
    "hook of a later stage": (added("hooks", hook("check") | {"hookName": "startContainer"}), "['check']"),
    "hook's key": (to_first("hooks", timeout=5), "key timeout of hook create-symlinks"),
    "hook's variable": (to_first("hooks", env=["NVIDIA_CTK_DEBUG=true"]), "variable 'NVIDIA_CTK_DEBUG=true'"),
    "hook's flag": (to_hook(1, "--verbose"), "update-ldcache --verbose"),
    "hook's flag with a value": (to_hook(1, "--format=new"), "update-ldcache --format=new"),
    "folder": (to_hook(1, "--folder", "/usr/lib64"), "update-ldcache --folder /usr/lib64"),
    "link": (
        to_hook(0, "--link", f"libcuda.so.550.163.01::/{LIBRARIES}/libcuda.so.2"),
        f"create-symlinks --link libcuda.so.550.163.01::/{LIBRARIES}/libcuda.so.2",
    ),
    "variable": (added("env", "CUDA_NEW=1"), "variable 'CUDA_NEW=1'"),
    "variable with a path": (added("env", "NVIDIA_CTK_NEW_DIR=/usr/lib/new"), "NVIDIA_CTK_NEW_DIR=/usr/lib/new"),
    "no variable": (added("env", "NVIDIA_CTK"), "variable 'NVIDIA_CTK'"),
}
DANGEROUS: dict[str, tuple[Edit, str]] = {
    "writable": (added("mounts", VOID | {"options": ["nosuid", "bind"]}), "mount of '/dev/null' is not read-only"),
    "host's data": (added("mounts", mount("/etc", "/run/etc")), "mount of '/etc'"),
    "host's data that is not there yet": (added("mounts", mount("/etc/later", "/run/etc")), "mount of '/etc/later'"),
    "another device": (added("mounts", mount("/dev/sda", "/dev/sda")), "mount of '/dev/sda'"),
    "overlay": (to_first("mounts", type="overlay"), "unknown key type"),
    "overlay's options": (lambda edits: edits["mounts"][0]["options"].append("upperdir=/etc"), "'upperdir=/etc'"),
    "set-user-ID": (lambda edits: edits["mounts"][0]["options"].append("suid"), "option 'suid'"),
    "propagation": (lambda edits: edits["mounts"][0]["options"].append("rshared"), "option 'rshared'"),
    "preload by mount": (added("mounts", mount(f"{ROOT}/{CUDA}", "/etc/ld.so.preload")), "/etc/ld.so.preload"),
    "program's place": (added("mounts", mount(SMI, "/usr/bin/sh")), "at unexpected '/usr/bin/sh'"),
    "node": (added("deviceNodes", {"path": "/dev/sda"}), "'/dev/sda' is not granted"),
    "node from elsewhere": (to_first("deviceNodes", hostPath="/dev/sda"), "unexpected fields"),
    "network": (lambda edits: edits.update(netDevices=[{"hostInterfaceName": "eth0"}]), "unknown key netDevices"),
    "program": (added("hooks", hook("create-symlinks", path="/usr/bin/other")), "/usr/bin/other"),
    "program by name": (added("hooks", hook("x") | {"args": ["sh", "x"]}), "unexpected hook"),
    "hook's stage": (to_first("hooks", hookName="createRuntime"), "unexpected hook createRuntime"),
    "hook's loader": (to_first("hooks", env=["LD_AUDIT=x.so"]), "'LD_AUDIT=x.so'"),
    "other ldconfig": (to_hook(1, "--ldconfig-path=@/tmp/x"), "--ldconfig-path=@/tmp/x"),
    "link over a program": (to_hook(0, "--link", "nvidia-smi::/usr/bin/sh"), "::/usr/bin/sh"),
    "link over a library": (to_hook(0, "--link", f"libcuda.so.1::/{LIBRARIES}/libc.so.6"), "libc.so.6"),
    "group": (lambda edits: edits.update(additionalGids=[6]), "additional group 6"),
    "loader": (added("env", "LD_PRELOAD=libx"), "LD_PRELOAD"),
    "NVIDIA's loader": (added("env", "CUDA_INJECTION64_PATH=libx"), "CUDA_INJECTION64_PATH"),
    "NVIDIA's other loader": (added("env", "NVIDIA_INJECTION=x"), "NVIDIA_INJECTION"),
    "Vulkan's loader": (added("env", "VK_ICD_FILENAMES=x.json"), "VK_ICD_FILENAMES"),
    "search path": (added("env", "PATH=bin"), "PATH=bin"),
    "request": (added("env", "NVIDIA_VISIBLE_DEVICES=all"), "NVIDIA_VISIBLE_DEVICES=all"),
    "other request": (added("env", "NVIDIA_IMEX_CHANNELS=0"), "NVIDIA_IMEX_CHANNELS=0"),
}


FILES = {f"{ROOT}/{file.target}" for file in REQUEST.files}
HERE = (
    LIVE | {"/dev/null": NULL, "/dev/sda": DeviceNumber(8, 0)},
    FILES | {"/etc", "/dev/null", "/dev/sda", *LIVE},
)
"""What `verify` learns of the machine: numbers of nodes, and paths that exist."""


def settle(tree: Path, spec: Spec) -> Machine:
    machine = gpu_machine(tree)
    machine.node("/dev/null", *NULL[:2])
    machine.node("/dev/sda", 8, 0)
    machine.program("nvidia-ctk", lambda argv: nvidia_ctk(machine, argv, spec, "1.21.0"))
    run(machine)
    return machine


def spec_of(machine: Machine, path: str = "etc/cdi/nvidia.yaml") -> Spec:
    loaded: Spec = json.loads((machine.tree / path).read_text())
    return loaded


def edited(*edits: Edit) -> Spec:
    spec = recorded_spec()
    for edit in edits:
        edit(spec["containerEdits"])
    return spec


def sifted(spec: object) -> tuple[Sieve, Spec, Verdict]:
    """Return the walk, what is left of the specification with the agent's additions, and the verdict on it."""
    sieve = Sieve(REQUEST, *HERE, is_device=is_gpu_name)
    written = normalised(spec)
    assert isinstance(written, dict)
    made = normalised(with_additions(with_no_gpu(sieve.sift(written)), REQUEST)[0])
    assert isinstance(made, dict)
    return sieve, made, verify(made, REQUEST, *HERE)


@pytest.mark.parametrize("name", HARMLESS)
def test_what_is_harmless_stays(name: str) -> None:
    edit, named = HARMLESS[name]
    spec = edited(edit)
    sieve, made, verdict = sifted(spec)
    assert (verdict.problems, sieve.left_out) == ((), {})
    assert named in ", ".join(sieve.harmless)
    for key in ("mounts", "env"):
        assert spec["containerEdits"][key][-1] in made["containerEdits"][key]


@pytest.mark.parametrize("name", UNKNOWN)
def test_what_is_unknown_is_left_out(name: str) -> None:
    edit, named = UNKNOWN[name]
    spec = edited(edit)
    assert named in "; ".join(verify(spec, REQUEST, *HERE).problems), "it must not be published as it is"
    sieve, made, verdict = sifted(spec)
    assert verdict.problems == ()
    assert named in "; ".join(sieve.left_out)
    without = sifted(recorded_spec())[1]
    if name == "hook's variable":
        without["containerEdits"]["hooks"][0]["env"] = []
    assert made == without


@pytest.mark.parametrize("name", DANGEROUS)
def test_what_is_dangerous_is_refused(name: str) -> None:
    edit, named = DANGEROUS[name]
    *_, verdict = sifted(edited(UNKNOWN["variable"][0], edit, UNKNOWN["edits"][0]))
    assert named in "; ".join(verdict.problems)


def test_many_faults_cut_off_nothing_that_follows(tmp_path: Path) -> None:
    """Neither many nodes that nvidia-ctk leaves out, nor much that it adds, nor many problems."""
    harmless = (added("env", f"NVIDIA_CTK_NEW_{index}={'x' * 40}") for index in range(99))
    machine = settle(tmp_path / "machine", edited(UNKNOWN["edits"][0], *harmless))
    machine.put("/etc/cdi/other.yaml", "{")
    channels = [f"/dev/nvidia-caps-imex-channels/channel{index}" for index in range(64)]
    for index, path in enumerate(channels):
        machine.node(path, 241, index)
    granted = (GrantedDevice(path, "imex-channel", 241, index) for index, path in enumerate(channels))
    machine.hand(REQUEST._replace(devices=(*REQUEST.devices, *granted)))
    assert machine.verdict("CDISpecCurrent") == ("True", "EditsLeftOut")
    assert f"NotInSpec (the generator leaves them out): {channels[0]}, " in machine.message("CDISpecCurrent")
    assert "/etc/cdi/other.yaml cannot be read" in machine.message("CDISpecCurrent")
    dangerous = edited(UNKNOWN["edits"][0], *(added("env", f"LD_PRELOAD={'x' * 40}{index}") for index in range(99)))
    machine.program("nvidia-ctk", lambda argv: nvidia_ctk(machine, argv, dangerous, "1.21.0"))
    machine.put("/usr/bin/nvidia-ctk", "another build")
    assert machine.verdict("CDISpecCurrent") == ("False", "SpecRefused")
    assert machine.message("CDISpecCurrent").endswith("The last good CDI specification stays in use")
    machine.put("/etc/cdi/nvidia.yaml", json.dumps(dangerous))
    assert machine.verdict("CDISpecCurrent") == ("False", "SpecRefused")
    assert "The published CDI specification stays, but is out of date" in machine.message("CDISpecCurrent")


def test_what_is_harmless_is_published(tmp_path: Path) -> None:
    machine = settle(tmp_path, edited(*(edit for edit, _ in HARMLESS.values())))
    for _ in range(2):
        assert machine.conditions()["CDISpecCurrent"] == ("True", "Verified")
        assert "NVIDIA_CTK_NEW_FEATURE=v2" in machine.message("CDISpecCurrent")
        run(machine)


def test_null_is_known_by_its_number(tmp_path: Path) -> None:
    spec = edited(HARMLESS["void"][0])
    machine = gpu_machine(tmp_path)
    machine.put("/dev/null", "data")
    machine.program("nvidia-ctk", lambda argv: nvidia_ctk(machine, argv, spec, "1.20.2"))
    assert machine.verdict("CDISpecCurrent") == ("False", "SpecRefused")
    assert "mount of '/dev/null', which is not a file of the driver root" in machine.message("CDISpecCurrent")
    assert not machine.exists("/etc/cdi/nvidia.yaml")


def test_unknown_keys_and_devices(tmp_path: Path) -> None:
    """A device under a new kind of name is left out, even one with the name of the agent's own."""
    spec = edited(UNKNOWN["edits"][0]) | {"annotations": {"a": "b"}, "next": 1}
    spec["devices"][0]["annotations"] = {"a": "b"}
    spec["devices"].append({"name": "gpu0", "containerEdits": spec["devices"][0]["containerEdits"]})
    spec["devices"].append({"name": "none", "containerEdits": {"env": ["NVCT_EMPTY_DEVICE=1"]}})
    machine = settle(tmp_path / "new", spec)
    named = ["unknown key intelRdt", "device gpu0"]
    named += [f"key {each}" for each in ("annotations of the specification", "next of the", "annotations of a device")]
    for _ in range(2):
        assert machine.conditions()["CDISpecCurrent"] == ("True", "EditsLeftOut")
        message = machine.message("CDISpecCurrent").partition("EditsLeftOut: ")[2]
        assert [each for each in named if each not in message] == []
        run(machine)
    assert spec_of(machine) == spec_of(settle(tmp_path / "old", recorded_spec()))


def test_what_is_dangerous_or_needed_is_not_left_out() -> None:
    """If the rest does not serve the GPUs, the specification is refused."""
    spec = recorded_spec()
    spec["containerEdits"]["Mounts"] = spec["containerEdits"].pop("mounts")
    assert sifted(spec)[2].problems
    spec = recorded_spec()
    for device in spec["devices"]:
        device["containerEdits"]["nodes"] = device["containerEdits"].pop("deviceNodes")
    assert sifted(spec)[2].problems
    asked = REQUEST._replace(cdi_hooks=("apply-cuda-memory-limits",))
    limits = hook("apply-cuda-memory-limits", "--limit=new") | {"hookName": "createRuntime"}
    kept = Sieve(asked, LIVE, FILES).sift(edited(added("hooks", limits)))
    # Without the hook that the settings ask for, a pod could use more memory than its share.
    refused = "; ".join(verify(kept, asked, LIVE, FILES).problems)
    assert "unexpected hook argument apply-cuda-memory-limits" in refused
    # A device under an unknown name shows what the tool does.
    spec = recorded_spec()
    spec["devices"].append({"name": "x", "containerEdits": {"deviceNodes": [{"path": "/dev/sda"}]}})
    assert "device x: device node '/dev/sda' is not granted to this machine" in sifted(spec)[2].problems


def test_the_loader_of_containers_finds_the_driver() -> None:
    """If a toolkit moves the work of the hook update-ldcache into another hook, the agent adds the old one."""
    spec = recorded_spec()
    spec["containerEdits"]["hooks"][1]["args"][1] = "update-everything"
    sieve, made, verdict = sifted(spec)
    assert (verdict.problems, len(sieve.left_out)) == ((), 1)
    (hooks,) = [each["args"] for each in made["containerEdits"]["hooks"] if "update-ldcache" in each["args"]]
    assert f"/{LIBRARIES}" in hooks
    without = recorded_spec()
    del without["containerEdits"]["hooks"][1]
    assert verify(without, REQUEST, LIVE, FILES).problems == (
        f"no hook adds /{LIBRARIES} to the loader's cache of containers",
    )


def generations(machine: Machine) -> int:
    found = sum("generate" in call for call in machine.calls)
    machine.calls.clear()
    return found


@pytest.mark.parametrize("asked", [(), ("management",)])
def test_a_newer_agent_looks_again(tmp_path: Path, asked: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """It may know what its predecessor left out, and nothing else has changed since."""
    machine = settle(tmp_path, recorded_spec())
    answer(machine, {})
    machine.hand(REQUEST._replace(cdi_modes=asked))
    run(machine)
    generations(machine)
    run(machine)
    assert generations(machine) == 0
    monkeypatch.setattr("agent.machine.cdi.__version__", "9.0.0")
    run(machine)
    assert generations(machine) == 1 + len(asked)


def test_the_runtime_adds_no_devices() -> None:
    """A toolkit that only writes the mount leaves the variable to the agent: images set it to `all`."""
    spec = recorded_spec()
    spec["containerEdits"]["env"].remove("NVIDIA_VISIBLE_DEVICES=void")
    _, made, verdict = sifted(spec)
    assert verdict.problems == ()
    assert "NVIDIA_VISIBLE_DEVICES=void" in made["containerEdits"]["env"]
    (problem,) = verify(spec, REQUEST, *HERE).problems
    assert "a pod could get other GPUs of the machine" in problem
    changed = recorded_spec()
    for each in changed["containerEdits"]["hooks"]:
        name, kind, *rest = each["args"]
        each["args"] = [name, kind, *(f"{flag}={value}" for flag, value in zip(rest[::2], rest[1::2], strict=True))]
    assert sifted(changed)[1:] == sifted(recorded_spec())[1:]


# ---- the other modes


@pytest.mark.parametrize("mode", ["gds", "management"])
def test_modes_of_a_later_toolkit(machine: Machine, mode: str) -> None:
    machine.node("/dev/null", *NULL[:2])
    spec = recorded(mode)
    spec["containerEdits"].setdefault("mounts", []).append(VOID)
    answer(machine, {mode: spec}, "1.20.2")
    assert machine.verdict("CDISpecCurrent") == ("True", "Verified")
    assert VOID in spec_of(machine, published(mode)[1:])["containerEdits"]["mounts"]
    later = recorded(mode) | {"next": 1}
    later["containerEdits"].update(env=[*later["containerEdits"]["env"], "CUDA_NEW=1"], intelRdt={"closID": "x"})
    later["containerEdits"].setdefault("hooks", []).append(hook("chmod", "--path", "/dev/dri"))
    later["devices"][0]["containerEdits"].setdefault("hooks", []).append(hook("chmod", "--path", "/dev/dri"))
    answer(machine, {mode: later}, "1.21.0")
    machine.put("/usr/bin/nvidia-ctk", "changed")
    for _ in range(2):
        assert machine.verdict("CDISpecCurrent") == ("True", "EditsLeftOut")
        message = machine.message("CDISpecCurrent").partition(f"has left out of {published(mode)}: ")[2]
        for each in ("key next of the specification", "key intelRdt", "variable 'CUDA_NEW=1'", "['chmod']"):
            assert each in message
    assert "CUDA_NEW" not in (machine.tree / published(mode)[1:]).read_text()
    later["containerEdits"]["env"].append("LD_PRELOAD=x")
    answer(machine, {mode: later}, "1.21.1")
    machine.put("/usr/bin/nvidia-ctk", "changed again")
    run(machine)
    assert f"ModeNotServed: {mode}: the new CDI specification failed the check: " in machine.message("CDISpecCurrent")
    assert "LD_PRELOAD" in machine.message("CDISpecCurrent")
    assert machine.conditions()["CDISpecCurrent"] == ("True", "Verified"), "nothing was left out of what pods use"


# ---- generated specifications

NAMES = st.text(st.characters(min_codepoint=97, max_codepoint=122), min_size=3, max_size=9)
PLACES = st.integers(-1, len(recorded_spec()["devices"]) - 1)
"""The common containerEdits, or those of a device."""
JSON = st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.text(max_size=3), max_size=2)
UNKNOWN_PARTS: st.SearchStrategy[Edit] = st.one_of(
    st.sampled_from([edit for edit, _ in UNKNOWN.values()]),
    st.sampled_from([edit for edit, _ in HARMLESS.values()]),
    st.builds(lambda key, value: lambda edits: edits.update({f"x{key}": value}), NAMES, JSON),
    st.builds(
        lambda part, key, value: to_first(part, **{f"x{key}": value}),
        st.sampled_from(("deviceNodes", "mounts", "hooks")),
        NAMES,
        JSON,
    ),
    st.builds(lambda name, flag: added("hooks", hook(f"x{name}", f"--{flag}", "/etc")), NAMES, NAMES),
    st.builds(lambda name: added("mounts", VOID | {"containerPath": f"/opt/{name}"}), NAMES),
    st.builds(lambda name, value: added("env", f"X{name.upper()}_={value}"), NAMES, st.text(max_size=9)),
    st.builds(lambda name, value: added("env", f"NVIDIA_X{name.upper()}_={value}"), NAMES, NAMES),
    st.builds(lambda flag: to_hook(1, f"--x{flag}"), NAMES),
)
DANGEROUS_PARTS: st.SearchStrategy[Edit] = st.one_of(
    st.sampled_from([edit for edit, _ in DANGEROUS.values()]),
    st.builds(lambda name, options: added("mounts", mount(f"/{name}", f"/x{name}", *options)), NAMES, st.lists(NAMES)),
    st.builds(lambda name: added("deviceNodes", {"path": f"/dev/x{name}"}), NAMES),
    st.builds(lambda name: added("deviceNodes", {"path": f"/dev/x{name}", "hostPath": "/dev/nvidia0"}), NAMES),
    st.builds(lambda name: added("hooks", hook(path=f"/usr/bin/x{name}")), NAMES),
    st.builds(lambda name, value: added("env", f"LD_{name.upper()}={value}"), NAMES, NAMES),
    st.builds(lambda name, value: added("env", f"X{name.upper()}_PATH={value}"), NAMES, NAMES),
)


def with_mounts() -> Spec:
    spec = recorded_spec()
    for device in spec["devices"]:
        device["containerEdits"]["mounts"] = [mount(SMI, "/usr/bin/nvidia-smi")]
    return spec


def edits_of(spec: Spec, place: int) -> Spec:
    found: Spec = spec["containerEdits"] if place < 0 else spec["devices"][place]["containerEdits"]
    return found


def harm_in(spec: Spec) -> list[object]:
    """Return what a pod must not get, by rules that share nothing with the agent's."""
    found: list[object] = [each for each in spec if each not in ("cdiVersion", "kind", "devices", "containerEdits")]
    for edits in (spec["containerEdits"], *(each["containerEdits"] for each in spec["devices"])):
        for each in edits.get("mounts", []):
            source, writable = each["hostPath"], "ro" not in each["options"] or "rw" in each["options"]
            inside = source.startswith(f"{ROOT}/") and ".." not in source
            if writable or not (inside or source in LIVE or source == "/dev/null"):
                found.append(each)
        found += [each for each in edits.get("deviceNodes", []) if each["path"] not in LIVE or "hostPath" in each]
        for each in edits.get("hooks", []):
            if each["path"] != HOOK or each["args"][1] not in ("create-symlinks", "update-ldcache"):
                found.append(each)
            found += [argument for argument in each["args"] if argument.startswith(("/etc", "/tmp", "--ldconfig"))]
        for each in edits.get("env", []):
            name, _, value = each.partition("=")
            known = name == "NVIDIA_CTK_LIBCUDA_DIR" or name == "NVCT_EMPTY_DEVICE"
            if not known and (not name.startswith("NVIDIA_") or "/" in value or value == "all"):
                found.append(each)
        found += edits.get("additionalGids", [])
    return found


@given(
    st.lists(st.tuples(UNKNOWN_PARTS, PLACES), max_size=5),
    st.lists(st.tuples(DANGEROUS_PARTS, PLACES), max_size=2),
    st.dictionaries(NAMES.map("x{}".format), JSON, max_size=2),
    st.data(),
)
def test_any_later_specification(
    unknown: list[tuple[Edit, int]], dangerous: list[tuple[Edit, int]], keys: Spec, data: st.DataObject
) -> None:
    """No dangerous part is ever published. Unknown ones cost no GPU."""
    spec = with_mounts() | keys
    for edit, place in data.draw(st.permutations(unknown + dangerous)):
        edit(edits_of(spec, place))
    harmful = [edit for edit, place in dangerous if _has_effect(edit, edits_of(with_mounts(), place))]
    _, made, verdict = sifted(spec)
    if harmful:
        assert verdict.problems
    else:
        assert (verdict.problems, verdict.missing_gpus) == ((), ())
        assert harm_in(made) == []
        nodes = {each["name"]: each["containerEdits"].get("deviceNodes") for each in made["devices"]}
        for uuid, node in zip(UUIDS, ("/dev/nvidia0", "/dev/nvidia1"), strict=True):
            assert [each["path"] for each in nodes[uuid]] == [node]


def _has_effect(edit: Edit, edits: Spec) -> bool:
    """Return whether an edit changes anything. Not if one of a hook was drawn for edits without hooks."""
    changed = deepcopy(edits)
    edit(changed)
    return changed != edits
