"""A program that tests one GPU by computing on it, for a caller that kills it if it hangs.

Its first argument is the UUID of a GPU or of a MIG device. With `--peer`, it tests the way between two GPUs instead. It
prints one line of JSON, whose `result` is `passed`, `failed` (exit code 1) or `not run` (2). The line also has:

- `step`: what failed or could not run; `message`: why, for people; `error`: CUDA's `function`, `name` and `code`;
- `mismatches`: the number of wrong words; `slow`: the figures below their floors, for which a test fails too;
- `driver`: its version of CUDA, such as 12040; `devices`: `uuid`, `name` and `memory` (bytes) of each;
- `figures`: `memory_bandwidth`, `host_to_device`, `device_to_host`, `peer_to` and `peer_from` in bytes per second,
  `memory_tested` in bytes, `rounds`, `seconds`; `floors`: the least of the first three, null if it is not known.

It needs only the driver's API (cuda.h of CUDA 11.0, of which newer drivers keep all names) and Python's library. It
frees nothing, because its process ends.
"""

import argparse
import ctypes
import json
import os
import re
import struct
import sys
import time
from typing import Any, NoReturn

LIBRARY = "libcuda.so.1"
KERNELS_FILE = os.path.join(os.path.dirname(os.path.abspath(__file__)), "gpu_test.ptx")
UUID = re.compile(r"(GPU-|MIG-(GPU-)?)[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}(/[0-9]{1,3}/[0-9]{1,3})?")
"""The last part and the second prefix are of MIG devices, with drivers before 470."""

TYPES: dict[str, Any] = dict(P=ctypes.c_void_p, I=ctypes.c_int, U=ctypes.c_uint, S=ctypes.c_size_t, D=ctypes.c_uint64)
FUNCTIONS = """
cuInit U, cuDriverGetVersion P, cuGetErrorName IP,
cuDeviceGetCount P, cuDeviceGet PI, cuDeviceGetName PII, cuDeviceGetUuid PI, cuDeviceGetAttribute PII,
cuDeviceTotalMem_v2 PI, cuDeviceCanAccessPeer PII, cuCtxEnablePeerAccess PU,
cuCtxCreate_v2 PUI, cuCtxSetCurrent P, cuCtxSynchronize ,
cuModuleLoad PP, cuModuleGetFunction PPP, cuLaunchKernel PUUUUUUUPPP,
cuMemGetInfo_v2 PP, cuMemAlloc_v2 PS, cuMemHostAlloc PSU,
cuMemsetD32_v2 DUS, cuMemcpyHtoD_v2 DPS, cuMemcpyDtoH_v2 PDS, cuMemcpyDtoD_v2 DDS,
cuEventCreate PU, cuEventRecord PP, cuEventElapsedTime PPP"""
"""The types of their arguments: a pointer, int, unsigned int, size_t or device address. All return a CUresult."""
KERNELS = {"fill": "DUUU", "check": "DUUUD", "compute": "DUU"}
"""The types of their parameters, as in KERNELS_FILE."""
PROCESSORS, INTEGRATED, CLOCK, WIDTH, BLOCKING_SYNC = 16, 18, 36, 37, 4
"""CUdevice_attribute: number of multiprocessors; has the host's memory; the memory's clock (kHz), its bus (bits).
CUctx_flags: wait without using a processor."""
NOT_THE_GPU = {
    # Another program has the memory, or the GPU in exclusive mode.
    *(2, 46),
    # The library is a stub, or does not fit the kernel's driver or the GPU.
    *(34, 35, 803, 804),
    # The kernels cannot be compiled: no code, invalid, no compiler, too new, turned off; a file is missing.
    *(209, 218, 221, 222, 223, 301, 302, 303),
}
"""CUresults that say nothing about the GPU: no answer is never a verdict."""

MIB = 1 << 20
LEAST, BLOCK, TRANSFER, SHARED = 16 * MIB, 1024 * MIB, 256 * MIB, 1024 * MIB
"""Bytes of a block at least, and at most; that are copied from and to the host; tested of memory that the host uses."""
USED = 0.9
"""The share of the free memory that is tested."""
THREADS, BLOCKS, LANES, ROUNDS, COPIES = 256, 8, 32, 4096, 5
"""Threads of a thread block, thread blocks for each multiprocessor, threads of a warp, rounds of `compute`; and how
often is copied: the fastest copy counts."""
SEED, ONES, STEP, SAMPLE = 0x2545F491, 0xFFFFFFFF, 0x9E3779B1, 256
"""SAMPLE: words of each block that Python compares too. A GPU may write and check wrongly in the same way."""

