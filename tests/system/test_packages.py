"""What apt and dpkg print. The lines are apt 3.0.3's and dpkg 1.22.22's."""

from pathlib import Path

import pytest

from agent.model.errors import AgentError, CommandError, DocumentError
from agent.system.packages import (
    KEEP,
    QUIET,
    Change,
    Changes,
    available,
    available_for,
    contents,
    fetch,
    file_of,
    finish_installation,
    installed,
    lock_holder,
    simulate,
    upstream,
)
from tests.fakes.host import Host

OPTIONS = ("--yes", "--allow-downgrades", "--option=APT::Get::AutomaticRemove=false")
SIMULATE = ("apt-get", "--simulate", *OPTIONS, "install", "a")
CONTENTS = ("dpkg-deb", "--contents", "/a.deb")


@pytest.fixture
def host(tmp_path: Path) -> Host:
    host = Host(tmp_path)
    host.make_directory("/var/cache/apt/archives")
    return host


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("550.163.01-2", "550.163.01"),
        ("580.95.05-0ubuntu0.24.04.1", "580.95.05"),
        ("1:550.163.01", "550.163.01"),
        ("2:1.0-rc1-3", "1.0-rc1"),
    ],
)
def test_the_version_without_what_the_distribution_adds(version: str, expected: str) -> None:
    assert upstream(version) == expected


def test_changes_and_removals(host: Host) -> None:
    host.command(
        *SIMULATE,
        stdout="Reading package lists...\n"
        "Inst libcuda1:i386 [550.163.01-2] (555.42.06-1 Debian-Security:13/stable-security [i386]) []\n"
        "Inst firmware (555.42.06-1 localhost [all])\n"
        "Remv cuda [12.4]\n"
        "Purg old [1] [new:amd64 ]\n"
        "Conf firmware (555.42.06-1 localhost [all])\n",
    )
    assert simulate(SIMULATE[5:], host) == Changes(
        (Change("firmware", None, "555.42.06-1"), Change("libcuda1:i386", "550.163.01-2", "555.42.06-1")),
        ("cuda", "old"),
    )


@pytest.mark.parametrize("line", ["Inst libcuda1", "Inst libcuda1 [1]", "Inst  (1)"])
def test_a_change_that_is_not_understood_is_an_error(host: Host, line: str) -> None:
    host.command(*SIMULATE, stdout=f"{line}\n")
    with pytest.raises(DocumentError, match="not understood"):
        simulate(SIMULATE[5:], host)


def test_installed_packages_have_their_architecture_if_it_is_foreign(host: Host) -> None:
    host.command("dpkg", "--print-architecture", stdout="amd64\n")
    show = _query()
    lines = "libc6\tamd64\t2.41-12\t2.41\tinstalled\thold\nlibc6\ti386\t2.41-12\t2.41\tunpacked\tinstall\n"
    host.command(*show, stdout=f"{lines}gone\tall\t1\t1\tconfig-files\tdeinstall\n")
    found = installed(host)
    assert found.keys() == {"libc6", "libc6:i386"}
    assert (found["libc6"].held, found["libc6"].complete, found["libc6:i386"].complete) == (True, True, False)
    host.command(*show, stdout="libc6\n")
    with pytest.raises(DocumentError, match="dpkg-query printed"):
        installed(host)


def _query() -> tuple[str, ...]:
    """Return the arguments of dpkg-query."""
    own = ("Package", "Architecture", "Version", "source:Upstream-Version", "db:Status-Status", "db:Status-Want")
    form = "\t".join("${" + name + "}" for name in own)
    return ("dpkg-query", "--show", f"--showformat={form}\n")


def test_versions_of_package_sources(host: Host) -> None:
    host.command(
        *("apt-cache", "madison", "libcuda1"),
        stdout="  libcuda1 | 560.1-1 | file:/repo ./ Packages\n  libcuda1 | 555.42-2 | file:/repo ./ Packages\n"
        "  libcuda1 | 555.42-1 | file:/repo ./ Packages\n",
    )
    host.command(*("apt-cache", "madison", "libcuda1:i386"), stdout="libcuda1 | 555.42-3 | http://x ./ Sources\n")
    assert available(["libcuda1", "libcuda1:i386"], "555.42", host) == {"libcuda1": "555.42-2"}
    assert available(["libcuda1"], None, host) == {"libcuda1": "560.1-1"}


