"""nvidia-smi as `gpus reset` runs it, simulated.

What it prints is from 550.163.01; that it exits with 255 is from NVSentinel's issue 1690 and nvidia-smi(1).
"""

from collections.abc import Callable
from pathlib import Path

from agent.system.process import Completed, TimeLimitError
from tests.fakes.detach_site import Site
from tests.fakes.host import UnexpectedError
from tests.fakes.processes import process

FIRST, SECOND = "0000:01:00.0", "0000:02:00.0"
DAEMON = 900
IN_USE = """\
The following GPUs could not be reset:
  GPU 00000000:02:00.0: In use by another client

1 device is currently being used by one or more other processes (e.g., Fabric Manager, CUDA application, graphics \
application such as an X server, or a monitoring application such as another instance of nvidia-smi). Please first \
kill all processes using this device and all compute applications running in the system.
"""
LINKED = """\
GPU Reset couldn't progress because the specified devices do not meet the reset criterion (e.g. NVLink connected GPUs \
must be reset together). Please append the following device indexes to the command line and retry.
"""


class Smi:
    """nvidia-smi with nvidia-persistenced, which keeps a GPU open while its persistence mode is on."""

    def __init__(self, site: Site) -> None:
        self.host, self.calls = site.host, list[str]()
        self.persistent = {FIRST: True, SECOND: True}
        self.refusal = ""
        """What a reset prints instead."""
        self.linked = False
        self.lost = False
        """After a reset, the GPU does not answer."""
        self.hangs = ""
        """A part of the command that hangs."""
        self.before: Callable[[int], None] = lambda call: None
        """Called with the number of the call, before nvidia-smi does anything."""
        self.after: Callable[[int], None] = lambda call: None
        self.descriptors = process(
            Path(site.host.root), DAEMON, opened=("/dev/nvidia0", "/dev/nvidia1"), command=b"nvidia-persiste"
        ).joinpath(f"task/{DAEMON}/fd")
        site.host.program_runner = self.run

    def run(self, argv: tuple[str, ...], timeout: float) -> Completed:
        if argv[0] != "nvidia-smi":
            return self.host.runner(argv, timeout)
        assert timeout <= 120
        self.calls.append(" ".join(argv[1:]))
        if self.hangs and self.hangs in self.calls[-1]:
            raise TimeLimitError
        self.before(len(self.calls))
        status, printed = self._answer(argv[1:])
        self.after(len(self.calls))
        return Completed(status, printed.encode(), b"")

    def _answer(self, words: tuple[str, ...]) -> tuple[int, str]:
        match words:
            case ("-i", gpu, "--query-gpu=persistence_mode", "--format=csv,noheader"):
                return 0, "Enabled\n" if self.persistent[gpu] else "Disabled\n"
            case ("-i", gpu, "--query-gpu=pci.bus_id,name", "--format=csv,noheader"):
                lost = (15, f"Unable to determine the device handle for GPU{gpu}: GPU is lost.\n")
                return lost if self.lost else (0, f"0000{gpu.upper()}, NVIDIA H100 80GB HBM3\n")
            case ("--query-gpu=index,pci.bus_id", "--format=csv,noheader"):
                return 0, f"0, 0000{FIRST}\n1, 0000{SECOND}\n"
            case ("-i", gpu, "-pm", mode):
                self._keep(gpu, mode == "1")
                return 0, "All done.\n"
            case ("--gpu-reset", "-i", gpus):
                return self._reset(gpus.split(","))
            case _:
                raise UnexpectedError(words)

    def _keep(self, gpu: str, on: bool) -> None:
        descriptor = self.descriptors / ("1" if gpu == FIRST else "2")
        descriptor.unlink(missing_ok=True)
        if on:
            descriptor.symlink_to("/dev/nvidia0" if gpu == FIRST else "/dev/nvidia1")
        self.persistent[gpu] = on

    def _reset(self, gpus: list[str]) -> tuple[int, str]:
        if self.refusal:
            return 255, self.refusal
        if self.linked and len(gpus) < 2:
            return 255, f"{LINKED}{int(gpus == [FIRST])}\n"
        if any(self.persistent[gpu] for gpu in gpus):
            return 255, IN_USE
        return 0, "".join(f"GPU 0000{gpu} was successfully reset.\n" for gpu in gpus) + "All done.\n"
