"""A simulated fleet: bare Debian roots as hosts, without systemd as PID 1, and one root with Ansible to manage them."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from integration.bed.cache import REPOSITORY
from integration.bed.packages import ENTER, ENVIRONMENT, Root, debian_root
from integration.bed.process import run

CONTROLLER = ("ansible-core",)
SSH = f"""#!/bin/sh
# Instead of ssh(1), whose last arguments are a host and a command: run the command in the host's root.
while [ $# -gt 2 ]; do shift; done
exec unshare --mount --pid --fork --kill-child sh -c '{ENTER}' "/hosts/$1" {" ".join(ENVIRONMENT)} sh -c "$2"
"""
SETTINGS = (
    *("ANSIBLE_SSH_TRANSFER_METHOD=piped", "ANSIBLE_SSH_ARGS=", "ANSIBLE_NOCOLOR=1", "ANSIBLE_LOCALHOST_WARNING=False"),
    *("ANSIBLE_SSH_EXECUTABLE=/usr/local/bin/ssh-to-root", "ANSIBLE_PYTHON_INTERPRETER=/usr/bin/python3"),
)
PLAYBOOKS = "/srv/ansible"


class Fleet:
    """Hosts by their names, and a computer that has the repository's playbook."""

    def __init__(self, controller: Root, hosts: dict[str, Root]) -> None:
        """Use roots that `fleet` has made. It has mounted those of the hosts below the controller's /hosts."""
        self.controller = controller
        self.hosts = hosts

    def playbook(self, *arguments: str, **variables: str) -> str:
        """Run the playbook, as root on the hosts, and return its output. Raises CommandError with the output's end."""
        extra = [f"--extra-vars={name}={value}" for name, value in {"ansible_become": "false", **variables}.items()]
        command = ["ansible-playbook", "--inventory=/srv/inventory.yml", f"{PLAYBOOKS}/site.yml", *extra, *arguments]
        return self.controller.run("env", *SETTINGS, *command)


@contextmanager
def fleet(names: Sequence[str], suite: str = "trixie") -> Iterator[Fleet]:
    """Yield a fleet of these hosts. Changes are lost at the end."""
    with ExitStack() as stack:
        controller = stack.enter_context(debian_root("trixie", *CONTROLLER))
        ssh = controller.path / "usr/local/bin/ssh-to-root"
        ssh.write_text(SSH)
        ssh.chmod(0o755)
        run(["cp", "-r", REPOSITORY / "deploy/ansible", controller.path / PLAYBOOKS.strip("/")])
        hosts = {}
        for name in names:
            hosts[name] = stack.enter_context(debian_root(suite))
            place = controller.path / "hosts" / name
            place.mkdir(parents=True)
            run(["mount", "--bind", hosts[name].path, place])
            stack.callback(run, ["umount", place])
        lines = "".join(f"    {name}:\n" for name in names)
        (controller.path / "srv/inventory.yml").write_text(f"gpu_hosts:\n  hosts:\n{lines}")
        yield Fleet(controller, hosts)


def put(root: Root, source: Path) -> str:
    """Copy a file into a root's /srv and return its path there."""
    run(["cp", source, root.path / "srv"])
    return f"/srv/{source.name}"
