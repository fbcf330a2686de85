"""Secrets come from files that only root may read, and no message repeats one."""

import pytest

from agent.host.provision.node_files import read_token, secret_file
from agent.model.errors import ConfigError
from tests.fakes.host import Host
from tests.fakes.node_settings import TOKEN, TOKEN_FILE

DIRECTORY = "/etc/unbounded-agent"


@pytest.fixture
def secret(host: Host) -> Host:
    host.file(TOKEN_FILE, f"{TOKEN}\n")
    host.owners[TOKEN_FILE] = (0o600, 0)
    return host


@pytest.mark.parametrize(
    ("path", "mode", "user", "why"),
    [
        (TOKEN_FILE, 0o640, 0, r"users other than root may have access to it \(mode 0640\)"),
        (TOKEN_FILE, 0o604, 0, "run `chmod 0600"),
        (TOKEN_FILE, 0o600, 1000, "belongs to user 1000"),
        (TOKEN_FILE, 0o620, 0, "somebody else could have written"),
        (DIRECTORY, 0o777, 0, f"users other than root can write to {DIRECTORY}"),
    ],
)
def test_a_file_that_others_can_use_is_refused(secret: Host, path: str, mode: int, user: int, why: str) -> None:
    secret.owners[path] = (mode, user)
    with pytest.raises(ConfigError, match=why) as caught:
        read_token(TOKEN_FILE, secret)
    assert TOKEN not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (b" \n", "this is not a bootstrap token"),
        (b"s3cret\xff", "this is not a bootstrap token"),
        (b"abcdef", "this is not a bootstrap token"),
        (b"abcdef.0123456789ABCDEF", "this is not a bootstrap token"),
        (f"{TOKEN}\n{TOKEN}".encode(), "this is not a bootstrap token"),
        (None, f"{TOKEN_FILE}: cannot read this secret: No such file"),
    ],
)
def test_what_is_not_a_token_is_not_repeated(secret: Host, content: bytes | None, why: str) -> None:
    secret.remove_file(TOKEN_FILE)
    if content is not None:
        secret.file(TOKEN_FILE, content)
    with pytest.raises(ConfigError, match=why) as caught:
        read_token(TOKEN_FILE, secret)
    assert not content or not content.strip() or content.decode(errors="replace") not in str(caught.value)
    assert "s3cret" not in f"{caught.value} {caught.value.__cause__}"


def test_a_directory_is_no_secret(host: Host) -> None:
    host.make_directory(TOKEN_FILE)
    host.owners[TOKEN_FILE] = (0o700, 0)
    with pytest.raises(ConfigError, match="not a regular file"):
        secret_file(TOKEN_FILE, host)


def test_a_credential_of_systemd(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", "/run/credentials/up.service")
    host.file("/run/credentials/up.service/token", TOKEN)
    assert read_token("credential:token", host) == TOKEN
    for name in ("other", ".."):
        with pytest.raises(ConfigError, match="has not passed this credential"):
            read_token(f"credential:{name}", host)
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")
    with pytest.raises(ConfigError, match="LoadCredential=token:FILE"):
        read_token("credential:token", host)
