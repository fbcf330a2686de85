"""A small interpreter of PTX: only the instructions of agent/machine/gpu_test.ptx, one thread after another.

Registers and memory hold bits; an address is an offset in the memory. PTX ISA 6.0 says what the instructions do.
"""

import operator
import re
import struct
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

Instruction = tuple[str, str, list[str]]
"""The register of its condition, or nothing; its name; its operands."""
RESULTS: Mapping[str, Callable[..., int]] = {
    "mov": lambda one: one,
    "mad.lo": lambda one, other, third: one * other + third,
    "mul.lo": operator.mul,
    "mul.wide": operator.mul,
    "add": operator.add,
    "sub": operator.sub,
    "and": operator.and_,
    "or": operator.or_,
    "xor": operator.xor,
    "shr": operator.rshift,
    "setp.ge": operator.ge,
    "setp.eq": operator.eq,
    "setp.ne": operator.ne,
}


class Kernel(NamedTuple):
    """`parameters` are types such as u32, by name; `labels` are indexes of instructions."""

    parameters: dict[str, str]
    instructions: list[Instruction]
    labels: dict[str, int]


def kernels(text: str) -> dict[str, Kernel]:
    """Return the kernels of a file."""
    text = re.sub("//.*", "", text)
    found = {}
    for name, parameters, body in re.findall(r"\.entry (\w+)\((.*?)\)\s*\{(.*?)\}", text, re.DOTALL):
        types = {each: kind for kind, each in re.findall(r"\.param \.(\w+) (\w+)", parameters)}
        kernel = Kernel(types, [], {})
        for label, line in re.findall(r"^(?:(\w+):|\t([^.].*);)$", body, re.MULTILINE):
            if label:
                kernel.labels[label] = len(kernel.instructions)
                continue
            condition, instruction, operands = re.fullmatch(r"(?:@(\S+) )?(\S+) ?(.*)", line).groups("")  # type: ignore[union-attr]
            kernel.instructions.append((condition, instruction, operands.split(", ")))
        found[name] = kernel
    return found


def run(kernel: Kernel, arguments: Sequence[int], memory: bytearray, blocks: int, threads: int) -> None:
    """Run all threads. Raises KeyError for what the interpreter does not know."""
    for block in range(blocks):
        for thread in range(threads):
            special = {"%ctaid.x": block, "%tid.x": thread, "%ntid.x": threads, "%nctaid.x": blocks}
            Thread(kernel, dict(zip(kernel.parameters, arguments, strict=True)), memory, special).run()


class Thread:
    """One thread."""

    def __init__(self, kernel: Kernel, arguments: dict[str, int], memory: bytearray, special: dict[str, int]) -> None:
        self._kernel, self._arguments, self._memory = kernel, arguments, memory
        self._registers = special

    def run(self) -> None:
        place = 0
        while True:
            condition, name, operands = self._kernel.instructions[place]
            place += 1
            if condition and not self._registers[condition]:
                continue
            if name == "ret":
                return
            if name == "bra":
                place = self._kernel.labels[operands[0]]
            else:
                self._step(name, operands)

    def _step(self, name: str, operands: list[str]) -> None:
        operation, _, kind = name.rpartition(".")
        size = 8 if kind.endswith("64") else 4
        if operation == "ld.param":
            assert self._kernel.parameters[operands[1].strip("[]")] == kind
            self._registers[operands[0]] = self._arguments[operands[1].strip("[]")]
        elif operation == "ld.global":
            self._registers[operands[0]] = self._load(operands[1], size)
        elif operation == "st.global":
            self._store(operands[0], size, self._value(operands[1]))
        elif operation.startswith("red.global."):
            combine = RESULTS[operation.removeprefix("red.global.")]
            self._store(operands[0], size, combine(self._load(operands[0], size), self._value(operands[1])))
        elif name == "fma.rn.f32":
            self._registers[operands[0]] = fma(*map(self._value, operands[1:]))
        else:
            size = 8 if operation == "mul.wide" else size
            result = int(RESULTS[operation](*map(self._value, operands[1:])))
            self._registers[operands[0]] = result & ((1 << 8 * size) - 1)

    def _value(self, operand: str) -> int:
        if operand.startswith("%"):
            return self._registers[operand]
        return int(operand[2:], 16) if operand.startswith("0f") else int(operand, 0)

    def _address(self, operand: str) -> int:
        register, _, offset = operand.strip("[]").partition("+")
        return self._registers[register] + int(offset or 0)

    def _load(self, operand: str, size: int) -> int:
        address = self._address(operand)
        assert address % size == 0
        return int.from_bytes(self._memory[address : address + size], "little")

    def _store(self, operand: str, size: int, value: int) -> None:
        address = self._address(operand)
        assert address % size == 0
        assert address + size <= len(self._memory)
        self._memory[address : address + size] = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")


def fma(*operands: int) -> int:
    """Multiply two single-precision numbers and add a third, rounded once, to the nearest even. All are normal."""
    one, other, third = (Fraction(struct.unpack("<f", each.to_bytes(4, "little"))[0]) for each in operands)
    exact, exponent = one * other + third, 0
    while abs(exact) >= Fraction(2) ** (exponent + 24):
        exponent += 1
    while abs(exact) < Fraction(2) ** (exponent + 23):
        exponent -= 1
    rounded = round(exact / Fraction(2) ** exponent) * Fraction(2) ** exponent
    return int.from_bytes(struct.pack("<f", float(rounded)), "little")
