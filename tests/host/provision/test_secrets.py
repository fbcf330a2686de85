"""Secrets come from files that only root may read, and no message repeats one."""

import pytest

from agent.host.provision.node_files import read_secret, read_token, secret_file
from agent.model.errors import ConfigError
from tests.fakes.host import Host
from tests.fakes.node_settings import TOKEN, TOKEN_FILE


@pytest.fixture
def secret(host: Host) -> Host:
    host.file(TOKEN_FILE, f"{TOKEN}\n")
    host.owners[TOKEN_FILE] = (0o600, 0)
    return host


def test_a_private_file_of_root_is_read(secret: Host) -> None:
    assert read_secret(TOKEN_FILE, secret) == TOKEN


@pytest.mark.parametrize(
    ("mode", "user", "why"),
    [
        (0o640, 0, "users other than root may have access to this secret (mode 0640)"),
        (0o604, 0, "run `chmod 0600"),
        (0o600, 1000, "belongs to user 1000"),
        (0o620, 0, "somebody else could have written"),
    ],
)
def test_a_file_that_others_can_use_is_refused(secret: Host, mode: int, user: int, why: str) -> None:
    secret.owners[TOKEN_FILE] = (mode, user)
    with pytest.raises(ConfigError) as caught:
        read_secret(TOKEN_FILE, secret)
    assert why in str(caught.value)
    assert TOKEN not in str(caught.value)


def test_a_file_in_a_directory_of_others_is_refused(secret: Host) -> None:
    secret.owners["/etc/unbounded-agent"] = (0o777, 0)
    with pytest.raises(ConfigError, match="users other than root can write to /etc/unbounded-agent"):
        read_secret(TOKEN_FILE, secret)


def test_a_missing_or_empty_file(secret: Host) -> None:
    with pytest.raises(ConfigError, match="/etc/no: cannot read this secret: No such file"):
        read_secret("/etc/no", secret)
    secret.file(TOKEN_FILE, " \n")
    with pytest.raises(ConfigError, match="the secret is empty"):
        read_secret(TOKEN_FILE, secret)


def test_what_is_not_text_is_refused_without_its_content(secret: Host) -> None:
    secret.file(TOKEN_FILE, b"s3cret\xff")
    with pytest.raises(ConfigError, match="is not text") as caught:
        read_secret(TOKEN_FILE, secret)
    assert caught.value.__cause__ is None
    assert "s3cret" not in str(caught.value)


def test_a_directory_is_no_secret(secret: Host) -> None:
    secret.file("/etc/unbounded-agent/logins/a")
    secret.owners["/etc/unbounded-agent/logins"] = (0o700, 0)
    with pytest.raises(ConfigError, match="not a regular file"):
        secret_file("/etc/unbounded-agent/logins", secret)


def test_a_credential_of_systemd(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", "/run/credentials/up.service")
    host.file("/run/credentials/up.service/token", TOKEN)
    assert read_secret("credential:token", host) == TOKEN
    with pytest.raises(ConfigError, match="there is no such credential"):
        read_secret("credential:other", host)
    with pytest.raises(ConfigError, match="there is no such credential"):
        read_secret("credential:..", host)
    monkeypatch.delenv("CREDENTIALS_DIRECTORY")
    with pytest.raises(ConfigError, match="LoadCredential=token:FILE"):
        read_secret("credential:token", host)


@pytest.mark.parametrize("token", ["abcdef", "abcdef.0123456789ABCDEF", f"{TOKEN}\n{TOKEN}"])
def test_what_is_not_a_token_is_not_repeated(secret: Host, token: str) -> None:
    assert read_token(TOKEN_FILE, secret) == TOKEN
    secret.file(TOKEN_FILE, token)
    with pytest.raises(ConfigError, match="this is not a bootstrap token") as caught:
        read_token(TOKEN_FILE, secret)
    assert token not in str(caught.value)
