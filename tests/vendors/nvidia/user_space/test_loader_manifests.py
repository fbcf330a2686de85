"""Paths in loaders' files: what RPM packages and NixOS write becomes the path in a pod. The layouts are simulated."""

import json

import pytest
from msgspec.structs import replace

from agent.host.apply.driver_roots import stage
from agent.host.state.records import MANIFEST
from agent.model.errors import AgentError
from agent.model.facts import StagedRoot
from agent.model.paths import MANIFESTS, TREES
from tests.fakes.facts import library
from tests.fakes.host import Host
from tests.fakes.user_space import I386, MAIN, VERSION, X86, X86_64, by_target, cache_of, put, user_space
from tests.fakes.user_space import I686 as I686_HEADER

ICD = "usr/share/vulkan/icd.d/nvidia_icd.{}.json"


def manifest(library: str) -> str:
    return json.dumps({"file_format_version": "1.0.1", "ICD": {"library_path": library, "api_version": "1.4.312"}})


@pytest.fixture
def fedora(host: Host) -> Host:
    """A host with NVIDIA's or negativo17's RPM packages, 595 or newer: libGLX_nvidia's real file is its soname."""
    put(host, "/usr/lib64", VERSION, *MAIN, "libEGL_nvidia", "libnvidia-vksc-core")
    host.file("/usr/lib64/libGLX_nvidia.so.0", X86_64, size=1000)
    host.symlink(f"/usr/lib64/libGLX_nvidia.so.{VERSION}", "libGLX_nvidia.so.0")
    put(host, "/usr/lib", VERSION, *MAIN, "libGLX_nvidia", header=I686_HEADER)
    host.symlink("/lib64", "usr/lib64")
    names = (*(f"{name}.so.1" for name in MAIN), "libGLX_nvidia.so.0")
    listing = cache_of(*(f"/lib64/{name}" for name in names), *(f"/lib/{name}" for name in names))
    host.symlink("/lib", "usr/lib")
    host.loader_cache(listing.replace("(libc6,x86-64) => /lib/", "(libc6) => /lib/"))
    return host


@pytest.mark.scenario("001")
def test_vulkan_of_rpm_packages(fedora: Host) -> None:
    """There is one file per architecture: with bare names, a 64-bit program would find its driver through both."""
    fedora.file(f"/{ICD.format('x86_64')}", manifest("/usr/lib64/libGLX_nvidia.so.0"))
    fedora.file(f"/{ICD.format('i686')}", manifest("/usr/lib/libGLX_nvidia.so.0"))
    vksc = "usr/share/vulkansc/icd.d/nvidia_icd.x86_64.json"
    fedora.file(f"/{vksc}", manifest("/usr/lib64/libnvidia-vksc-core.so.1"))
    found = user_space(fedora, VERSION)
    files = by_target(found)
    expected = {
        ICD.format("x86_64"): f"/{X86}/libGLX_nvidia.so.0",
        ICD.format("i686"): f"/{I386}/libGLX_nvidia.so.0",
        vksc: f"/{X86}/libnvidia-vksc-core.so.1",
    }
    assert {target: json.loads(files[target].text)["ICD"]["library_path"] for target in expected} == expected
    assert found.problems == ()
    assert {path.lstrip("/") for path in expected.values()} < set(files)
    assert not files[f"{X86}/libGLX_nvidia.so.0"].link, "as the package has it"


def test_bare_names_and_other_files_stay(fedora: Host) -> None:
    """NVIDIA ships such files; they are copied byte for byte."""
    layers = {"layers": [{"library_path": "libGLX_nvidia.so.0"}, {"library_path": f"libnvidia-present.so.{VERSION}"}]}
    fedora.file("/usr/share/vulkan/implicit_layer.d/nvidia_layers.json", json.dumps(layers))
    fedora.file("/usr/share/glvnd/egl_vendor.d/10_nvidia.json", manifest("libEGL_nvidia.so.0"))
    fedora.file("/usr/share/nvidia/files.d/sandboxutils-filelist.json", '{"library_path": "/usr/lib64/libcuda.so.1"}')
    fedora.file("/etc/OpenCL/vendors/nvidia.icd", "libnvidia-opencl.so.1\n")
    fedora.file("/usr/share/egl/egl_external_platform.d/15_nvidia_gbm.json", "no JSON")
    found = user_space(fedora, VERSION)
    assert (found.problems, [each.target for each in by_target(found).values() if each.text]) == ((), [])


