"""`python3 -m agent.dra`: offers the machine's GPUs by Dynamic Resource Allocation (unbounded-agent-dra.service)."""

import logging
import os
import signal
import sys

from agent.dra.service import Service
from agent.model.errors import AgentError
from agent.system.files import System
from agent.system.journal import ERROR, INFO, WARNING, say
from agent.system.process import host_runner


class Journal(logging.Handler):
    """Writes lines with priorities for the journal."""

    def emit(self, record: logging.LogRecord) -> None:
        important = ERROR if record.levelno >= logging.ERROR else WARNING
        say(important if record.levelno >= logging.WARNING else INFO, self.format(record))


def main() -> int:
    """Run the service until SIGTERM, an error, or a change of the kubelet's identity. Return the exit code.

    When the process has ended, systemd starts the unit again, whatever the exit code, unless somebody stopped the unit.
    """
    os.chdir("/")
    logging.basicConfig(level=logging.INFO, handlers=[Journal()], format="%(message)s")
    service = Service(System(host_runner))
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop())
    try:
        service.run()
    except (AgentError, OSError) as error:
        say(ERROR, str(error))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
