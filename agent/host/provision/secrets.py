"""Finds and reads secrets: files that only root may read, and systemd credentials (systemd.exec(5)).

No error, log or record contains a secret.
"""

import os
import re
import stat

from agent.model.errors import ConfigError
from agent.system.files import System
from agent.system.path_trust import settings_fault

CREDENTIAL = "credential:"
DIRECTORY = "CREDENTIALS_DIRECTORY"
"""The variable in which systemd names the directory of a service's credentials."""
TOKEN = re.compile(r"[a-z0-9]{6}\.[a-z0-9]{16}")
"""A bootstrap token (BootstrapTokenPattern in k8s.io/cluster-bootstrap)."""
LIMIT = 1 << 16
"""Bytes of the largest secret that is read. A bootstrap token has 23."""


def secret_file(where: str, system: System) -> str:
    """Return the path of a secret's file. `where` is that path, or `credential:NAME`.

    Raises ConfigError if the file cannot be read, or if others may have read or written it.
    """
    if where.startswith(CREDENTIAL):
        return _credential(where.removeprefix(CREDENTIAL), system)
    try:
        real = system.real_path(where)
        mode = system.owner(real)[0]
        fault = settings_fault(system, where)
    except OSError as error:
        raise ConfigError(f"{where}: cannot read this secret: {error.strerror}", f"write it to {where}") from error
    if fault:
        raise ConfigError(f"{where}: refused, because somebody else could have written this secret: {fault}")
    if not stat.S_ISREG(mode):
        raise ConfigError(f"{where}: not a regular file", "write the secret to a file of mode 0600")
    if mode & 0o077:
        raise ConfigError(
            f"{where}: refused, because users other than root may have access to this secret "
            f"(mode {stat.S_IMODE(mode):04o})",
            f"run `chmod 0600 {real}`, and replace the secret: others may have read it",
        )
    return real


def read_secret(where: str, system: System) -> str:
    """Return a secret without blanks and line breaks around it. Raises ConfigError."""
    path = secret_file(where, system)
    try:
        secret = system.read(path, LIMIT).decode().strip()
    except OSError as error:
        raise ConfigError(f"{where}: cannot read this secret: {error.strerror}") from error
    except UnicodeDecodeError:
        # Drop the cause, which contains the secret.
        raise ConfigError(f"{where}: this secret is not text") from None
    if not secret:
        raise ConfigError(f"{where}: the secret is empty", "write it there")
    return secret


def read_token(where: str, system: System) -> str:
    """Return a bootstrap token. Raises ConfigError if the secret cannot be read, or is not a bootstrap token."""
    token = read_secret(where, system)
    if not TOKEN.fullmatch(token):
        raise ConfigError(
            f"{where}: this is not a bootstrap token (6 characters, a dot, 16 characters)",
            "make one with `kubeadm token create`, and write it there",
        )
    return token


def _credential(name: str, system: System) -> str:
    directory = os.environ.get(DIRECTORY, "")
    if not directory:
        raise ConfigError(
            f"{CREDENTIAL}{name}: systemd has passed no credentials to this command",
            f"run `systemd-run --pipe --wait --property=LoadCredential={name}:FILE unbounded-agent up`",
        )
    path = f"{directory}/{name}"
    if name in (".", "..") or not system.is_file(path):
        raise ConfigError(
            f"{CREDENTIAL}{name}: there is no such credential",
            f"add LoadCredential={name}:FILE to the unit that runs this command",
        )
    return path