def test_layers_and_opencl_with_paths(fedora: Host) -> None:
    layers = {"layers": [{"name": "a", "library_path": "/usr/lib64/libGLX_nvidia.so.0"}, {"library_path": "libx.so"}]}
    target = "usr/share/vulkan/implicit_layer.d/nvidia_layers.json"
    fedora.file(f"/{target}", json.dumps(layers))
    fedora.file("/etc/OpenCL/vendors/nvidia.icd", "/usr/lib64/libcuda.so.1\n")
    fedora.file(f"/{ICD.format('x86_64')}", manifest("../../../lib64/libGLX_nvidia.so.0"))
    files = by_target(user_space(fedora, VERSION))
    layers["layers"][0]["library_path"] = f"/{X86}/libGLX_nvidia.so.0"
    assert json.loads(files[target].text) == layers
    assert files["etc/OpenCL/vendors/nvidia.icd"].text == f"/{X86}/libcuda.so.1\n"
    assert f"/{X86}/libGLX_nvidia.so.0" in files[ICD.format("x86_64")].text


@pytest.mark.parametrize(
    "path", ["/x\0", "/x\ud800", "/x\ny", *(f"/usr/lib64/lib{each}" for each in ("other.so.1", "none.so", "circle.so"))]
)
def test_a_path_to_another_library_or_to_none_is_named(fedora: Host, path: str) -> None:
    fedora.file("/usr/lib64/libother.so.1", X86_64)
    fedora.symlink("/usr/lib64/libcircle.so", "libcircle.so")
    fedora.file(f"/{ICD.format('x86_64')}", manifest(path))
    found = user_space(fedora, VERSION)
    assert found.problems == (f"/{ICD.format('x86_64')}: names {path!a}, which is not a library of this driver",)
    assert not by_target(found)[ICD.format("x86_64")].text


def test_objects_nested_too_deep_stay_as_they_are(fedora: Host) -> None:
    fedora.file(f"/{ICD.format('x86_64')}", '{"ICD":' * 600 + "1" + "}" * 600)
    assert not by_target(user_space(fedora, VERSION))[ICD.format("x86_64")].text


def test_the_text_is_staged_and_recorded(host: Host) -> None:
    host.file("/etc/nvidia_icd.json", "long before")
    host.file("/etc/plain.json", "plain")
    identity = host.identity("/etc/nvidia_icd.json")
    changed = library("a.json", "/etc/nvidia_icd.json", size=identity.size, mtime_ns=identity.mtime_ns, text="text\n")
    plain = library("b.json", "/etc/plain.json", size=5, mtime_ns=identity.mtime_ns)
    root = StagedRoot(0, "nvidia", VERSION, (changed, plain))
    stage(root, host)
    assert (host.read(f"{TREES}/0/a.json"), host.mode(f"{TREES}/0/a.json")) == (b"text\n", 0o644)
    assert MANIFEST.parse("0.json", host.read(f"{MANIFESTS}/0.json")) == root
    host.file("/etc/nvidia_icd.json", "something longer")
    with pytest.raises(AgentError, match="changed while it was staged"):
        stage(replace(root, index=1), host)


def test_a_directory_that_became_a_link_is_not_followed(host: Host) -> None:
    """A directory that becomes a link between the check and the copy could lead out of a driver's own root."""
    source = "/run/nvidia/driver/lib/libcuda.so"
    host.file(source, "right")
    host.file("/secret/libcuda.so", "wrong")
    file = library("libcuda.so", source, size=5, mtime_ns=host.identity(source).mtime_ns)
    host.remove_tree("/run/nvidia/driver/lib")
    host.symlink("/run/nvidia/driver/lib", "/secret")
    with pytest.raises(AgentError, match="changed while it was staged"):
        stage(StagedRoot(0, "nvidia", VERSION, (file,)), host)
    assert not host.exists(f"{TREES}/0")
