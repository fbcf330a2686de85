"""The document with the states of a machine's GPUs."""

import json
from typing import Any

import pytest

from agent.model.contract import (
    MESSAGE_LIMIT,
    Effect,
    GpuState,
    GpuStatus,
    parse_gpu_states,
    render_gpu_states,
)
from agent.model.errors import DocumentError
from agent.system.files import READ_LIMIT

WELL = GpuStatus(
    "0000:01:00.0", "vendor", GpuState.HEALTHY, kernel_driver="vendor", numa_node=1, pcie_root="pci0000:00"
)
FAILED = GpuStatus(
    *("0000:02:00.0", "vendor", GpuState.UNHEALTHY, "Xid48", "a double-bit ECC error", Effect.NO_SCHEDULE, 1700000000),
)


def document(**changed: Any) -> bytes:  # noqa: ANN401 - whatever JSON holds
    content = json.loads(render_gpu_states([WELL]))
    content["version"] = changed.pop("version", 1)
    content["gpus"][0].update(changed)
    return json.dumps(content).encode()


def test_a_document_is_read_back_in_one_order() -> None:
    found = parse_gpu_states(render_gpu_states([FAILED, WELL]))
    assert found == {WELL.pci_address: WELL, FAILED.pci_address: FAILED}
    assert render_gpu_states([WELL, FAILED]) == render_gpu_states(found.values())
    assert parse_gpu_states(render_gpu_states([])) == {}


def test_messages_are_one_short_line() -> None:
    long = GpuStatus("0000:01:00.0", "vendor", GpuState.LOST, "Xid79", "off\nthe bus \x1b[2J" + "x" * 9000)
    message = parse_gpu_states(render_gpu_states([long]))["0000:01:00.0"].message
    assert message.startswith("off the bus \\x1b[2Jxx")
    assert len(message) == MESSAGE_LIMIT


def test_the_limit_is_enough_for_a_large_host() -> None:
    worst = (
        GpuStatus(f"0000:{each:02x}:00.0", "v" * 60, GpuState.LOST, "x" * 63, "\U0001f4a5" * 500) for each in range(32)
    )
    assert len(render_gpu_states(worst)) < READ_LIMIT


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"version": 7}, "gpus.json: version 7 is unknown"),
        ({"pci_address": "x"}, r"gpus\[0\]: key pci_address must be a PCI address, not 'x'"),
        ({"state": 1}, "key state must be a string"),
        ({"state": "resetting"}, "key state must be one of 'healthy', .*, not 'resetting'"),
        ({"effect": "Pause"}, "key effect must be one of '', .*, not 'Pause'"),
        ({"effect": "NoSchedule"}, "a healthy GPU cannot have the effect NoSchedule"),
        ({"effect": "NoExecute"}, "a healthy GPU cannot have the effect NoExecute"),
        ({"reason": "Xid 79"}, "key reason must be one word, not 'Xid 79'"),
        ({"since": -1}, "key since must be a time in seconds, not '-1'"),
        ({"since": 1.5}, "key since must be a whole number, not a decimal number"),
        ({"pcie_root": "0000:00"}, "key pcie_root must be a root complex"),
        ({"kernel_driver": "a b"}, "key kernel_driver must be a driver's name"),
        ({"numa_node": None}, "key numa_node must be a whole number"),
    ],
)
def test_errors_name_the_key(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(DocumentError, match=message):
        parse_gpu_states(document(**changed))


def test_a_gpu_is_listed_once() -> None:
    with pytest.raises(DocumentError, match=r"GPU 0000:01:00\.0 is listed twice"):
        parse_gpu_states(render_gpu_states([WELL, WELL]))
