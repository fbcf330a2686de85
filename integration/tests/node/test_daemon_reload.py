"""systemd reads its files again on the host and in the machine, and no GPU is unavailable even for a moment."""

import json
from collections.abc import Callable

import pytest

from integration.bed.machine.node import MACHINE, Pod
from integration.bed.measure.journal import messages
from integration.conftest import Bed

pytestmark = [pytest.mark.scenario("002"), pytest.mark.exhaustive]

RELOADS = 50
"""Reloads on each side."""
NOT_GRANTED = "/dev/nvidia-caps/nvidia-cap1"
LOOK = f"""
import collections, os, time
found = collections.Counter()
while not os.path.exists("/run/enough"):
    for path in ("/dev/nvidia0", "{NOT_GRANTED}"):
        try:
            os.close(os.open(path, os.O_RDONLY))
            found[path + " opened"] += 1
        except OSError as error:
            found[path + " " + error.strerror] += 1
    time.sleep(0.02)
print(*(f"{{number}} {{what}}" for what, number in sorted(found.items())), sep="\\n")
"""
# Generators take most of a reload under emulation.
MASK_GENERATORS = """
mkdir -p /run/systemd/system-generators
for each in /usr/lib/systemd/system-generators/*; do ln -s /dev/null /run/systemd/system-generators/${each##*/}; done
"""
RELOAD = f"for i in $(seq {RELOADS}); do systemctl daemon-reload || exit 1; done"
BOTH = f"""
systemd-run --machine={MACHINE} --quiet --wait --collect sh -c '{RELOAD.replace("$", "$$")}; systemctl daemon-reexec' &
{RELOAD}
wait $! && systemctl daemon-reexec
"""


def outcomes(bed: Bed) -> dict[str, int]:
    """Return how often each outcome happened to the program in the machine."""
    lines = messages(bed.node.run, "looking").splitlines()
    # The program's lines are between systemd's own lines about the unit.
    words = (line.partition(" ") for line in lines)
    return {what: int(number) for number, _, what in words if number.isdigit()}


def test_a_hundred_reloads(ready: Bed, measured: Callable[[str, object], None]) -> None:
    """A program in the machine and a pod open their GPU all the time.

    What is not granted may open for a moment at each of the host's reloads (docs/security.md), and not afterwards.
    """
    # Until the machine half's timer removes the node, only the unit's device policy blocks it.
    ready.run("machinectl", "--mkdir", "bind", MACHINE, NOT_GRANTED)
    loop = "while :; do gpu-probe /dev/nvidia0 /dev/nvidia1; echo; sleep 0.5; done"
    pod = ready.node.start_pod(Pod(("sh", "-c", loop), cdi=("0",)))
    ready.node.shell(MASK_GENERATORS)
    before = ready.starts()
    looking = ("systemd-run", "--quiet", "--unit=looking", "--property=Type=exec", "python3", "-c", LOOK)
    ready.node.run(*looking)
    ready.run("sh", "-c", BOTH, timeout=600)
    ready.node.shell("touch /run/enough; while systemctl --quiet is-active looking; do sleep 0.2; done")
    numbers = outcomes(ready)
    removed = numbers.pop(f"{NOT_GRANTED} No such file or directory", 0)
    measured("looked after the node was removed", removed)
    opened = numbers.pop(f"{NOT_GRANTED} opened", 0)
    measured("opened the node that is not granted", opened)
    assert opened <= RELOADS
    # Bound again, because the machine half has removed the node meanwhile.
    ready.run("machinectl", "--mkdir", "bind", MACHINE, NOT_GRANTED)
    refused = ready.node.run("head", "--bytes=0", NOT_GRANTED, check=False)
    assert "Operation not permitted" in refused.stderr, refused
    assert set(numbers) == {"/dev/nvidia0 opened", f"{NOT_GRANTED} Operation not permitted"}, numbers
    assert numbers["/dev/nvidia0 opened"] > RELOADS
    log = ready.node.run("crictl", "logs", pod).stdout
    in_pod = [json.loads(line)["open"] for line in log.splitlines()[:-1] if line.startswith("{")]
    assert len(in_pod) > RELOADS / 10
    assert all(each["/dev/nvidia0"] == "OK" and each["/dev/nvidia1"] != "OK" for each in in_pod)
    measured("restarted", ready.restarted(before))
    assert ready.restarted(before) == "nothing"
    measured("opened in the machine", numbers["/dev/nvidia0 opened"])
    measured("opened in the pod", len(in_pod))
