"""What NVIDIA's drivers write into the kernel log: lines of public logs, and the catalogue of Xid errors."""

from pathlib import Path

import pytest

from agent.host.vendors import HOST_VENDORS
from agent.model.facts import Verdict
from agent.vendors.nvidia.devices import parse_kernel_message
from deploy.generate.xids import table

LINES = Path(__file__).resolve().parents[2] / "data" / "kernel_lines"
XIDS = {
    Verdict.NEEDS_RESET: (46, 48, 62, 64, 74, 95, 110, 119, 120, 136, 140, 143, 155, 156, 158),
    Verdict.NEEDS_REBOOT: (79, 151),
    Verdict.BROKEN: (54,),
    Verdict.DEGRADED: (1, 61, 63, 78, 92, 94, 142, 157, 159, 168),
    Verdict.HEALTHY: (8, 13, 14, 31, 43, 45, 68, 69, 93, 106, 109, 121, 137, 144, 150, 154, 160, 167, 171, 176, 177, 0),
}
RECOVERY = "NVRM: Xid (PCI:0000:02:00): 154, GPU recovery action changed from 0x0 (None) to 0x{} (Any Words)"


def lines(name: str) -> list[str]:
    """Return a file's lines without its comments."""
    return [each for each in (LINES / name).read_text().splitlines() if not each.startswith("#")]


@pytest.mark.parametrize("line", lines("nvidia.tsv"))
def test_a_line_of_the_driver_has_its_verdict(line: str) -> None:
    verdict, reason, text = line.split("\t")
    error = parse_kernel_message(text)
    assert error is not None
    assert (error.verdict, error.reason) == (verdict, reason)
    assert error.pci_address.removesuffix(".0") in text.lower()
    assert (error.number is None) is ("NVRM: Xid" not in text)
    assert error.lost is (reason == "Xid79")


def test_no_other_line_means_anything() -> None:
    found = lines("harmless.txt")
    assert len(found) > 100
    found += ["", "NVRM: Xid (PCI:0000:01:00" + " " * 100 + "): 79, x"]
    assert [each for each in found if any(vendor.parse_kernel_message(each) for vendor in HOST_VENDORS)] == []


@pytest.mark.parametrize(
    ("address", "found"),
    [
        ("0000:03:00", "0000:03:00.0"),
        ("PCI:0000:CB:00", "0000:cb:00.0"),
        ("PCI:0000:07:00 GPU-I:05", "0000:07:00.0"),
        ("PCI:00010000:07:00", "00010000:07:00.0"),
    ],
)
def test_an_address_has_several_forms(address: str, found: str) -> None:
    error = parse_kernel_message(f"NVRM: Xid ({address}): 13, x")
    assert error is not None
    assert error.pci_address == found


@pytest.mark.parametrize(("verdict", "number"), [(key, each) for key, numbers in XIDS.items() for each in numbers])
def test_an_xid_has_the_verdict_of_its_action(verdict: Verdict, number: int) -> None:
    error = parse_kernel_message(f"NVRM: Xid (PCI:0000:01:00): {number}, pid=1, name=x")
    assert error is not None
    assert (error.verdict, error.number, error.recovered, error.own_word) == (verdict, number, False, False)


def test_every_xid_of_the_catalogue_has_a_sentence() -> None:
    errors = [parse_kernel_message(f"NVRM: Xid (PCI:0000:01:00): {number}, x") for number in range(1, 178)]
    meanings = [each.meaning for each in errors if each]
    assert len(meanings) == 177
    assert all(each.count("; ") for each in meanings)
    assert [each for each in meanings if "not in the agent's copy" in each] == [meanings[-1]]
    application = [each.number for each in errors if each and each.from_application]
    assert {13, 31, 43, 45, 68, 109} <= set(application)
    assert all(each.verdict is Verdict.HEALTHY for each in errors if each and each.from_application)


@pytest.mark.parametrize(
    ("action", "verdict", "words"),
    [
        (0, Verdict.HEALTHY, "no recovery"),
        (1, Verdict.NEEDS_RESET, "reset the GPU"),
        (2, Verdict.NEEDS_REBOOT, "reboot the host"),
        (3, Verdict.DEGRADED, "peer-to-peer"),
        (4, Verdict.NEEDS_RESET, "no new work"),
        (5, Verdict.DEGRADED, "IMEX domain"),
        (6, Verdict.DEGRADED, "does not know"),
    ],
)
def test_the_driver_says_what_a_gpu_needs(action: int, verdict: Verdict, words: str) -> None:
    error = parse_kernel_message(RECOVERY.format(action))
    assert error is not None
    assert (error.verdict, error.recovered) == (verdict, action == 0)
    assert error.own_word is (verdict is Verdict.NEEDS_RESET)
    assert words in error.meaning


def test_the_two_messages_of_a_gpu_off_the_bus_are_one_error() -> None:
    """The driver writes one after the other: the second must not replace the first in the record."""
    errors = [
        parse_kernel_message(f"NVRM: {each}GPU has fallen off the bus.")
        for each in ("Xid (PCI:0000:01:00): 79, ", "GPU 0000:01:00.0: ")
    ]
    assert len({(each.reason, each.meaning) for each in errors if each}) == 1


def test_an_nvlink_error_is_fatal_only_if_the_driver_says_so_and_not_a_programs_name() -> None:
    text = "NVRM: Xid (PCI:0018:01:00): 145, pid=1, name={}, RLW_REMAP {} XC0 i0 Link 13 (0x00000004{})"
    data = " 0x00000040" * 5
    found = [("a Fatal XC0 i0", "Nonfatal", data), ("x", "Fatal", data), ("x", "Fatal", "")]
    errors = [parse_kernel_message(text.format(*each)) for each in found]
    verdicts = [each.verdict for each in errors if each]
    assert verdicts == [Verdict.HEALTHY, Verdict.NEEDS_RESET, Verdict.HEALTHY]


def test_the_catalogue_is_made_from_nvidias_files() -> None:
    header = """\
#define ROBUST_CHANNEL_GR_EXCEPTION (13)
#define INFOROM_DRAM_RETIREMENT_EVENT INFOROM_PAGE_RETIREMENT_EVENT
#define PCIE_CORRECTABLE_ERROR_FAULT (176)
#define ROBUST_CHANNEL_LAST_ERROR (176)
#define ROBUST_CHANNEL_ERROR_RECOVERY_LEVEL_INFO (0)
"""
    action = "Resolution Bucket \n(Immediate Action)"
    row = {
        "Code": "13",
        "Mnemonic": "ROBUST_CHANNEL_GR_EXCEPTION /\nROBUST_CHANNEL_GR_ERROR_SW_NOTIFY",
        action: "RESTART_APP",
    }
    made = list(table([row], header, "2025-10-29"))
    assert "2025-10-29" in made[0]
    assert made[2:] == ["13\tROBUST_CHANNEL_GR_EXCEPTION\tRESTART_APP\n", "176\tPCIE_CORRECTABLE_ERROR_FAULT\t\n"]