MEMORY_SHARE = 0.45
"""Of clock x 2 x width. DCGM 4.6.0 (nvvs/diag-skus.yaml.in, memory_bandwidth) asks 46 % (H200) to 67 % (V100) of the
nominal bandwidth of datacenter GPUs. Published copies of 32 MB reach 74 % (T4, A100)."""
LINK_SHARE = 0.25
"""Of transfer rate x lanes. DCGM has no floor. Published copies in virtual machines reach 60 % (V100, T4) and 38 %
(A100)."""


class StopError(Exception):
    """The test ends without having passed; `facts` are fields of the report."""

    def __init__(self, result: str, message: str, **facts: object) -> None:
        super().__init__(message)
        self.facts = {"result": result, "message": message, **facts}


class Cuda:
    """The driver's library."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(LIBRARY)
            for name, _, types in (each.strip().partition(" ") for each in FUNCTIONS.split(",")):
                getattr(self._library, name).argtypes = [TYPES[each] for each in types]
        except OSError as error:
            raise StopError("not run", f"the driver's library cannot be loaded: {error}") from None
        except AttributeError as error:
            raise StopError("not run", f"the driver is older than CUDA 11: {error}") from None

    def call(self, function: str, *arguments: object) -> None:
        if code := getattr(self._library, function)(*arguments):
            text = ctypes.c_char_p()
            self._library.cuGetErrorName(code, ctypes.byref(text))
            name = (text.value or b"unknown error").decode("ascii", "replace")
            error = {"function": function, "name": name, "code": code}
            result = "not run" if code in NOT_THE_GPU else "failed"
            raise StopError(result, f"{function}: {name} ({code})", error=error)

    def get(self, kind: str, function: str, *arguments: object) -> int:
        """Return the value of this type that a function writes to its first argument."""
        value = TYPES[kind]()
        self.call(function, ctypes.byref(value), *arguments)
        return int(value.value or 0)


class Gpu:
    """A GPU or a MIG device."""

    def __init__(self, cuda: Cuda, index: int, uuid: str) -> None:
        self.call, self.get, self.uuid = cuda.call, cuda.get, uuid
        self.device = self.get("I", "cuDeviceGet", index)
        name, raw = ctypes.create_string_buffer(256), ctypes.create_string_buffer(16)
        self.call("cuDeviceGetName", name, len(name), self.device)
        self.call("cuDeviceGetUuid", raw, self.device)
        # Of a MIG device, this is the whole GPU's.
        if uuid.startswith("GPU-") and raw.raw.hex() != uuid[4:].replace("-", ""):
            raise StopError("not run", f"CUDA shows another GPU in place of {uuid}: {raw.raw.hex()}")
        self.processors, self.integrated, self.clock, self.width = (
            self.get("I", "cuDeviceGetAttribute", each, self.device) for each in (PROCESSORS, INTEGRATED, CLOCK, WIDTH)
        )
        self.memory = self.get("S", "cuDeviceTotalMem_v2", self.device)
        self.facts = {"uuid": uuid, "name": name.value.decode("utf-8", "replace"), "memory": self.memory}

    def start(self) -> None:
        """Make a context, which is then the current one, and let the driver compile the kernels."""
        self.context = self.get("P", "cuCtxCreate_v2", BLOCKING_SYNC, self.device)
        module = self.get("P", "cuModuleLoad", os.fsencode(KERNELS_FILE))
        self.kernels = {name: self.get("P", "cuModuleGetFunction", module, name.encode()) for name in KERNELS}
        self.events = [self.get("P", "cuEventCreate", 0) for _ in range(2)]

    def use(self) -> None:
        """Make its context the current one."""
        self.call("cuCtxSetCurrent", self.context)

    def allocate(self, limit: int) -> None:
        """Allocate four blocks or more: most of the free memory, but at most `limit` bytes."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(total))
        usable = min(int(free.value * USED), limit)
        self.size = min(BLOCK, usable // 4) // MIB * MIB
        if self.size < LEAST:
            raise StopError("not run", f"only {free.value} of the {total.value} bytes of memory are free")
        self.found = self.get("D", "cuMemAlloc_v2", 16)
        self.blocks = [self.get("D", "cuMemAlloc_v2", self.size) for _ in range(usable // self.size)]

    def launch(self, kernel: str, *arguments: int) -> None:
        """Start a kernel."""
        values = [TYPES[kind](value) for kind, value in zip(KERNELS[kernel], arguments, strict=True)]
        pointers = (ctypes.c_void_p * len(values))(*map(ctypes.addressof, values))
        sizes = (self.processors * BLOCKS, 1, 1, THREADS, 1, 1)
        self.call("cuLaunchKernel", self.kernels[kernel], *sizes, 0, None, pointers, None)

    def fill(self, blocks: list[int], size: int, seed: int, mask: int = 0) -> None:
        """Fill the first bytes of blocks with patterns."""
        for number, block in enumerate(blocks):
            self.launch("fill", block, size // 4, seed + number & ONES, mask)

    def check(self, blocks: list[int], size: int, seed: int, mask: int = 0) -> None:
        """Compare them with the same patterns: each word on the GPU, and a few of each block in Python."""
        found, sample, samples = (ctypes.c_uint32 * 4)(), (ctypes.c_uint32 * SAMPLE)(), 0
        self.call("cuMemcpyHtoD_v2", self.found, found, 16)
        for number, block in enumerate(blocks):
            self.launch("check", block, size // 4, seed + number & ONES, mask, self.found)
        self.call("cuCtxSynchronize")
        self.call("cuMemcpyDtoH_v2", found, self.found, 16)
        for number, block in enumerate(blocks):
            self.call("cuMemcpyDtoH_v2", sample, block, SAMPLE * 4)
            samples += sum(word != pattern(index, seed + number, mask) for index, word in enumerate(sample))
        if count := found[0] | found[1] << 32:
            raise StopError("failed", f"wrong words: {count}, in bits {found[2]:08x}", mismatches=count)
        if samples:
            raise StopError("failed", f"wrong words that the GPU calls right: {samples}", mismatches=samples)

    def fastest(self, size: int, function: str, *arguments: object) -> int:
        """Return how many bytes per second a function copies, by the GPU's clock."""
        times, milliseconds = [], ctypes.c_float()
        for _ in range(COPIES):
            self.call("cuEventRecord", self.events[0], None)
            self.call(function, *arguments)
            self.call("cuEventRecord", self.events[1], None)
            self.call("cuCtxSynchronize")
            self.call("cuEventElapsedTime", ctypes.byref(milliseconds), *self.events)
            times.append(milliseconds.value / 1000)
        return int(size / max(min(times), 1e-9))


def pattern(index: int, seed: int, mask: int = 0) -> int:
    """Return the word that `fill` writes."""
    value = (index * STEP + seed) & ONES
    return (((value ^ value >> 16) * 0x85EBCA6B) & ONES) ^ mask


def computed(lane: int, rounds: int, seed: int) -> int:
    """Return the word that `compute` writes.

    A float has 24 bits. The product of two, plus a third, has at most 50 bits here, and a float of Python's has 53. So
    the sum is rounded once, as fma does.
    """
    single, word = struct.Struct("=f"), struct.Struct("=I")
    x, total, factor = (lane * STEP + seed) & ONES, 1.0, single.unpack(word.pack(0x3EFFFFFF))[0]
    for _ in range(rounds):
        x = (x * 1664525 + 1013904223) & ONES
        rounded = single.pack(total * factor + single.unpack(word.pack(x >> 9 | 0x3F000000))[0])
        total = single.unpack(rounded)[0]
        x ^= word.unpack(rounded)[0]
    return x


def floors(clock: int, width: int, speed: float | None, lanes: int | None) -> dict[str, int | None]:
    """Return by figure the bytes per second that a sound GPU exceeds; None if that is not known.

    `clock` (kHz) and `width` (bits) are the memory's, and 0 where the driver does not say; `speed` (GT/s) the link's.
    """
    memory = int(clock * 1000 * 2 * width / 8 * MEMORY_SHARE) or None
    link = int(speed * 1e9 * lanes / 8 * LINK_SHARE) if speed and lanes else None
    return {"memory_bandwidth": memory, "host_to_device": link, "device_to_host": link}


def computation(gpu: Gpu, expected: bytes) -> None:
    """Compute on every multiprocessor, and compare each thread's word. `expected` has a warp's."""
    got = ctypes.create_string_buffer(gpu.processors * BLOCKS * THREADS * 4)
    # The words of an earlier round do not count.
    gpu.call("cuMemsetD32_v2", gpu.blocks[0], 0, len(got) // 4)
    gpu.launch("compute", gpu.blocks[0], ROUNDS, SEED)
    gpu.call("cuCtxSynchronize")
    gpu.call("cuMemcpyDtoH_v2", got, gpu.blocks[0], len(got))
    words = memoryview(got.raw).cast("I")
    if words != (right := memoryview(expected * (len(got) // len(expected))).cast("I")):
        count = sum(one != other for one, other in zip(words, right, strict=True))
        raise StopError("failed", f"{count} of {len(words)} threads computed wrongly", mismatches=count)


def memory(gpu: Gpu, seed: int) -> None:
    """Fill all blocks with a pattern, then with its opposite, and check every word each time."""
    for mask in (0, ONES):
        gpu.fill(gpu.blocks, gpu.size, seed, mask)
        gpu.check(gpu.blocks, gpu.size, seed, mask)


def bandwidth(gpu: Gpu) -> dict[str, int]:
    """Copy a block to another one. What is copied is read and written, so it counts twice."""
    source, target = gpu.blocks[:2]
    gpu.fill([source], gpu.size, SEED)
    gpu.call("cuMemsetD32_v2", target, 0, gpu.size // 4)
    speed = gpu.fastest(2 * gpu.size, "cuMemcpyDtoD_v2", target, source, gpu.size)
    gpu.check([target], gpu.size, SEED)
    return {"memory_bandwidth": speed}


def transfers(gpu: Gpu) -> dict[str, int]:
    """Copy a pattern to the host, and from there to another block."""
    (source, target), size = gpu.blocks[:2], min(gpu.size, TRANSFER)
    host = gpu.get("P", "cuMemHostAlloc", size, 0)
    gpu.fill([source], size, SEED)
    gpu.call("cuMemsetD32_v2", target, 0, size // 4)
    speeds = {"device_to_host": gpu.fastest(size, "cuMemcpyDtoH_v2", host, source, size)}
    speeds["host_to_device"] = gpu.fastest(size, "cuMemcpyHtoD_v2", target, host, size)
    gpu.check([target], size, SEED)
    return speeds


def peer(writer: Gpu, holder: Gpu) -> int:
    """Write to the other GPU's memory, read it, copy to it. Return bytes per second of the copy."""
    source, target, size, other = writer.blocks[1], holder.blocks[0], min(writer.size, holder.size), SEED ^ ONES
    writer.use()
    writer.fill([target], size, SEED)
    writer.check([target], size, SEED)
    holder.use()
    holder.check([target], size, SEED)
    writer.use()
    writer.fill([source], size, other)
    speed = writer.fastest(size, "cuMemcpyDtoD_v2", target, source, size)
    holder.use()
    holder.check([target], size, other)
    return speed


def find(uuids: list[str], report: dict[str, Any]) -> list[Gpu]:
    """Return the GPUs."""
    for name in [each for each in os.environ if each.startswith("CUDA_")]:
        del os.environ[name]
    # Without a directory of its own, CUDA would ask the MPS daemon in the usual place.
    os.environ |= {"CUDA_VISIBLE_DEVICES": ",".join(uuids), "CUDA_MPS_PIPE_DIRECTORY": os.devnull}
    os.environ["CUDA_CACHE_DISABLE"] = "1"
    cuda = Cuda()
    cuda.call("cuInit", 0)
    report["driver"] = cuda.get("I", "cuDriverGetVersion")
    if (count := cuda.get("I", "cuDeviceGetCount")) != len(uuids):
        raise StopError("not run", f"CUDA shows {count} of the devices {', '.join(uuids)}")
    gpus = [Gpu(cuda, index, uuid) for index, uuid in enumerate(uuids)]
    report["devices"] = [gpu.facts for gpu in gpus]
    report["step"] = "context"
    for gpu in gpus:
        gpu.start()
    report["step"] = "allocation"
    for gpu in gpus:
        gpu.use()
        gpu.allocate(4 * TRANSFER if len(gpus) > 1 else SHARED if gpu.integrated else gpu.memory)
    return gpus


def test_alone(report: dict[str, Any], asked: argparse.Namespace, gpu: Gpu) -> None:
    """Run the steps for one GPU, and note them."""
    figures, until = report["figures"], time.monotonic() + asked.seconds
    expected = struct.pack(f"={LANES}I", *(computed(lane, ROUNDS, SEED) for lane in range(LANES)))
    figures |= {"memory_tested": len(gpu.blocks) * gpu.size, "rounds": 0}
    while not figures["rounds"] or time.monotonic() < until:
        report["step"] = "computation"
        computation(gpu, expected)
        report["step"] = "memory"
        memory(gpu, SEED + figures["rounds"])
        figures["rounds"] += 1
    report["step"] = "memory bandwidth"
    figures |= bandwidth(gpu)
    report["step"] = "transfers"
    figures |= transfers(gpu)
    if asked.uuid.startswith("GPU-"):
        # A MIG device has a part of the bandwidth, and others may use the link.
        report["floors"] = floors(gpu.clock, gpu.width, asked.link_speed, asked.link_width)
    report["slow"] = [name for name, floor in report["floors"].items() if floor and figures[name] < floor]


def test_pair(report: dict[str, Any], first: Gpu, second: Gpu) -> None:
    """Run the steps for two GPUs, and note them."""
    report["step"] = "peer access"
    for one, other in ((first, second), (second, first)):
        if not one.get("I", "cuDeviceCanAccessPeer", one.device, other.device):
            raise StopError("not run", f"{one.uuid} cannot reach the memory of {other.uuid}")
        one.use()
        one.call("cuCtxEnablePeerAccess", other.context, 0)
    report["figures"] |= {"peer_to": peer(first, second), "peer_from": peer(second, first)}


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise StopError("not run", message)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = _Parser(add_help=False, allow_abbrev=False)
    parser.add_argument("uuid")
    parser.add_argument("--peer")
    parser.add_argument("--seconds", type=float, default=0.0)
    parser.add_argument("--link-speed", type=float)
    parser.add_argument("--link-width", type=int)
    asked = parser.parse_args(arguments)
    for uuid in (asked.uuid, asked.peer):
        if uuid is not None and not UUID.fullmatch(uuid):
            raise StopError("not run", f"not the UUID of a GPU or of a MIG device: {uuid!r}")
    if asked.uuid == asked.peer or (asked.link_speed is None) != (asked.link_width is None):
        raise StopError("not run", "--peer takes another GPU, and --link-speed (GT/s) needs --link-width (lanes)")
    return asked


def main(arguments: list[str]) -> int:
    """Test, print the report, and return the exit code."""
    begin, report = time.monotonic(), dict[str, Any](result="passed", step="arguments", message=None, error=None)
    report |= {"mismatches": 0, "slow": [], "driver": None, "devices": [], "figures": {}, "floors": {}}
    try:
        asked = parse(arguments)
        report["step"] = "driver"
        gpus = find([each for each in (asked.uuid, asked.peer) if each], report)
        if asked.peer:
            test_pair(report, *gpus)
        else:
            test_alone(report, asked, *gpus)
        report["step"] = "speed"
        if report["slow"]:
            raise StopError("failed", f"too slow: {', '.join(report['slow'])}")
        report["step"] = None
    except StopError as stop:
        report |= stop.facts
        # The driver's error in its first step concerns all GPUs.
        report["result"] = "not run" if report["step"] == "driver" else report["result"]
    report["figures"]["seconds"] = round(time.monotonic() - begin, 3)
    sys.stdout.write(json.dumps(report) + "\n")
    sys.stdout.flush()
    return {"passed": 0, "failed": 1, "not run": 2}[report["result"]]


if __name__ == "__main__":
    # Not sys.exit: the library's end would wait for a GPU that hangs.
    os._exit(main(sys.argv[1:]))
