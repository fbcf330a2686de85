"""`python3 -m integration.bed`: boot a simulated GPU host and run the lines of standard input in it."""

import sys

from integration.bed.machine.machine_image import machines_disk
from integration.bed.vm.guest import GuestError
from integration.bed.vm.simulated_host import SimulatedHost


def main() -> None:
    with SimulatedHost(machines=machines_disk()) as host:
        print(f"simulated GPU host up, files in {host.directory}; one command a line, end with ctrl-D", flush=True)
        for line in sys.stdin:
            try:
                completed = host.guest.run(["bash", "-c", line], timeout=600, check=False)
            except GuestError as error:
                print(error, file=sys.stderr)
                continue
            print(f"{completed.stdout}{completed.stderr}[status {completed.status}]", flush=True)


if __name__ == "__main__":
    main()
