"""Fetch the service's HTTP pages on the host, by bash, because Python takes long to start on the emulated processor."""

from dataclasses import dataclass

from integration.bed.vm.guest import Guest

SCRIPT = r'exec 3<>/dev/tcp/127.0.0.1/9788 && printf "GET %s HTTP/1.0\r\n\r\n" "$1" >&3 && cat <&3'


@dataclass(frozen=True)
class Answer:
    """An HTTP answer. The status is 0 if there was none, because the service does not listen."""

    status: int
    body: str


def get(guest: Guest, path: str) -> Answer:
    """Return the answer for a path such as `/readyz?verbose`."""
    head, _, body = guest.run(["bash", "-c", SCRIPT, "bash", path], check=False).stdout.partition("\r\n\r\n")
    return Answer(int(head.split()[1]) if head else 0, body)
