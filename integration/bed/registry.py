"""A container registry outside the virtual machine: Debian's docker-registry."""

import base64
import json
import shutil
import ssl
import subprocess
import urllib.error
import urllib.request
from http import HTTPStatus
from pathlib import Path

from integration.bed import debian
from integration.bed.cache import cached
from integration.bed.cluster.certificates import Certificates
from integration.bed.free_ports import free_ports
from integration.bed.lifetime import Lifetime
from integration.bed.machine.buildah import buildah
from integration.bed.process import run
from integration.bed.run_directory import run_directory
from integration.bed.vm.transfer import HOST_FROM_GUEST
from integration.bed.waiting import wait

USER = "puller"
PASSWORD = "correct-horse"
SECONDS = 30.0


class Registry(Lifetime):
    """A registry on 127.0.0.1, which the simulated host reaches as 10.0.2.2.

    With `tls`, its certificate is from a CA of its own. With `login`, only USER with PASSWORD may pull and push.
    """

    def __init__(self, *, tls: bool = True, login: bool = False) -> None:
        self._tls, self._login = tls, login
        self.directory = run_directory("registry")
        (self.port,) = free_ports(1)
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        if self._tls:
            Certificates(self.directory).serving("registry", ["127.0.0.1", HOST_FROM_GUEST], ["localhost"])
        configuration = self.directory / "config.json"
        configuration.write_text(json.dumps(self._configuration()))
        argv = ["setpriv", "--pdeathsig", "KILL", str(docker_registry()), "serve", str(configuration)]
        with (self.directory / "log").open("wb") as log:
            self._process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        wait("docker-registry answers", self._answers, SECONDS, lambda: (self.directory / "log").read_text()[-2000:])

    def close(self) -> None:
        """Stop the registry and remove everything that it stored."""
        if self._process:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def url(self, address: str = "127.0.0.1") -> str:
        """Return the registry's URL for clients that reach it at `address`."""
        return f"{'https' if self._tls else 'http'}://{address}:{self.port}"

    @property
    def authority(self) -> bytes:
        """Return the certificate of the registry's own CA, in PEM."""
        return (self.directory / "ca.crt").read_bytes()

    def name(self, repository: str, tag: str = "latest", address: str = "127.0.0.1") -> str:
        """Return an image's name for clients that reach the registry at `address`."""
        return f"{address}:{self.port}/{repository}:{tag}"

    def push(self, image: str, repository: str, tag: str = "latest") -> str:
        """Push an image from buildah's storage, and return the digest of its manifest."""
        digest_file = self.directory / "digest"
        options = [f"--digestfile={digest_file}"]
        options.append(f"--cert-dir={self.client_directory()}" if self._tls else "--tls-verify=false")
        if self._login:
            options.append(f"--creds={USER}:{PASSWORD}")
        buildah("push", "--quiet", *options, image, f"docker://{self.name(repository, tag)}")
        return digest_file.read_text()

    def copy(self, source: str, repository: str, tag: str = "latest") -> str:
        """Copy an image from any transport (containers-transports(5)) with all architectures; return its digest."""
        digest_file = self.directory / "digest"
        options = ["--all", "--quiet", f"--digestfile={digest_file}"]
        options.append(f"--dest-cert-dir={self.client_directory()}" if self._tls else "--dest-tls-verify=false")
        if self._login:
            options.append(f"--dest-creds={USER}:{PASSWORD}")
        name = f"docker://{self.name(repository, tag)}"
        run(["skopeo", "--insecure-policy", "copy", *options, source, name])
        return digest_file.read_text()

    def client_directory(self) -> Path:
        """Return a directory for `--cert-dir`: every file in it that ends in .crt is a CA."""
        directory = self.directory / "client"
        directory.mkdir(exist_ok=True)
        shutil.copy(self.directory / "ca.crt", directory)
        return directory

    def _configuration(self) -> dict[str, object]:
        """Return docker-registry's configuration (distribution's configuration reference); JSON is valid YAML."""
        http: dict[str, object] = {"addr": f"127.0.0.1:{self.port}"}
        if self._tls:
            files = {"certificate": "registry.crt", "key": "registry.key"}
            http["tls"] = {name: str(self.directory / file) for name, file in files.items()}
        configuration: dict[str, object] = {
            "version": "0.1",
            "log": {"level": "warn"},
            "storage": {"filesystem": {"rootdirectory": str(self.directory / "storage")}},
            "http": http,
        }
        if self._login:
            passwords = self.directory / "htpasswd"
            passwords.write_text(run(["htpasswd", "-Bbn", USER, PASSWORD]))
            configuration["auth"] = {"htpasswd": {"realm": "bed", "path": str(passwords)}}
        return configuration

    def _answers(self) -> bool:
        context = ssl.create_default_context(cafile=str(self.directory / "ca.crt")) if self._tls else None
        try:
            urllib.request.urlopen(f"{self.url()}/v2/", context=context, timeout=5).close()
        except urllib.error.HTTPError as error:
            return error.code == HTTPStatus.UNAUTHORIZED
        except OSError:
            return False
        return True


def docker_registry() -> Path:
    """Return Debian's program. Its package is only unpacked: installing it would start a service."""

    def build(output: Path) -> None:
        debian.debian_tree(output / "root", "extract", ["docker-registry"])

    return cached("docker-registry", [Path(__file__), Path(debian.__file__)], build) / "root/usr/bin/docker-registry"


def credentials(registry: Registry, address: str) -> bytes:
    """Return the login in the format of containers-auth.json(5), for clients that reach the registry at `address`."""
    login = base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode()
    return json.dumps({"auths": {f"{address}:{registry.port}": {"auth": login}}}).encode()
