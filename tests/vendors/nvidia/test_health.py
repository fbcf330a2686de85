"""What follows from what a GPU says of its own health."""

import pytest

from agent.model.contract import REASON
from agent.model.facts import Verdict
from agent.model.handoff import HealthAnswer
from agent.vendors.nvidia.conditions import OWN_WORDS, judge, needs_nothing
from agent.vendors.nvidia.contract import (
    DRAIN_AND_RESET,
    FABRIC_HEALTH,
    HEALTH_FIELDS,
    LINK_ERRORS,
    PAGES_PENDING,
    POWER_BRAKE,
    RECOVERY_ACTION,
    REQUIRES_RESET,
    RESET_REQUIRED,
    ROWS_FAILED,
    ROWS_PENDING,
    UNCORRECTED,
)

HEALTHY = dict.fromkeys((PAGES_PENDING, ROWS_PENDING, ROWS_FAILED), "No") | {
    RECOVERY_ACTION: "None",
    UNCORRECTED: "0",
    POWER_BRAKE: "Not Active",
    FABRIC_HEALTH: "Healthy",
}


@pytest.mark.parametrize(
    ("said", "verdict", "reason", "nothing_needed"),
    [
        ({}, "healthy", "", True),
        ({RECOVERY_ACTION: "Reset"}, "needs-reset", "RecoveryActionReset", False),
        ({RECOVERY_ACTION: "Reboot"}, "needs-reboot", "RecoveryActionReboot", False),
        ({RECOVERY_ACTION: "Drain P2P"}, "degraded", "RecoveryActionDrainP2P", False),
        ({RECOVERY_ACTION: "Drain and Reset"}, "needs-reset", "RecoveryActionDrainAndReset", False),
        ({RECOVERY_ACTION: "Recover IMEX Domain"}, "degraded", "RecoveryActionRecoverImexDomain", False),
        ({RECOVERY_ACTION: "Dance"}, "degraded", "RecoveryActionUnknown", False),
        ({RESET_REQUIRED: "Yes"}, "needs-reset", "RecoveryActionReset", False),
        ({DRAIN_AND_RESET: "Yes"}, "needs-reset", "RecoveryActionDrainAndReset", False),
        (dict.fromkeys(HEALTH_FIELDS, REQUIRES_RESET), "needs-reset", "RequiresReset", False),
        ({ROWS_FAILED: "Yes"}, "broken", "RowRemapFailure", False),
        ({ROWS_PENDING: "Yes"}, "degraded", "RowRemapPending", True),
        ({PAGES_PENDING: "Yes"}, "degraded", "PageRetirementPending", True),
        ({UNCORRECTED: "1"}, "degraded", "UncorrectedECC", True),
        ({UNCORRECTED: "9" * 64}, "healthy", "", True),
        ({UNCORRECTED: "Yes"}, "healthy", "", True),
        ({POWER_BRAKE: "Active"}, "degraded", "PowerBrake", True),
        ({FABRIC_HEALTH: "Unhealthy"}, "degraded", "FabricUnhealthy", True),
        ({FABRIC_HEALTH: "Limited Capacity"}, "degraded", "FabricLimited", True),
        ({LINK_ERRORS: "None"}, "healthy", "", True),
        ({LINK_ERRORS: "Recovery"}, "degraded", "NVLinkRecoveryErrors", True),
        ({LINK_ERRORS: "Replay"}, "degraded", "NVLinkReplayErrors", True),
        ({LINK_ERRORS: "CRC"}, "degraded", "NVLinkCRCErrors", True),
        # The worst counts.
        ({RECOVERY_ACTION: "Reset", ROWS_FAILED: "Yes", ROWS_PENDING: "Yes"}, "broken", "RowRemapFailure", False),
        ({ROWS_PENDING: "Maybe", "a.later.field": "Yes"}, "healthy", "", True),
    ],
)
def test_verdicts(said: dict[str, str], verdict: str, reason: str, nothing_needed: bool) -> None:
    answer = HealthAnswer("0000:01:00.0", HEALTHY | said)
    found = judge(answer)
    assert (found.verdict, found.reason) == (verdict, reason)
    assert needs_nothing(answer) is nothing_needed
    assert bool(found.meaning) is (found.verdict is not Verdict.HEALTHY)


def test_what_a_gpu_does_not_say_is_no_fault() -> None:
    assert judge(HealthAnswer("0000:01:00.0")).verdict is Verdict.HEALTHY
    assert not needs_nothing(HealthAnswer("0000:01:00.0")), "nor does it end one"


def test_each_row_is_about_a_field_that_is_asked_for_and_fits_a_taint() -> None:
    assert {field for field, _ in OWN_WORDS} <= {*HEALTH_FIELDS, LINK_ERRORS}
    assert all(REASON.fullmatch(row.reason) for row in OWN_WORDS.values())
