"""Conditions as JSON."""

import json

import pytest

from agent.model.conditions import Condition, ConditionType, Reason, Status, false, true, with_transitions, worst
from agent.model.text import MESSAGE_LIMIT

STOPPED = false(ConditionType.MACHINE_RUNNING, Reason.STOPPED, "it was\nstopped in \udce9")


def test_the_format_of_kubernetes() -> None:
    (dated,) = with_transitions((STOPPED,), (), 1_700_000_000.0)
    assert json.dumps(dated.to_kubernetes()) == (
        '{"type": "MachineRunning", "status": "False", "reason": "Stopped", "message": "it was stopped in \\\\udce9", '
        '"lastTransitionTime": "2023-11-14T22:13:20Z"}'
    )


def test_a_message_has_a_limit_wherever_it_goes() -> None:
    """Only the report cut it: notes and the journal got messages of 11 MB, about a specification that a pod wrote."""
    for make in (true, false):
        assert len(make(ConditionType.CDI_SPEC_CURRENT, Reason.SPEC_REFUSED, "hook " * 1000).message) == MESSAGE_LIMIT


def test_counts_of_several_vendors_are_added() -> None:
    kind = ConditionType.GPUS_ADVERTISED
    found = true(kind, Reason.ADVERTISED, "all")._replace(advertised=2)
    unknown_number = false(kind, Reason.DEVICE_PLUGIN_DOWN, "down")
    assert worst([found, unknown_number]).advertised == 2
    assert worst([found, found]).advertised == 4
    assert worst([unknown_number]).advertised is None


def test_a_reason_that_calls_for_action_is_not_lost_among_vendors() -> None:
    kind = ConditionType.CDI_SPEC_CURRENT
    verified, left_out = true(kind, Reason.VERIFIED, "amd"), true(kind, Reason.EDITS_LEFT_OUT, "nvidia")
    assert worst([verified, left_out])[:4] == (kind, "True", "EditsLeftOut", "amd; nvidia")
    assert worst([verified, left_out, false(kind, Reason.SPEC_REFUSED, "intel")]).reason == "SpecRefused"


def limited(status: Status) -> Condition:
    return Condition(ConditionType.CDI_SPEC_CURRENT, status, "Limited", "of one GPU", gpus=("0000:01:00.0",))


@pytest.mark.parametrize("status", [Status.FALSE, Status.UNKNOWN])
def test_a_fault_of_one_gpu_hides_nothing_that_concerns_all(status: Status) -> None:
    """Ready ignored the merged condition, although nothing was known of the other vendor's GPUs."""
    whole = Condition(ConditionType.CDI_SPEC_CURRENT, status, "Whole", "of all GPUs")
    for conditions in ((limited(Status.FALSE), whole), (whole, limited(Status.FALSE))):
        found = worst(conditions)
        assert (found.status, found.reason, found.gpus) == (status, "Whole", ())
        assert found.message == "of all GPUs; of one GPU"


def test_faults_of_some_gpus_stay_limited() -> None:
    fine = true(ConditionType.CDI_SPEC_CURRENT, Reason.VERIFIED, "fine")
    other = limited(Status.FALSE)._replace(gpus=("0000:02:00.0",))
    assert worst([fine, limited(Status.FALSE), other]).gpus == ("0000:01:00.0", "0000:02:00.0")
