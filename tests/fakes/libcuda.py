"""What libcuda answers a verification."""

import sys

from agent.vendors.nvidia.user_space import READ_VERSION
from tests.fakes.gpu_host import VERSION
from tests.fakes.host import Host

LIBCUDA = f"/usr/lib/x86_64-linux-gnu/nvidia/current/libcuda.so.{VERSION}"


def answer_of_libcuda(host: Host, text: str = "12040\n", status: int = 0) -> None:
    host.command(sys.executable, "-I", "-c", READ_VERSION, LIBCUDA, stdout=text, stderr="no\n" * status, status=status)
