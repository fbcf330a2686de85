"""GPUs with another kernel driver: the advice names modules, whose names may differ from those of drivers."""

import pytest

from agent.model.conditions import Reason
from agent.model.goal import Grant
from agent.vendors.nvidia.conditions import nvidia_conditions, remedies
from agent.vendors.nvidia.host import observe_nvidia
from tests.fakes.host import Host
from tests.fakes.user_space import sources

FIRST, SECOND = "0000:01:00.0", "0000:02:00.0"


@pytest.fixture
def bound(host: Host) -> Host:
    host.driver("550.163.01", gpus=2)
    host.remove_file("/sys/module/nvidia/version")
    return host


def bind(host: Host, driver: str, module: str = "", holders: tuple[str, ...] = ()) -> None:
    for address in (FIRST, SECOND):
        host.rebind(address, driver)
    host.make_directory(f"/sys/bus/pci/drivers/{driver}")
    if module:
        host.symlink(f"/sys/bus/pci/drivers/{driver}/module", f"../../../../module/{module}")
        for holder in holders:
            host.symlink(f"/sys/module/{module}/holders/{holder}", f"../../{holder}")


def advice(host: Host) -> tuple[str, tuple[str, ...]]:
    """Return the message of DriverLoaded, and the commands that `doctor` prints."""
    facts = observe_nvidia(sources(host))
    condition = nvidia_conditions(facts, Grant("nvidia", (FIRST, SECOND)))[0]
    assert condition.reason == Reason.WRONG_DRIVER
    return condition.message, remedies(condition.type, condition.reason, facts, frozenset())


@pytest.mark.parametrize("holders", [(), ("nova_drm",)])
def test_nova_is_blacklisted_by_the_names_of_its_modules(bound: Host, holders: tuple[str, ...]) -> None:
    """Ubuntu 26.04 (beclab/Olares issue 3963): `blacklist NovaCore` did nothing."""
    bind(bound, "NovaCore", "nova_core", holders)
    message, lines = advice(bound)
    assert message == "the GPUs have kernel driver NovaCore; `unbounded-agent doctor` on the host has the commands"
    assert [line for line in lines if "blacklist " in line] == [
        f"echo 'blacklist {each}' >> /etc/modprobe.d/blacklist-gpu.conf" for each in ("nova_core", "nova_drm")
    ]


def test_what_would_load_the_module_again_is_blacklisted_too(bound: Host) -> None:
    """modprobe ignores the blacklist for a module that another one needs."""
    bind(bound, "some-driver", "its_module", ("user_of_it",))
    assert [line.split("'")[1] for line in advice(bound)[1][:2]] == ["blacklist its_module", "blacklist user_of_it"]


def test_a_driver_that_is_built_in_cannot_be_blacklisted(bound: Host) -> None:
    bind(bound, "nouveau")
    assert advice(bound)[1] == (
        f"echo nvidia > /sys/bus/pci/devices/{FIRST}/driver_override",
        f"echo {FIRST} > /sys/bus/pci/devices/{FIRST}/driver/unbind",
        f"echo nvidia > /sys/bus/pci/devices/{SECOND}/driver_override",
        f"echo {SECOND} > /sys/bus/pci/devices/{SECOND}/driver/unbind",
        "modprobe -a nvidia nvidia_uvm",
    )


def test_a_name_that_sysfs_does_not_show_is_guessed(bound: Host) -> None:
    bound.rebind(FIRST, "some-driver")
    assert "blacklist some_driver" in advice(bound)[1][0]
