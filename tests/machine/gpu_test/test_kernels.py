"""The kernels of the test of a GPU, without a GPU: NVIDIA's assembler takes them, and they compute what Python does."""

import random
import struct
import subprocess
from importlib.metadata import distribution
from pathlib import Path

import pytest

from agent.machine.gpu_test import KERNELS, KERNELS_FILE, computed, pattern
from tests.fakes import ptx

FOUND = 4096
"""The address of what `check` finds, behind the words."""
TYPES = {"D": "u64", "U": "u32"}


@pytest.fixture(scope="module")
def kernels() -> dict[str, ptx.Kernel]:
    return ptx.kernels(Path(KERNELS_FILE).read_text())


# Turing, Ampere, Ada, Hopper and Blackwell, each for datacenters and for desktops; and the older ones of driver 580.
@pytest.mark.processes
@pytest.mark.parametrize("architecture", [50, 60, 70, 75, 80, 86, 89, 90, 100, 103, 120, 121])
def test_the_kernels_assemble(architecture: int, tmp_path: Path) -> None:
    ptxas = distribution("nvidia-cuda-nvcc-cu12").locate_file("nvidia/cuda_nvcc/bin/ptxas")
    argv = [str(ptxas), "--warning-as-error", f"--gpu-name=sm_{architecture}", f"--output-file={tmp_path / 'x'}"]
    finished = subprocess.run([*argv, KERNELS_FILE], capture_output=True, text=True)
    assert (finished.returncode, finished.stdout + finished.stderr) == (0, "")


def test_the_program_knows_the_kernels_parameters(kernels: dict[str, ptx.Kernel]) -> None:
    found = {name: list(kernel.parameters.values()) for name, kernel in kernels.items()}
    assert found == {name: [TYPES[each] for each in kinds] for name, kinds in KERNELS.items()}


@pytest.mark.parametrize("mask", [0, 0xFFFFFFFF])
def test_fill_writes_the_pattern_and_check_counts_what_differs(kernels: dict[str, ptx.Kernel], mask: int) -> None:
    words, seed, memory = 1000, 0xFEDCBA98, bytearray(FOUND + 16)
    ptx.run(kernels["fill"], (0, words, seed, mask), memory, 3, 32)
    written = struct.pack(f"<{words}I", *(pattern(index, seed, mask) for index in range(words)))
    assert memory == written + bytes(FOUND + 16 - len(written))

    ptx.run(kernels["check"], (0, words, seed, mask, FOUND), memory, 2, 64)
    assert struct.unpack_from("<QII", memory, FOUND) == (0, 0, 0)
    # The first and the last word, each in one bit; the count of an earlier block stays.
    memory[0] ^= 0x80
    memory[4 * words - 1] ^= 0x01
    struct.pack_into("<QII", memory, FOUND, 5, 0x10, 0)
    ptx.run(kernels["check"], (0, words, seed, mask, FOUND), memory, 2, 64)
    assert struct.unpack_from("<QII", memory, FOUND) == (7, 0x01000090, 0)


def test_compute_writes_what_python_computes(kernels: dict[str, ptx.Kernel]) -> None:
    memory = bytearray(4 * 2 * 64)
    ptx.run(kernels["compute"], (0, 40, 0x01234567), memory, 2, 64)
    warp = [computed(lane, 40, 0x01234567) for lane in range(32)]
    assert list(struct.unpack("<128I", memory)) == 4 * warp
    assert len(set(warp)) == 32


def test_python_rounds_like_a_gpu() -> None:
    """A seed and a lane at random, far beyond the rounds of the other test: each sum is rounded once."""
    numbers, found = random.Random(1), []
    for _ in range(3):
        seed, rounds = numbers.getrandbits(32), 700
        x, total = seed, 0x3F800000
        for _ in range(rounds):
            x = (x * 1664525 + 1013904223) % 2**32
            total = ptx.fma(total, 0x3EFFFFFF, x >> 9 | 0x3F000000)
            x ^= total
        found.append((x, computed(0, rounds, seed)))
    assert [one for one, _ in found] == [other for _, other in found]


def test_every_bit_of_the_pattern_changes(kernels: dict[str, ptx.Kernel]) -> None:
    """Within a few words, each bit is 0 and 1, and no word is there twice: also wrong addresses are found."""
    words = [pattern(index, 7) for index in range(4096)]
    both = [{word >> bit & 1 for word in words[:64]} for bit in range(32)]
    assert (both, len(set(words))) == (32 * [{0, 1}], len(words))
