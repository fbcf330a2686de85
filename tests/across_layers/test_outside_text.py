"""Text from the kernel, programs and people that is too long, too deeply nested, or has too many digits."""

import time
from pathlib import Path

import pytest

from agent.config.load import load_config
from agent.host.observe.host import parse_listing
from agent.host.observe.machine import observe_version
from agent.model.errors import ConfigError, DocumentError
from agent.model.facts import Broken
from agent.model.paths import CONFIG_FILE
from agent.system.devices import parse_record
from agent.vendors.host_vendor import names_by_major, parse_majors, parse_misc
from agent.vendors.nvidia.devices import observe_capabilities
from agent.vendors.nvidia.driver import Parameters, observe_module, parse_parameters
from agent.vendors.nvidia.user_space import cuda_version
from tests.fakes.config_files import system_with
from tests.fakes.host import Host

DIGITS = "9" * 5000
"""int() raises ValueError for more than 4,300 digits."""
DIGIT_STRINGS = pytest.mark.parametrize("digits", [DIGITS, "٣"], ids=["too many", "of another script"])

DEEP = {
    "list": f"a = {'[' * 3000}{']' * 3000}",
    "inline table": f"a = {'{b = ' * 3000}1{'}' * 3000}",
    "dotted key": f"{'.'.join(['a'] * 3000)} = 1",
    "header": f"[{'.'.join(['a'] * 3000)}]",
}


@pytest.mark.parametrize("text", DEEP.values(), ids=DEEP)
def test_a_configuration_that_is_nested_too_deep(tmp_path: Path, text: str) -> None:
    with pytest.raises(ConfigError, match=f"^{CONFIG_FILE}: .*nested too deep"):
        load_config(system_with(tmp_path, main=text))


@DIGIT_STRINGS
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
    for name in ("config", "monitor"):
        host.failing[f"{directory}/{name}"] = PermissionError(13, "Permission denied")
    host.file("/proc/driver/nvidia-caps/mig-minors", f"config {digits}\nmonitor 2\n")
    assert observe_capabilities(host) == {2: "mig/monitor"}


@DIGIT_STRINGS
def test_numbers_that_programs_never_write(host: Host, digits: str) -> None:
    assert isinstance(parse_listing(f"{digits} libs found in cache `/etc/ld.so.cache'\n"), Broken)
    with pytest.raises(DocumentError, match="cuDriverGetVersion returned"):
        cuda_version("/libcuda.so", digits)
    host.bus.version(digits)
    assert isinstance(observe_version(host), Broken)


def test_a_module_s_version_is_read_in_linear_time(host: Host) -> None:
    """A MiB is the most that is read of a file. Each parser has its turn in test_parser_growth.py."""
    host.file("/proc/driver/nvidia/version", "9" * ((1 << 20) - 1))
    started = time.process_time()
    observe_module(host)
    assert time.process_time() - started < 1
