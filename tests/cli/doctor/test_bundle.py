"""The archive has what helps, within limits, and no secret."""

import io
import json
import stat
import tarfile
import time
from pathlib import Path

import pytest

from agent.cli.doctor import bundle
from agent.cli.doctor.bundle import REMOVED, redacted
from agent.model.paths import CONFIG_FILE
from agent.system.process import Completed, host_runner
from tests.fakes.command import Capture, command
from tests.fakes.gpu_host import MACHINE, reconciler
from tests.fakes.host import Host
from tests.fakes.sound_host import make_sound

DATA = Path(__file__).parents[2] / "data"
TOKEN = "abcdef.0123456789abcdef"
KEY = "-----BEGIN RSA PRIVATE KEY-----\nMIIEow\n-----END RSA PRIVATE KEY-----"


class Journal(dict[tuple[str, ...], Completed]):
    """Answers every command that has no answer of its own."""

    def __init__(self, known: dict[tuple[str, ...], Completed], text: str) -> None:
        super().__init__(known)
        self.text = text

    def __contains__(self, argv: object) -> bool:
        return True

    def __missing__(self, argv: tuple[str, ...]) -> Completed:
        if argv[0] == "lspci":
            raise FileNotFoundError(argv[0])
        return Completed(0, f"{' '.join(argv)}\n{self.text}\n".encode(), b"")


@pytest.fixture
def seeded(gpu_host: Host) -> Host:
    make_sound(gpu_host)
    gpu_host.file(CONFIG_FILE, f'[machines.gpu-node]\npod_environment.X_PASSWORD = "hunter2"\n# {TOKEN}\n')
    gpu_host.file("/proc/cmdline", "root=/dev/vda1 registry_token=s3cr3tvalue quiet\n")
    gpu_host.runner.answers = Journal(gpu_host.runner.answers, f"joined with {TOKEN}\n{KEY}")
    return gpu_host


def written(host: Host) -> dict[str, str]:
    assert command(reconciler(host), "doctor --bundle=/root/b.tar.gz") == 0
    place = Path(f"{host.root}/root/b.tar.gz")
    assert stat.S_IMODE(place.stat().st_mode) == 0o600
    with tarfile.open(fileobj=io.BytesIO(place.read_bytes())) as archive:
        files = {member.name: archive.extractfile(member) for member in archive.getmembers()}
        return {name.removeprefix("unbounded-agent/"): file.read().decode() for name, file in files.items() if file}


def test_what_is_in_it(seeded: Host, capsys: Capture) -> None:
    """No secret."""
    files = written(seeded)
    assert {"version.txt", "doctor.txt", "plan.txt", f"machines/{MACHINE}/kubelet.log", f"files{CONFIG_FILE}"} <= set(
        files
    )
    machine = json.loads(files["status.json"])["machines"][MACHINE]
    assert machine["ready"] == "False"
    assert machine["conditions"][0]["lastTransitionTime"] is None, "no pass has recorded it"
    assert json.loads(files["doctor.json"])["version"] == 1
    assert "registry_token=" in files["files/proc/cmdline"]
    assert "commands/lspci: lspci -Dnnk: not found" in files["left-out.txt"]
    printed = capsys.readouterr().out
    assert printed.startswith("/root/b.tar.gz is written; ")
    assert "Read it before you send it." in printed
    text = "\n".join(files.values())
    assert REMOVED in text
    assert [each for each in ("hunter2", TOKEN, "s3cr3tvalue", "MIIEow") if each in text] == []


