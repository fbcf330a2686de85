"""Text from the kernel, programs and people that is too long, too deeply nested, or has too many digits."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from agent.config.load import load_config
from agent.host.observe.host import parse_listing
from agent.host.observe.machine import observe_version, parse_device_allow
from agent.machine.containerd import argument
from agent.model.errors import ConfigError, DocumentError
from agent.model.facts import Broken
from agent.model.paths import CONFIG_FILE
from agent.system.devices import parse_record
from agent.system.files import System
from agent.system.process import host_runner
from agent.vendors.host_vendor import names_by_major, parse_majors, parse_misc
from agent.vendors.nvidia.devices import observe_capabilities
from agent.vendors.nvidia.driver import Parameters, observe_module, parse_parameters
from agent.vendors.nvidia.user_space import cuda_version
from tests.fakes.host import Host

DIGITS = "9" * 5000
"""int() raises ValueError for more than 4,300 digits."""
MIB = 1 << 20

DEEP = {
    "list": f"a = {'[' * 3000}{']' * 3000}",
    "inline table": f"a = {'{b = ' * 3000}1{'}' * 3000}",
    "dotted key": f"{'.'.join(['a'] * 3000)} = 1",
    "header": f"[{'.'.join(['a'] * 3000)}]",
}


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_a_configuration_that_is_nested_too_deep(tmp_path: Path, text: str) -> None:
    path = tmp_path / CONFIG_FILE.lstrip("/")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"^{CONFIG_FILE}: .*nested too deep"):
        load_config(System(host_runner, str(tmp_path)))


@pytest.mark.parametrize("digits", [DIGITS, "٣"], ids=["too many", "of another script"])
def test_numbers_that_the_kernel_never_writes(host: Host, digits: str) -> None:
    devices = f"Character devices:\n{digits} nvidia\n195 nvidiactl\n"
    assert parse_majors(devices) == {"nvidiactl": 195}
    assert names_by_major(devices) == {195: {"nvidiactl"}}
    assert parse_record(f"6,{digits},1,-;text".encode()) == (None, None)
    assert parse_misc(f"{digits} kvm\n200 tun\n") == {"tun": 200}
    assert parse_parameters(f"DeviceFileUID: {digits}\nDeviceFileGID: 44\n") == Parameters(gid=44)
    directory = "/proc/driver/nvidia/capabilities/mig"
    host.file(f"{directory}/config", f"DeviceFileMinor: {digits}\n")
    host.file(f"{directory}/monitor", "DeviceFileMinor: 2\n")
    assert observe_capabilities(host) == {2: "mig/monitor"}
    host.failing[f"{directory}/config"] = host.failing[f"{directory}/monitor"] = PermissionError(
        13, "Permission denied"
    )
    host.file("/proc/driver/nvidia-caps/mig-minors", f"config {digits}\nmonitor 2\n")
    assert observe_capabilities(host) == {2: "mig/monitor"}


@pytest.mark.parametrize("digits", [DIGITS, "٣"], ids=["too many", "of another script"])
def test_numbers_that_programs_never_write(host: Host, digits: str) -> None:
    assert isinstance(parse_listing(f"{digits} libs found in cache `/etc/ld.so.cache'\n"), Broken)
    with pytest.raises(DocumentError, match="cuDriverGetVersion returned"):
        cuda_version("/libcuda.so", digits)


def test_a_version_of_many_digits(host: Host) -> None:
    host.bus.version(DIGITS)
    assert isinstance(observe_version(host), Broken)


def test_parsing_time_grows_linearly(host: Host) -> None:
    """A MiB is the most that is read of a file. Each of these once took seconds to hours."""
    entry = "DeviceAllow=/dev/a rw\n"
    joined = "DeviceAllow=/dev/a \\\n"
    host.file("/proc/driver/nvidia/version", "9" * (MIB - 1))
    calls: dict[str, Callable[[], object]] = {
        "entries": lambda: parse_device_allow("[Service]\n" + entry * (MIB // len(entry))),
        "joined lines": lambda: parse_device_allow("[Service]\n" + joined * (MIB // len(joined))),
        "arguments": lambda: argument(b"containerd\0" + b"-c\0" * (MIB // 3), "config"),
        "digits": lambda: observe_module(host),
    }
    for what, call in calls.items():
        started = time.process_time()
        call()
        assert time.process_time() - started < 1, what
