"""Options that builders of images pass to buildah, and errors that users of the bed see without a traceback."""

import os
import shutil
import subprocess
import time
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest

from integration.bed.machine import buildah
from tests.fakes.programs import program

REPOSITORY = Path(__file__).resolve().parents[2]

pytestmark = pytest.mark.processes


def run(*argv: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(argv, cwd=REPOSITORY, env=os.environ | environment, capture_output=True, text=True)


def build(
    directory: Path,
    ends_with: str = "true",
    builder: str = "buildah",
    name: str = "agent-ubuntu2404",
    options: str = "",
    checkout: Path = REPOSITORY,
    base: str = "example.org/base",
) -> subprocess.CompletedProcess[str]:
    """Run containerfiles/build with limits of 512, and a program that records its arguments."""
    program(directory / builder, f'printf "%s\\n" "$@" >{directory}/arguments\n{ends_with}')
    command = f"{checkout}/containerfiles/build --with {builder} {options} {name} {base}"
    path = f"{directory}:{os.environ['PATH']}"
    return run("bash", "-c", f"ulimit -n 512 && ulimit -u 512 && exec {command}", PATH=path)


def test_podman_and_docker_build_images_too(tmp_path: Path) -> None:
    """A base is pulled if it is missing, and limits are not raised above the hard ones."""

    def arguments(builder: str) -> list[str]:
        assert build(tmp_path, builder=builder).returncode == 0
        return (tmp_path / "arguments").read_text().splitlines()

    found = arguments("buildah")
    assert found[0] == "build"
    # Since buildah 1.35, `--pull=false` means never.
    assert [each for each in found if each.startswith("--pull")] == ["--pull=missing"]
    assert "BASE=example.org/base" in found
    assert [value for option, value in pairwise(found) if option == "--ulimit"] == ["nofile=512", "nproc=512"]
    assert arguments("podman")[:3] == ["build", "--layers", "--pull=missing"]
    found = arguments("docker")
    assert found[:3] == ["buildx", "build", "--load"]
    assert not {"--layers", "--isolation", "--ulimit", "--force-rm"} & set(found)
    contexts = [value.partition("=")[0] for option, value in pairwise(found) if option == "--build-context"]
    assert sorted(contexts) == ["agent", "packages", "systemd"]


def test_the_machine_half_comes_from_its_packages_or_from_the_checkout(tmp_path: Path) -> None:
    record = f'for each; do case $each in *=/*) ls "${{each#*=}}" >>{tmp_path}/contents ;; esac; done'
    dist = tmp_path / "dist"
    dist.mkdir()
    for name in ("unbounded-agent_1_amd64", "unbounded-agent-machine_1_all", "unbounded-agent-machine-dra_1_all"):
        (dist / f"{name}.deb").touch()
    assert build(tmp_path, record, options=f"--packages {dist}").returncode == 0
    assert set((tmp_path / "contents").read_text().split()) == {
        "unbounded-agent-machine_1_all.deb",
        "unbounded-agent-machine-dra_1_all.deb",
    }
    (tmp_path / "contents").unlink()
    assert build(tmp_path, record).returncode == 0
    assert {"unbounded-agent-gpu.service", "machine"} <= set((tmp_path / "contents").read_text().split())
    # NVIDIA's toolkit comes from packages, unless it was compiled.
    look = f'for each; do case $each in toolkit=*) ls "${{each#toolkit=}}" >{tmp_path}/toolkit ;; esac; done'
    assert build(tmp_path, look, name="agent-ubuntu2404-nvidia").returncode == 0
    assert (tmp_path / "toolkit").read_text() == ""


def test_files_of_any_checkout_get_the_same_owner_and_modes(tmp_path: Path) -> None:
    """buildah keeps both in the image, where root runs these files."""
    if os.geteuid() != 0:
        pytest.skip("only root can build, or give a file to another user")
    checkout = tmp_path / "checkout"
    for name in ("agent", "containerfiles", "deploy", "systemd"):
        shutil.copytree(REPOSITORY / name, checkout / name, ignore=shutil.ignore_patterns("__pycache__"))
    (checkout / "systemd/machine/.unbounded-agent-gpu.service.swp").touch()
    (checkout / "agent/machine/.run.py.swp").touch()
    (checkout / "agent/machine/__pycache__").mkdir()
    (checkout / "agent/machine/__pycache__/run.cpython-311.pyc").touch()
    run("chown", "-R", "1000:1000", str(checkout))
    run("chmod", "-R", "go=", str(checkout))
    shown = f'find "${{each#*=}}" -printf "%U:%G %m %y %P\\n" >>{tmp_path}/found'
    record = f"for each; do case $each in *=/*) {shown} ;; esac; done"
    assert build(tmp_path, record, checkout=checkout).returncode == 0
    found = [line.split() for line in (tmp_path / "found").read_text().splitlines()]
    # Modules, and what they read: without its kernels, no GPU could be tested.
    assert {"unbounded-agent-gpu.service", "machine/run.py", "machine/gpu_test.ptx"} <= {name for *_, name in found}
    assert {(owner, mode, kind) for owner, mode, kind, *_ in found} == {("0:0", "755", "d"), ("0:0", "644", "f")}
    assert not [name for *_, name in found if name.endswith((".swp", ".pyc"))]


def test_the_recipes_of_a_release_pin_what_they_are_given_no_base_for(tmp_path: Path) -> None:
    """Each Containerfile gets only its own arguments."""

    def pinned(name: str, base: str) -> list[str]:
        assert build(tmp_path, name=name, base=base, options=f"--packages {tmp_path}", checkout=recipes).returncode == 0
        found = (tmp_path / "arguments").read_text().splitlines()
        return [value for option, value in pairwise(found) if option == "--build-arg"]

    recipes = tmp_path / "recipes"
    for directory in ("agent/system", "containerfiles"):
        shutil.copytree(REPOSITORY / directory, recipes / directory)
    for each in ("unbounded-agent-machine_1_all", "unbounded-agent-machine-dra_1_all"):
        (tmp_path / f"{each}.deb").touch()
    assert pinned("agent-ubuntu2404", "") == []
    base, snapshot, toolkit = "BASE=example.org/ubuntu@sha256:12", "SNAPSHOT=20261130T120000Z", "TOOLKIT=1.19.1-1"
    (recipes / "containerfiles/pins").write_text(f"# A comment.\n{base}\n{snapshot}\n{toolkit}\n")
    assert pinned("agent-ubuntu2404", "") == [base, snapshot]
    assert pinned("agent-ubuntu2404-nvidia", "") == [base, snapshot, toolkit]
    assert pinned("agent-ubuntu2404-nvidia", "example.org/other") == ["BASE=example.org/other"]


@pytest.mark.parametrize(
    ("found", "message"),
    [(0, "has no package unbounded-agent-machine; `make deb` builds it"), (2, "remove all but one")],
)
def test_packages_must_be_there_once(tmp_path: Path, found: int, message: str) -> None:
    for number in range(found):
        (tmp_path / f"unbounded-agent-machine_{number}_all.deb").touch()
    finished = build(tmp_path, options=f"--packages {tmp_path}")
    assert finished.returncode == 1
    assert message in finished.stderr


@pytest.mark.parametrize(
    "arguments", [(), ("--with",), ("--with", "make", "agent-ubuntu2404"), ("--fast", "agent-ubuntu2404"), ("x",)]
)
def test_a_wrong_argument_prints_the_usage(arguments: tuple[str, ...]) -> None:
    finished = run("containerfiles/build", *arguments)
    assert finished.returncode == 2
    assert finished.stderr.startswith("Build a machine image")
    assert "localhost/unbounded-agent/NAME" not in finished.stderr.splitlines()[0]


@pytest.mark.parametrize("builder", ["buildah", "podman"])
def test_a_build_that_fails_leaves_no_container_and_ends_with_a_sentence(tmp_path: Path, builder: str) -> None:
    """Its layers would be in use by the container, so `rmi --prune` would fail after each later build."""
    finished = build(tmp_path, "exit 125", builder=builder)
    assert finished.returncode == 1
    assert "--force-rm" in (tmp_path / "arguments").read_text().splitlines()
    last = finished.stderr.splitlines()[-1]
    assert last.startswith("error: ")
    assert last.endswith("containerfiles/build could not build agent-ubuntu2404; see the lines above")


def test_a_build_removes_no_layer_of_another_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tests' processes share a storage. Like buildah, the stand-in fails if a layer without a name is in use."""
    building = tmp_path / "building"
    building.mkdir()
    script = f'build) touch {building}/$$; sleep 0.5; rm {building}/$$ ;; rmi) test -z "$(ls {building})" ;;'
    program(tmp_path / "buildah", f"case $1 in {script} esac")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    with ThreadPoolExecutor() as pool:
        first = pool.submit(buildah.build, "agent-ubuntu2404", "example.org/base")
        while not list(building.iterdir()) and not first.done():
            time.sleep(0.01)
        second = pool.submit(buildah.build, "agent-ubuntu2404", "example.org/base")
        assert first.result() == second.result()
