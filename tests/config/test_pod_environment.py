"""Variables for pods: from the configuration through the handoff into the CDI specification, and nothing else."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from agent.config.load import load_config
from agent.config.settings import Config
from agent.host.plan.goal import plan
from agent.machine.run import run
from agent.model.errors import ConfigError
from agent.model.goal import MachineGoal
from agent.model.handoff import Variable, parse_handoff, render_handoff
from agent.model.paths import CONFIG_FILE
from agent.vendors.nvidia.nvidia_ctk import with_additions
from agent.vendors.nvidia.verify import verify
from tests.fakes.cdi_specs import LIVE, PRESENT
from tests.fakes.config_files import system_with
from tests.fakes.facts import facts
from tests.fakes.machine import REQUEST, gpu_machine, recorded_spec

GLX = Variable("__GLX_VENDOR_LIBRARY_NAME", "nvidia")
ASKED = REQUEST._replace(environment=(GLX,))
SETTING = "__GLX_VENDOR_LIBRARY_NAME=nvidia"


def configured(tmp_path: Path, variables: str) -> Config:
    text = f"[machines.a.pod_environment.nvidia]\n{variables}\n"
    return load_config(system_with(tmp_path, main=text))


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        ('"A B" = "x"', ".A B: 'A B' is not the name of an environment variable"),
        ('"A=B" = "x"', ".A=B: 'A=B' is not the name of an environment variable"),
        ('A = "x\\ny"', ".A: it is not one line of text"),
        ('A = "x\\u0000y"', ".A: it is not one line of text"),
        ("A = 1", ".A: must be a string"),
        (f'A = "{"x" * 1025}"', ".A: must not be longer than 1024 characters"),
        ('NVIDIA_VISIBLE_DEVICES = "all"', ": NVIDIA_VISIBLE_DEVICES may not be set for all pods: the container"),
        ('NVIDIA_DRIVER_CAPABILITIES = "all"', ": NVIDIA_DRIVER_CAPABILITIES may not be set for all pods: "),
        ('NVCT_EMPTY_DEVICE = ""', ": NVCT_EMPTY_DEVICE may not be set"),
        ('LD_PRELOAD = "/x.so"', ": LD_PRELOAD may not be set for all pods: the loader would"),
        ('LD_LIBRARY_PATH = "/x"', ": LD_LIBRARY_PATH may not be set"),
        ('PATH = "/x"', ": PATH may not be set for all pods: it would replace the image's own"),
        ('[machines.a.pod_environment.nvidia2]\nA = "x"', "2: Input should be 'nvidia'"),
        (
            'KUBERNETES_SERVICE_HOST = "x"',
            ": KUBERNETES_SERVICE_HOST may not be set for all pods: each pod has its own",
        ),
    ],
)
def test_refused_variables_are_named_with_file_and_key(tmp_path: Path, variables: str, expected: str) -> None:
    with pytest.raises(ConfigError) as raised:
        configured(tmp_path, variables)
    assert str(raised.value).startswith(f"{CONFIG_FILE}: machines.a.pod_environment.nvidia{expected}")


def planned(**settings: Any) -> MachineGoal:  # noqa: ANN401
    config = Config.validated({"machines": {"gpu-node": settings}})
    return plan(config, facts()).goal.machines[0]


def test_only_the_handoff_changes() -> None:
    """Neither the machine's settings nor its unit change, so no restart is needed."""
    variables = {"__GLX_VENDOR_LIBRARY_NAME": "nvidia", "A": "naïve 日本語 \ufffd"}
    hooks, before = ["update-application-profile", "enable-cuda-compat"], planned()
    (plain,) = before.handoff.requests
    for name, setting, request in (
        ("pod_environment", {"nvidia": variables}, plain._replace(environment=(Variable("A", variables["A"]), GLX))),
        ("cdi_hooks", hooks, plain._replace(cdi_hooks=("enable-cuda-compat", "update-application-profile"))),
    ):
        after = planned(**{name: setting})
        assert (after.nspawn, after.drop_in, after.live) == (before.nspawn, before.drop_in, before.live)
        assert after.handoff.requests == (request,)
        assert after.handoff.generation != before.handoff.generation
        assert parse_handoff(render_handoff(after.handoff)) == after.handoff
    for wrong in (["chmod"], [*hooks, "enable-cuda-compat"]):
        with pytest.raises(ValidationError):
            planned(cdi_hooks=wrong)


def environment(spec: object) -> list[str]:
    assert isinstance(spec, dict)
    found = spec["containerEdits"]["env"]
    assert isinstance(found, list)
    return found


@pytest.mark.parametrize(
    ("present", "expected"),
    [
        ([SETTING, "LD_PRELOAD=/x.so"], "unexpected environment variable 'LD_PRELOAD=/x.so'"),
        ([SETTING, f"{GLX.name}=mesa"], f"unexpected environment variable '{GLX.name}=mesa'"),
        ([GLX.name], f"unexpected environment variable '{GLX.name}'"),
        ([], f"{GLX.name} is not set to 'nvidia'"),
    ],
)
def test_verification_allows_only_the_configured_variables(present: list[str], expected: str) -> None:
    spec, _ = with_additions(recorded_spec(), ASKED)
    assert isinstance(spec, dict)
    spec["containerEdits"]["env"] = present
    assert expected in "; ".join(verify(spec, ASKED, LIVE, PRESENT).problems)
    assert verify(with_additions(recorded_spec(), ASKED)[0], REQUEST, LIVE, PRESENT).problems == (
        f"containerEdits: unexpected environment variable {SETTING!r}",
    )


def test_a_change_renews_the_spec_of_a_running_machine(tmp_path: Path) -> None:
    """The variable is set, changed and removed; each time the specification is made again and verified."""
    machine = gpu_machine(tmp_path / "machine")
    for value in ("nvidia", "mesa", None):
        variables = (Variable(GLX.name, value),) if value else ()
        machine.hand(REQUEST._replace(environment=variables))
        machine.calls.clear()
        run(machine)
        assert machine.conditions()["CDISpecCurrent"] == ("True", "Verified")
        assert any(call[1:3] == ("cdi", "generate") for call in machine.calls)
        found = environment(json.loads(machine.read("/etc/cdi/nvidia.yaml")))
        assert [each for each in found if GLX.name in each] == ([f"{GLX.name}={value}"] if value else [])