def test_the_driver_that_built_modules_are_made_for(host: Host) -> None:
    """The lines are those of Ubuntu 24.04. The newest package is empty, because the branch has ended."""
    name = "linux-modules-nvidia-535-server-generic"
    host.command(
        *("apt-cache", "madison", name, "gone"),
        stdout=f"{name} | 6.8.0-151.151 | http://x noble-updates/restricted amd64 Packages\n"
        f"{name} | 6.8.0-31.31 | http://x noble/restricted amd64 Packages\n",
    )
    host.command(
        *("apt-cache", "show", name),
        stdout=f"Package: {name}\nVersion: 6.8.0-151.151\nDepends: linux-modules-nvidia-580-server-generic\n"
        f"Description: Extra drivers for nvidia-535-server\n (dummy package) for 535.161.08\n\n"
        f"Package: {name}\nVersion: 6.8.0-31.31\nProvides: nvidia-dkms-535-server (= 535.161.08-0ubuntu2)\n"
        "Depends: linux-modules-nvidia-535-server-6.8.0-31-generic (= 6.8.0-31.31), "
        "nvidia-kernel-common-535-server (>= 535.161.08)\nFilename: pool/x.deb\n\n",
    )
    assert available_for([name, "gone"], "535.161.08", host) == {name: "6.8.0-31.31"}
    assert available_for([name, "gone"], "535.161", host) == {}
    host.command("apt-cache", "madison", "gone")
    assert available_for(["gone"], "535.161.08", host) == {}


def test_the_file_of_a_version() -> None:
    files = ("a_1%3a2-3_i386.deb", "a_1%3a2-3_amd64.deb", "a-b_1_all.deb")
    assert file_of("a", "1:2-3", files, "amd64") == "a_1%3a2-3_amd64.deb"
    assert file_of("a:i386", "1:2-3", files, "amd64") == "a_1%3a2-3_i386.deb"
    assert file_of("a-b", "1", files, "amd64") == "a-b_1_all.deb"
    assert file_of("a", "1", files, "amd64") == ""


def test_a_file_of_another_architecture_is_not_that_of_the_package(host: Host) -> None:
    """apt's cache has only the 32-bit libraries of the old driver."""
    host.command("dpkg", "--print-architecture", stdout="amd64\n")
    host.file("/var/cache/apt/archives/a_1_i386.deb")
    host.command(*("env", "--chdir=/packages/partial", "apt-get", "download", "a=1"), stderr="E: none\n", status=100)
    with pytest.raises(AgentError, match="E: none"):
        fetch({"a": "1"}, "/packages", host)


def test_what_a_package_has(host: Host) -> None:
    host.command(
        *CONTENTS,
        stdout="drwxr-xr-x root/root         0 2026-11-30 11:29 ./\n"
        "-rw-r--r-- root/root  28712096 2026-11-30 11:29 ./usr/lib/lib cuda.so.1\n"
        "lrwxrwxrwx root/root         0 2026-11-30 11:29 ./usr/lib/libcuda.so -> libcuda.so.1\n"
        "crw-r--r-- root/root     195,0 2026-11-30 11:29 ./dev/nvidia0\n",
    )
    assert contents("/a.deb", host) == {
        "/": 0,
        "/usr/lib/lib cuda.so.1": 28712096,
        "/usr/lib/libcuda.so": 0,
        "/dev/nvidia0": 0,
    }
    host.command(*CONTENTS, stdout="something else\n")
    with pytest.raises(DocumentError, match="not understood"):
        contents("/a.deb", host)


def test_only_complete_files_are_kept(host: Host) -> None:
    """What a killed download left is downloaded again."""
    host.command("dpkg", "--print-architecture", stdout="amd64\n")
    host.file("/packages/partial/a_1_amd64.deb", "half")
    download = ("env", "--chdir=/packages/partial", "apt-get", "download", "a=1")
    host.command(*download, stderr="E: Version '1' for 'a' was not found\n", status=100)
    with pytest.raises(AgentError, match="was not found"):
        fetch({"a": "1"}, "/packages", host)
    assert host.entries("/packages") == ()


def test_a_process_that_waits_for_the_lock_does_not_have_it(host: Host) -> None:
    host.file("/var/lib/dpkg/lock-frontend")
    inode = host.link_inode("/var/lib/dpkg/lock-frontend")
    host.file(
        "/proc/locks", f"8: -> POSIX  ADVISORY  WRITE 7 fe:00:{inode} 0 EOF\n9: FLOCK ADVISORY WRITE 8 0:0:1 0 EOF\n"
    )
    assert lock_holder(host) == ""
    host.file("/proc/locks", f"8: POSIX  ADVISORY  WRITE 7 fe:00:{inode} 0 EOF\n")
    assert lock_holder(host) == "PID 7"


def test_what_a_script_said_of_its_error_is_told(host: Host) -> None:
    """apt and dpkg go on with other packages after it."""
    said = "Setting up made-up-modules (565.57.01-9) ...\nthe module cannot be built\n"
    said += "dpkg: error processing package made-up-modules (--configure):\n subprocess returned error exit status 7\n"
    said += "Processing triggers for libc-bin (2.41-12) ...\n" * 20
    unit = ("systemd-run", "--quiet", "--wait", "--pipe", "--collect", *QUIET, "--")
    host.command(*unit, "dpkg", *KEEP, "--configure", "--pending", stdout=said, status=1)
    with pytest.raises(CommandError, match="the module cannot be built") as error:
        finish_installation(host, print)
    assert "triggers" not in str(error.value)
