"""The program that tests a GPU, as a child, with a simulation of the driver's library (integration/simulation/cuda)."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).parents[3]
PROGRAM = REPOSITORY / "agent/machine/gpu_test.py"
SIMULATION = REPOSITORY / "integration/simulation/cuda/libcuda.c"
ONE, OTHER, MIG = (f"{each}-2222-3333-4444-555555555555" for each in ("GPU-11111111", "GPU-22222222", "MIG-11111111"))
LINK = ("--link-speed", "16.0", "--link-width", "16")
LIMIT = 600
"""Seconds: no figure of these tests depends on the time that this computer takes."""

pytestmark = [
    pytest.mark.processes,
    pytest.mark.skipif(shutil.which("gcc") is None, reason="needs gcc and libc6-dev"),
]


@pytest.fixture(scope="module")
def simulation(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the simulated library."""
    directory = tmp_path_factory.mktemp("simulation")
    flags = ["-std=c11", "-D_GNU_SOURCE", "-O2", "-Wall", "-Wextra", "-Wno-missing-prototypes", "-Werror", "-fPIC"]
    flags += ["-shared", "-fvisibility=hidden", "-ffp-contract=off", "-o", str(directory / "libcuda.so.1")]
    subprocess.run(["gcc", *flags, str(SIMULATION), "-lm"], check=True, timeout=LIMIT)
    return directory


class Child:
    """The program in its surroundings."""

    def __init__(self, library: Path, devices: Path) -> None:
        self._devices = devices
        self.environment = {**os.environ, "LD_LIBRARY_PATH": str(library), "SIMULATED_CUDA": str(devices)}
        self.devices()

    def devices(self, faults: str = "", of_the_other: str = "") -> None:
        """Simulate devices with these faults."""
        self._devices.write_text(f"{ONE} {faults}\n{OTHER} {of_the_other}\n{MIG} {faults}\n")

    def start(self, *arguments: str, before: str = "") -> "subprocess.Popen[str]":
        code = f"import runpy, sys, time\n{before}\nsys.argv[0] = {str(PROGRAM)!r}\n"
        argv = [sys.executable, "-I", "-S", "-c", f"{code}runpy.run_path(sys.argv[0], run_name='__main__')", *arguments]
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, env=self.environment, stdout=pipe, stderr=pipe, text=True)

    def run(self, *arguments: str, before: str = "") -> tuple[int, dict[str, Any]]:
        """Return its exit code and report."""
        process = self.start(*arguments, before=before)
        output, errors = process.communicate(timeout=LIMIT)
        assert (errors, output.count("\n")) == ("", 1)
        return process.returncode, json.loads(output)


@pytest.fixture
def child(simulation: Path, tmp_path: Path) -> Child:
    return Child(simulation, tmp_path / "devices")


def test_a_sound_gpu_passes(child: Child) -> None:
    """What the caller's environment says of CUDA does not count."""
    child.environment |= {"CUDA_VISIBLE_DEVICES": OTHER, "CUDA_MPS_PIPE_DIRECTORY": "/tmp", "CUDA_LAUNCH_BLOCKING": "1"}
    code, report = child.run(ONE, *LINK)
    assert (code, report["result"], report["step"], report["message"], report["error"]) == (0, "passed", *3 * (None,))
    assert report["devices"] == [{"uuid": ONE, "name": "simulated GPU", "memory": 80 << 20}]
    figures, floors = report["figures"], report["floors"]
    assert figures.pop("seconds") > 0
    # 80 % of 256 GB/s, and 12 GB/s, with what CUDA's 32-bit milliseconds round off.
    speeds = {name: round(figures.pop(name) / 1e9, 2) for name in floors}
    assert speeds == {"memory_bandwidth": 204.8, "host_to_device": 12.0, "device_to_host": 12.0}
    assert figures == {"memory_tested": 4 * (17 << 20), "rounds": 1}
    assert floors == {
        "memory_bandwidth": 115_200_000_000,
        "host_to_device": 8_000_000_000,
        "device_to_host": 8_000_000_000,
    }


