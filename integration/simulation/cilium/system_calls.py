"""A stand-in for Cilium's agent: makes the system calls that the agent needs of a node, and prints each one's result.

It prints a line `NAME ok` or `NAME ERRNO` for each. The calls are those of pkg/bpf, pkg/maps, pkg/monitor and
pkg/datapath of Cilium 1.18: maps pinned in a bpffs, programs for tc, XDP and cgroups, the perf ring of the event map,
a cgroup2 mount of its own, and its interfaces.
"""

import ctypes
import errno
import os
import struct
import subprocess
import sys
from collections.abc import Callable

BPF, PERF_EVENT_OPEN = {"x86_64": (321, 298), "aarch64": (280, 241)}[os.uname().machine]
"""Numbers of the system calls (syscall_64.tbl and asm-generic/unistd.h in the kernel)."""
MAP_CREATE, PROG_LOAD, OBJ_PIN = 0, 5, 6
HASH, PERF_EVENT_ARRAY = 1, 4
PROGRAMS = {"tc program": (3, 0), "XDP program": (6, 0), "program for a cgroup's connect(2)": (18, 10)}
"""Type and expected attach type (enum bpf_prog_type, enum bpf_attach_type in uapi/linux/bpf.h)."""
RETURN_0 = struct.pack("<BBhi", 0xB7, 0, 0, 0) + struct.pack("<BBhi", 0x95, 0, 0, 0)
BPFFS, CGROUPS = "/sys/fs/bpf", "/run/cilium/cgroupv2"
COMMANDS = (
    "ip link add cilium_host type veth peer name cilium_net",
    "ip link add cilium_vxlan type vxlan external dstport 8472",
    "tc qdisc add dev cilium_host clsact",
    "ip link del cilium_host",
    "ip link del cilium_vxlan",
)

libc = ctypes.CDLL(None, use_errno=True)


def checked(result: int) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code))
    return result


def bpf(command: int, attributes: bytes) -> int:
    return checked(libc.syscall(BPF, command, ctypes.create_string_buffer(attributes, 128), 128))


def load(kind: int, attach: int) -> int:
    code, licence = ctypes.create_string_buffer(RETURN_0, len(RETURN_0)), ctypes.create_string_buffer(b"GPL")
    fields = (kind, 2, ctypes.addressof(code), ctypes.addressof(licence), 0, 0, 0, 0, 0, b"", 0, attach)
    return bpf(PROG_LOAD, struct.pack("<IIQQIIQII16sII", *fields))


def open_event() -> int:
    """Open the software event PERF_COUNT_SW_BPF_OUTPUT on the first processor."""
    attributes = bytearray(112)
    struct.pack_into("<IIQ", attributes, 0, 1, len(attributes), 10)
    return checked(
        libc.syscall(PERF_EVENT_OPEN, ctypes.create_string_buffer(bytes(attributes), len(attributes)), -1, 0, -1, 8)
    )


def mount(kind: str, path: str) -> int:
    os.makedirs(path, exist_ok=True)
    return checked(libc.mount(kind.encode(), path.encode(), kind.encode(), 0, None))


def pin() -> int:
    path = ctypes.create_string_buffer(f"{BPFFS}/simulated".encode())
    return bpf(
        OBJ_PIN, struct.pack("<QII", ctypes.addressof(path), bpf(MAP_CREATE, struct.pack("<4I", HASH, 4, 4, 8)), 0)
    )


def run(command: str) -> int:
    return -subprocess.run(command.split(), stderr=sys.stderr, check=True).returncode


def attempt(name: str, call: Callable[[], int]) -> None:
    try:
        call()
    except OSError as error:
        print(name, errno.errorcode.get(error.errno or 0, str(error)))
    except subprocess.CalledProcessError as error:
        print(name, f"exit code {error.returncode}")
    else:
        print(name, "ok")


def main() -> None:
    attempt("event map", lambda: bpf(MAP_CREATE, struct.pack("<4I", PERF_EVENT_ARRAY, 4, 4, 8)))
    for name, (kind, attach) in PROGRAMS.items():
        attempt(name, lambda kind=kind, attach=attach: load(kind, attach))  # type: ignore[misc]
    attempt("perf_event_open", open_event)
    attempt("bpffs", lambda: mount("bpf", BPFFS))
    attempt("pinned map", pin)
    attempt("cgroup2", lambda: mount("cgroup2", CGROUPS))
    for command in COMMANDS:
        attempt(command, lambda command=command: run(command))  # type: ignore[misc]


if __name__ == "__main__":
    main()