def test_of_others_only_what_is_named_goes_in(seeded: Host) -> None:
    """Nothing tells that these are secrets, so only a list of what may go in keeps them out."""
    seeded.file("/etc/unbounded-agent/notes.txt", "the door code is 4711")
    seeded.file("/var/lib/unbounded-agent/id", "plain-4711")
    seeded.file("/var/lib/unbounded-agent/owned.json", '{"version": 1}')
    seeded.file("/proc/cmdline", "root=/dev/vda1 vendor.hint=plain4711 nvidia-drm.modeset=1 iommu=pt quiet\n")
    seeded.runner.answers = Journal(seeded.runner.answers, "Environment=HINT=fine")
    files = written(seeded)
    assert [name for name, text in files.items() if "4711" in text] == []
    assert files["files/proc/cmdline"] == f"root=/dev/vda1 vendor.hint={REMOVED} nvidia-drm.modeset=1 iommu=pt quiet\n"
    assert files["commands/mounts"].startswith("findmnt --list --output=SOURCE,TARGET,FSTYPE,VFS-OPTIONS\n")
    assert not any("/proc/mounts" in name for name in files), "options of file systems may have passwords"
    assert "files/var/lib/unbounded-agent/owned.json" in files
    assert files[f"machines/{MACHINE}/unit"].startswith("systemctl show "), "drop-ins of others may have passwords"


def test_its_size_is_limited(seeded: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bundle, "FILE_LIMIT", 100)
    monkeypatch.setattr(bundle, "TOTAL_LIMIT", 1000)
    files = written(seeded)
    assert max(len(text) for name, text in files.items() if name != "left-out.txt") <= 100
    assert sum(len(text) for name, text in files.items() if name != "left-out.txt") <= 1000
    assert "what would follow: the archive is limited" in files["left-out.txt"]


BUG_REPORT = "/usr/bin/nvidia-bug-report.sh"
SIMULATED = """#!/bin/sh
# A simulation of NVIDIA's script: it has its options, and writes members of gzip, one after the other.
[ "$1 $2" = "--safe-mode --output-file" ] || exit 1
echo "nvidia-bug-report.sh will now collect information"
for part in "Start of NVIDIA bug report log file" "command line flags: api_token=hunter2" "End of the report"; do
    echo "$part" | gzip -c >>"$3.gz"
done
"""


def test_parameters_of_the_kernel_are_removed_everywhere(seeded: Host) -> None:
    """The kernel log begins with them, and the vendor's report has them."""
    line = "root=/dev/vda1 installer=s3cr3tvalue a\\d=1 x=1 quiet"
    seeded.file("/proc/cmdline", f"{line}\n")
    seeded.runner.answers = Journal(seeded.runner.answers, f"Command line: {line}\nmax=1 x=12")
    log = written(seeded)["commands/kernel.log"]
    assert f"Command line: root=/dev/vda1 installer={REMOVED} a\\d={REMOVED} x={REMOVED} quiet\nmax=1 x=12\n" in log


def sandboxed(host: Host) -> list[tuple[str, ...]]:
    return [argv for argv in host.runner.calls if argv[0] == "systemd-run"]


class InSandbox(Journal):
    """Runs what systemd would run in a unit: without the unit's limits, on the simulated host's script."""

    def __init__(self, host: Host) -> None:
        super().__init__(host.runner.answers, "")
        self.host = host

    def __missing__(self, argv: tuple[str, ...]) -> Completed:
        if argv[0] != "systemd-run":
            return super().__missing__(argv)
        script = argv[argv.index("/bin/sh") :]
        return host_runner(tuple(self.host.full_path(each) if each == BUG_REPORT else each for each in script), 20)


@pytest.mark.processes
def test_the_vendors_report_is_unpacked_without_secrets(seeded: Host) -> None:
    seeded.file(BUG_REPORT, SIMULATED, executable=True)
    seeded.runner.answers = InSandbox(seeded)
    report = written(seeded)["commands/nvidia-bug-report.sh"]
    flags = f"command line flags: api_token={REMOVED}"
    assert report == f"Start of NVIDIA bug report log file\n{flags}\nEnd of the report\n"
    ((*unit, _, _, _, _, _, option),) = sandboxed(seeded)
    assert {"--property=DevicePolicy=closed", "--property=DeviceAllow=/dev/kmsg r"} < set(unit), "it can open no GPU"
    assert option == "--safe-mode"