def test_it_computes_for_as_long_as_it_is_told(child: Child) -> None:
    """Each look at the clock takes a second: at the beginning, before the rounds, and after each of them."""
    ticking = "ticks = iter(range(1000)); time.monotonic = lambda: next(ticks)"
    code, report = child.run(ONE, "--seconds", "3", before=ticking)
    assert (code, report["figures"]["rounds"], report["figures"]["seconds"]) == (0, 3, 5)


@pytest.mark.parametrize(
    ("faults", "step", "mismatches", "message"),
    [
        ("wrong=compute", "computation", 1, "1 of 6144 threads computed wrongly"),
        ("wrong=fill", "memory", 4, "wrong words: 4, in bits 00000200"),
        ("wrong=fill wrong=check", "memory", 4, "wrong words that the GPU calls right: 4"),
        ("wrong=cuMemcpyDtoD_v2", "memory bandwidth", 1, "wrong words: 1, in bits 00000200"),
        ("wrong=cuMemcpyHtoD_v2", "transfers", 1, "wrong words: 1, in bits 00000200"),
    ],
)
def test_a_gpu_that_is_wrong_fails(child: Child, faults: str, step: str, mismatches: int, message: str) -> None:
    child.devices(faults)
    code, report = child.run(ONE)
    assert (code, report["result"], report["step"], report["error"]) == (1, "failed", step, None)
    assert (report["mismatches"], report["message"]) == (mismatches, message)


@pytest.mark.parametrize(
    ("arguments", "slow"),
    [
        ((ONE,), ["memory_bandwidth"]),
        ((ONE, *LINK), ["memory_bandwidth", "host_to_device", "device_to_host"]),
        # A part of a GPU has a part of its bandwidth: no floor is known.
        ((MIG, *LINK), []),
    ],
)
def test_a_slow_gpu_is_below_its_floors(child: Child, arguments: tuple[str, ...], slow: list[str]) -> None:
    child.devices("slow=0.5")
    code, report = child.run(*arguments)
    assert (code, report["slow"], report["mismatches"]) == (int(bool(slow)), slow, 0)
    assert report["step"] == ("speed" if slow else None)
    assert all(report["figures"][each] < report["floors"][each] for each in slow)


def test_a_driver_that_does_not_know_the_memory_has_no_floor(child: Child) -> None:
    child.devices("slow=0.01 unknown")
    code, report = child.run(ONE)
    assert (code, report["slow"], set(report["floors"].values())) == (0, [], {None})


@pytest.mark.parametrize(
    ("fault", "code", "step", "name"),
    [
        ("cuInit:802", 2, "driver", "CUDA_ERROR_SYSTEM_NOT_READY"),
        ("cuDeviceGetAttribute:999", 2, "driver", "CUDA_ERROR_UNKNOWN"),
        ("cuCtxCreate_v2:999", 1, "context", "CUDA_ERROR_UNKNOWN"),
        # The driver's compiler is missing.
        ("cuModuleLoad:221", 2, "context", "CUDA_ERROR_JIT_COMPILER_NOT_FOUND"),
        # Another program has the memory.
        ("cuMemAlloc_v2:2", 2, "allocation", "CUDA_ERROR_OUT_OF_MEMORY"),
        ("cuMemAlloc_v2:214", 1, "allocation", "CUDA_ERROR_ECC_UNCORRECTABLE"),
        ("cuLaunchKernel:12345", 1, "computation", "unknown error"),
        ("cuMemcpyDtoD_v2:214", 1, "memory bandwidth", "CUDA_ERROR_ECC_UNCORRECTABLE"),
        ("cuMemHostAlloc:999", 1, "transfers", "CUDA_ERROR_UNKNOWN"),
    ],
)
def test_an_error_of_cuda_is_named(child: Child, fault: str, code: int, step: str, name: str) -> None:
    child.devices(f"fail={fault}")
    function, _, number = fault.partition(":")
    exit_code, report = child.run(ONE)
    assert (exit_code, report["result"], report["step"]) == (code, ("", "failed", "not run")[code], step)
    assert report["error"] == {"function": function, "name": name, "code": int(number)}
    assert report["message"] == f"{function}: {name} ({number})"


