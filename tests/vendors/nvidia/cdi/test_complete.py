"""Files that nvidia-ctk leaves out of a driver root are added to its specification in the same form, and verified."""

import json
from typing import Any

import pytest

from agent.vendors.nvidia.contract import HOOK
from agent.vendors.nvidia.nvidia_ctk import with_additions
from agent.vendors.nvidia.verify import verify
from tests.fakes.cdi_specs import COMPLETE, LIVE, PRESENT, X86_32
from tests.fakes.machine import LIBRARIES, REQUEST, ROOT, VERSION, recorded_spec

Spec = dict[str, Any]


def completed(spec: Spec) -> Spec:
    return with_additions(spec, COMPLETE)[0]


def mounts(spec: Spec) -> dict[str, Spec]:
    return {mount["hostPath"]: mount for mount in spec["containerEdits"]["mounts"]}


def arguments(spec: Spec, kind: str) -> list[str]:
    (found,) = (hook["args"] for hook in spec["containerEdits"]["hooks"] if hook["args"][1] == kind)
    assert isinstance(found, list)
    return found


def test_every_file_is_mounted_as_nvidia_ctk_does() -> None:
    spec = completed(recorded_spec())
    assert set(mounts(spec)) == {f"{ROOT}/{file.target}" for file in COMPLETE.files if not file.link}
    assert len(spec["containerEdits"]["mounts"]) == len(mounts(spec))
    library = mounts(spec)[f"{ROOT}/{X86_32}/libcuda.so.{VERSION}"]
    options = mounts(spec)[f"{ROOT}/{LIBRARIES}/libcuda.so.{VERSION}"]["options"]
    assert library == {
        "hostPath": f"{ROOT}/{X86_32}/libcuda.so.{VERSION}",
        "containerPath": f"/{X86_32}/libcuda.so.{VERSION}",
        "options": options,
    }
    assert mounts(spec)[f"{ROOT}/etc/OpenCL/vendors/nvidia.icd"]["containerPath"] == "/etc/OpenCL/vendors/nvidia.icd"


def test_links_and_library_directories_are_added_to_existing_hooks() -> None:
    """A further hook would be a further process at each container's start."""
    before, spec = recorded_spec(), completed(recorded_spec())
    assert len(spec["containerEdits"]["hooks"]) == len(before["containerEdits"]["hooks"])
    links = [each for each in arguments(spec, "create-symlinks")[2:] if each != "--link"]
    assert links[:-4] == [each for each in arguments(before, "create-symlinks")[2:] if each != "--link"]
    assert links[-4:] == [
        f"libGLX_nvidia.so.{VERSION}::/{X86_32}/libGLX_indirect.so.0",
        f"libcuda.so.{VERSION}::/{X86_32}/libcuda.so.1",
        f"libvdpau_nvidia.so.{VERSION}::/{X86_32}/vdpau/libvdpau_nvidia.so.1",
        f"../libnvidia-allocator.so.{VERSION}::/{LIBRARIES}/gbm/nvidia-drm_gbm.so",
    ]
    folders = arguments(spec, "update-ldcache")
    assert folders[-2:] == ["--folder", f"/{X86_32}"]
    # VDPAU's drivers are loaded by their paths.
    assert f"/{X86_32}/vdpau" not in folders


def test_hooks_that_are_missing_are_made_and_links_come_before_ldconfig() -> None:
    spec = recorded_spec()
    spec["containerEdits"]["hooks"] = []
    hooks = completed(spec)["containerEdits"]["hooks"]
    assert [hook["args"][1] for hook in hooks] == ["create-symlinks", "update-ldcache"]
    assert {(hook["hookName"], hook["path"]) for hook in hooks} == {("createContainer", HOOK)}


def test_additions_are_made_once_and_verified() -> None:
    assert verify(completed(recorded_spec()), COMPLETE, LIVE, PRESENT).problems == ()
    assert verify(completed(recorded_spec()), COMPLETE, LIVE, PRESENT).not_in_spec == ()
    gone = f"{ROOT}/{X86_32}/libcuda.so.{VERSION}"
    problems = verify(completed(recorded_spec()), COMPLETE, LIVE, PRESENT - {gone}).problems
    assert problems == (f"containerEdits: mount of {gone}, which does not exist",)
    foreign = verify(completed(recorded_spec()), REQUEST, LIVE, PRESENT).problems
    assert any(f"{gone}', which is not a file of the driver root" in each for each in foreign), foreign
    texts = {json.dumps(completed(recorded_spec()), sort_keys=True) for _ in range(3)}
    assert len(texts) == 1
    once = completed(recorded_spec())
    again, added = with_additions(once, COMPLETE)
    assert (again, added) == (once, ())


@pytest.mark.parametrize("library", ["libcuda", "libnvidia-ml"])
def test_the_spec_of_a_generator_without_the_driver_is_not_completed(library: str) -> None:
    """If the driver root is a link, nvidia-ctk leaves out all libraries and exits with 0: this must be refused."""
    spec = recorded_spec()
    edits = spec["containerEdits"]
    edits["mounts"] = [each for each in edits["mounts"] if f"/{library}.so." not in each["hostPath"]]
    same, added = with_additions(spec, COMPLETE)
    assert (same, added) == (spec, ())
    assert f"{library}.so is not in it" in verify(same, COMPLETE, LIVE, PRESENT).problems


@pytest.mark.parametrize("argument", [["--folder"], {"a": 1}, 1, None])
def test_a_malformed_hook_argument_is_left_to_verification(argument: object) -> None:
    spec = recorded_spec()
    for hook in spec["containerEdits"]["hooks"]:
        hook["args"].append(argument)
    assert any("unexpected hook argument" in each for each in verify(completed(spec), COMPLETE, LIVE, PRESENT).problems)