@pytest.mark.processes
@pytest.mark.parametrize(
    ("script", "end"),
    [
        ("gzip() { cat; }; echo plain >report", "plain\n"),
        ("echo begun | gzip -c >report.gz; echo torn >>report.gz; exit 3", "begun\n"),
        ("head -c 9000000 /dev/zero | tr '\\0' x | gzip -c >report.gz", "xxx"),
    ],
    ids=["not-packed", "interrupted", "long"],
)
def test_of_the_vendors_report_what_there_is(seeded: Host, script: str, end: str) -> None:
    seeded.file(BUG_REPORT, f"#!/bin/sh\n# A simulation.\n{script}\n", executable=True)
    seeded.runner.answers = InSandbox(seeded)
    report = written(seeded)["commands/nvidia-bug-report.sh"]
    assert report.endswith(end)
    assert len(report) <= bundle.FILE_LIMIT


def test_a_host_without_the_vendors_script_does_not_run_it(seeded: Host) -> None:
    files = written(seeded)
    assert sandboxed(seeded) == []
    assert "bug-report" not in files["left-out.txt"]


FORMS = json.loads((DATA / "secrets.json").read_text())


@pytest.mark.parametrize("frame", ["{}", "before\n{}\nafter", "2026-11-23T04:00:00Z host unit[1]: {}"])
def test_every_form_of_a_secret_is_removed(frame: str) -> None:
    """The secrets are made up. Lines around them stay."""
    assert len({each["text"] for each in FORMS}) == len(FORMS) >= 120
    for form in FORMS:
        found = redacted(frame.replace("{}", form["text"]))
        assert [each for each in form["secrets"] if each in found] == []
        assert REMOVED in found, form
        assert f"{REMOVED}]" not in found, form
        assert frame.startswith("{}") or found.startswith(frame[:6]), form
        assert not frame.endswith("after") or found.endswith("\nafter"), form


def test_what_helps_stays_readable() -> None:
    lines = (DATA / "readable.txt").read_text().splitlines()
    lines += [
        'bootstrap_token_file = "/etc/unbounded-agent/token"',
        "libcuda.so.550.163.01 => /usr/lib/x86_64-linux-gnu/libcuda.so.550.163.01",
        "GPU-5e1f0a8c-0000-4000-8000-000000000000 0000:01:00.0",
        "https://registry.example:5000/image@sha256:0123456789abcdef",
        "2026-11-23T04:00:00Z unbounded-agent[1]: pass ended",
    ]
    assert [redacted(line) for line in lines] == lines


def test_a_key_that_was_cut_off_is_removed_too() -> None:
    cut = KEY.partition("-----END")[0]
    assert redacted(f"{cut}\n{KEY}\nthe end") == f"{REMOVED}{REMOVED}\nthe end"
    line = 64 * "a"
    assert redacted(f"-----BEGIN PRIVATE KEY-----\n{line}\n{line}\nthe end") == f"{REMOVED}\nthe end"


@pytest.mark.parametrize(
    "part",
    [
        *("a", "password", "eyJ-", "a://", "token=", "-----BEGIN A-----", "-----BEGIN A-----\n", "-----END A-----\n"),
        *("a=", "--a ", "name: a\n", '\\"', 'token=\\"', "[removed]\n", "[removed]\naaaaaaaa\n", "<password>", "<a"),
        *("token: |\n a\n", "Authorization:", "aA1/", "-u a:", "x=[", "a:\n ", "password ", " \n", "LS0t", "login "),
        *("$6$a", ": password: ", f"{24 * 'a'}\n-----END A-----\n"),
    ],
)
def test_attack_no_text_takes_long(part: str) -> None:
    """Machines write into the logs. A word of 20 kB once took a minute, and one of 1 MB would have taken days."""
    started = time.process_time()
    redacted(part * (100_000 // len(part)))
    assert time.process_time() - started < 2


@pytest.mark.parametrize("text", ["-----BEGIN X-----\n{}!\n", "{}!\n-----END X-----\n"])
def test_attack_a_long_line_next_to_a_key_takes_no_time(text: str) -> None:
    """A word of 140 letters took five seconds, and each letter more took longer than all before it."""
    started = time.process_time()
    redacted(text.replace("{}", 100_000 * "a"))
    assert time.process_time() - started < 2
