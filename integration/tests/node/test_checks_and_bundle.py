"""What a person adds to a host and takes from it: own checks, and an archive with the vendor's report."""

import io
import json
import tarfile
from collections.abc import Callable
from typing import Any

import pytest

from integration.bed.waiting import wait
from integration.conftest import Bed

pytestmark = pytest.mark.scenario("002")

CHECK = "/etc/unbounded-agent/checks.d/ScratchMounted"
RESULTS, SECRET = "/run/unbounded-agent/checks.json", "hunter2-Xq9"
# Says what a check may do. It fails.
LOOK = f"""#!/bin/sh
rights=$(sed -n 's/^CapEff:[[:space:]]*0*//p' /proc/self/status)
for path in /etc /usr /run /run/unbounded-agent /var/lib/unbounded-agent; do
    touch $path/own-check 2>/dev/null && wrote="$wrote $path"
done
echo x 2>/dev/null >{RESULTS} && wrote="$wrote results"
cat /etc/shadow >/dev/null 2>&1 && wrote="$wrote shadow"
test "$(id -u)" -ne 0 && user="no root"
networks=$(sed -n 's/:.*//p' /proc/net/dev | tr -d ' \n')
(exec 3<>/dev/nvidia0) 2>/dev/null && gpu=opened
echo "$user, rights: ${{rights:-none}}, wrote:${{wrote:- nothing}}, networks: $networks, GPU: $gpu"
echo "a second line"
exit 1
"""
# Stands in for NVIDIA's program: the report has a secret, and whether a GPU could be opened or a module be loaded.
BUG_REPORT = f"""#!/bin/sh
test "$1 $2" = "--safe-mode --output-file" || exit 9
echo "nvidia-bug-report.sh will now collect information"
{{
    echo "*** arguments: $*"
    echo "ngc registry login --password {SECRET} nvcr.io"
    for node in /dev/nvidia0 /dev/nvidiactl; do
        (exec 3<>$node) 2>/dev/null && echo "$node opened" || echo "$node refused"
    done
    modprobe loop 2>/dev/null && echo "module loaded" || echo "no module loaded"
    touch /etc/bug-report 2>/dev/null && echo "wrote /etc" || echo "/etc is read-only"
    dmesg >/dev/null 2>&1 && echo "kernel log read"
}} >$3
gzip $3
"""


def checked(bed: Bed) -> dict[str, Any]:
    """Return the check's condition, as `status --json` has it."""
    found = json.loads(bed.agent("status", "--json", check=False).stdout)["checks"]
    return next((each for each in found if each["type"] == "ScratchMounted"), {"status": "none"})


def becomes(bed: Bed, status: str, reason: str) -> Callable[[], bool]:
    series = f'unbounded_agent_host_check{{check="ScratchMounted",reason="{reason}",status="{status}"}} 1'
    return lambda: series in bed.page("/metrics")


def test_a_check_becomes_a_condition_and_has_no_rights(ready: Bed, measured: Callable[[str, object], None]) -> None:
    """The timer runs it, although there was none when the service started."""
    at_start = ready.starts()
    ready.guest.write(CHECK, LOOK.encode(), 0o755)
    wait("the service has seen the check fail", becomes(ready, "False", "CheckFailed"), 240, ready.evidence)
    found = checked(ready)
    assert (found["status"], found["reason"]) == ("False", "CheckFailed")
    assert found["message"] == "no root, rights: none, wrote: nothing, networks: lo, GPU: opened"
    assert "ScratchMounted" in ready.agent("status", check=False).stdout
    assert ready.wait_ready()["Ready"]["reason"] == "AllConditionsTrue", "no machine needs it"
    ready.guest.write(CHECK, b"#!/bin/sh\necho mounted\n", 0o755)
    wait("it passes", becomes(ready, "True", "CheckPassed"), 240, ready.evidence)
    # Whoever may change a check may not make it run.
    ready.run("chown", "nobody", CHECK)
    wait("it must not run", becomes(ready, "Unknown", "CheckBroken"), 240, ready.evidence)
    assert "must not run" in checked(ready)["message"]
    assert ready.restarted(at_start) == "nothing"
    measured(
        "memory peak of the checks",
        ready.run(
            "systemctl", "show", "--value", "--property=MemoryPeak", "unbounded-agent-checks.service"
        ).stdout.strip(),
    )


def test_the_bundle_has_the_vendors_report_without_secrets_and_without_a_gpu(ready: Bed) -> None:
    ready.guest.write("/usr/bin/nvidia-bug-report.sh", BUG_REPORT.encode(), 0o755)
    ready.agent("doctor", "--bundle", "/root/bundle.tar.gz", timeout=400)
    with tarfile.open(fileobj=io.BytesIO(ready.guest.read("/root/bundle.tar.gz"))) as archive:
        names = archive.getnames()
        member = archive.extractfile("unbounded-agent/commands/nvidia-bug-report.sh")
        assert member is not None, names
        report = member.read().decode()
        texts = [(archive.extractfile(each) or io.BytesIO()).read() for each in names]
    assert report.startswith("*** arguments: --safe-mode --output-file report\n")
    assert SECRET.encode() not in b"".join(texts)
    assert "ngc registry login --password" in report
    for line in ("/dev/nvidia0 refused", "/dev/nvidiactl refused", "no module loaded", "/etc is read-only"):
        assert f"{line}\n" in report
    assert "kernel log read" in report