@pytest.mark.parametrize("function", ["cuInit", "cuLaunchKernel"])
def test_a_gpu_that_hangs_is_killed_by_the_caller(child: Child, function: str) -> None:
    child.devices(f"hang={function}")
    process = child.start(ONE)
    assert process.stderr is not None
    assert process.stderr.readline() == f"simulation: {function} hangs\n"
    process.kill()
    assert process.communicate(timeout=LIMIT) == ("", "")
    assert process.returncode == -signal.SIGKILL


def test_a_device_that_cuda_does_not_show_is_not_tested(child: Child) -> None:
    unknown = ONE.replace("1", "9")
    code, report = child.run(unknown)
    assert (code, report["step"], report["error"]["name"]) == (2, "driver", "CUDA_ERROR_NO_DEVICE")
    code, report = child.run(ONE, "--peer", unknown)
    assert (code, report["step"], report["message"]) == (2, "driver", f"CUDA shows 1 of the devices {ONE}, {unknown}")
    child.devices("wrong=cuDeviceGetUuid")
    code, report = child.run(ONE)
    assert (code, report["step"]) == (2, "driver")
    assert report["message"] == f"CUDA shows another GPU in place of {ONE}: 11111111222233334444555555555554"


def test_too_little_free_memory_is_no_verdict(child: Child) -> None:
    child.devices("full")
    code, report = child.run(ONE)
    assert (code, report["step"]) == (2, "allocation")
    assert report["message"] == f"only {1 << 20} of the {80 << 20} bytes of memory are free"


@pytest.mark.parametrize(
    ("library", "message"),
    [("text", "the driver's library cannot be loaded: "), ("empty", "the driver is older than CUDA 11: ")],
)
def test_without_a_library_that_fits_it_cannot_run(child: Child, tmp_path: Path, library: str, message: str) -> None:
    path = tmp_path / "libcuda.so.1"
    if library == "text":
        path.write_text("not a library\n")
    else:
        subprocess.run(["gcc", "-shared", "-o", path, "-x", "c", os.devnull], check=True, timeout=LIMIT)
    child.environment["LD_LIBRARY_PATH"] = str(tmp_path)
    code, report = child.run(ONE)
    assert (code, report["result"], report["step"], report["devices"]) == (2, "not run", "driver", [])
    assert report["message"].startswith(message)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: uuid"),
        (("0",), "not the UUID of a GPU or of a MIG device: '0'"),
        ((ONE[:20],), f"not the UUID of a GPU or of a MIG device: {ONE[:20]!r}"),
        ((f"{ONE},{OTHER}",), f"not the UUID of a GPU or of a MIG device: '{ONE},{OTHER}'"),
        ((ONE, "--seconds", "long"), "argument --seconds: invalid float value: 'long'"),
        ((ONE, "--peer", ONE), "--peer takes another GPU, and --link-speed (GT/s) needs --link-width (lanes)"),
        ((ONE, *LINK[:2]), "--peer takes another GPU, and --link-speed (GT/s) needs --link-width (lanes)"),
        ((ONE, "--other"), "unrecognized arguments: --other"),
    ],
)
def test_wrong_arguments_are_refused(child: Child, arguments: tuple[str, ...], message: str) -> None:
    code, report = child.run(*arguments)
    assert (code, report["result"], report["step"], report["message"]) == (2, "not run", "arguments", message)


@pytest.mark.parametrize(
    ("one", "other", "code", "mismatches"),
    [
        ("", "", 0, 0),
        ("wrong=cuMemcpyDtoD_v2", "", 1, 1),
        ("", "wrong=fill", 1, 1),
        ("fail=cuCtxEnablePeerAccess:217", "", 1, 0),
        # Not a fault: their links may not allow it.
        ("", "alone", 2, 0),
    ],
)
def test_a_pair(child: Child, one: str, other: str, code: int, mismatches: int) -> None:
    child.devices(one, other)
    exit_code, report = child.run(ONE, "--peer", OTHER)
    assert (exit_code, report["step"]) == (code, "peer access" if code else None)
    assert (report["mismatches"], [each["uuid"] for each in report["devices"]]) == (mismatches, [ONE, OTHER])
    assert set(report["figures"]) == ({"seconds"} if code else {"peer_to", "peer_from", "seconds"})
