"""The keys and certificates of a Kubernetes control plane, made by openssl(1) for one run."""

from collections.abc import Sequence
from pathlib import Path

from integration.bed.process import Argument, run

# An elliptic-curve key takes milliseconds; an RSA key takes seconds.
ALGORITHM = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
DAYS = "30"
AUTHORITY = "bed-ca"


class Certificates:
    """A certificate authority (ca.crt, ca.key), made on construction. All files are in `directory`."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._openssl(
            "req", "-x509", *ALGORITHM, "-days", DAYS, "-subj", f"/CN={AUTHORITY}",
            "-addext", "keyUsage=critical,keyCertSign,digitalSignature",
            "-keyout", self._file("ca.key"), "-out", self._file("ca.crt"),
        )  # fmt: skip

    def serving(self, name: str, addresses: Sequence[str], names: Sequence[str]) -> None:
        """Write NAME.crt and NAME.key of a server that clients reach under these IP addresses and host names."""
        subjects = [*(f"IP:{address}" for address in addresses), *(f"DNS:{each}" for each in names)]
        self._signed(name, f"/CN={names[0]}", "serverAuth", f"subjectAltName={','.join(subjects)}")

    def client(self, name: str, user: str, group: str) -> None:
        """Write NAME.crt and NAME.key of a client. Kubernetes reads the user from CN and the group from O."""
        self._signed(name, f"/O={group}/CN={user}", "clientAuth")

    def key(self, name: str) -> None:
        """Write NAME.key and its public half, NAME.pub."""
        self._openssl("genpkey", "-algorithm", "EC", *ALGORITHM[2:4], "-out", self._file(f"{name}.key"))
        self._openssl("pkey", "-in", self._file(f"{name}.key"), "-pubout", "-out", self._file(f"{name}.pub"))

    def _signed(self, name: str, subject: str, usage: str, *extensions: str) -> None:
        self._openssl(
            "req", "-x509", *ALGORITHM, "-days", DAYS, "-subj", subject,
            "-CA", self._file("ca.crt"), "-CAkey", self._file("ca.key"),
            "-addext", "basicConstraints=critical,CA:FALSE", "-addext", f"extendedKeyUsage={usage}",
            *(word for extension in extensions for word in ("-addext", extension)),
            "-keyout", self._file(f"{name}.key"), "-out", self._file(f"{name}.crt"),
        )  # fmt: skip

    def _file(self, name: str) -> Path:
        return self._directory / name

    def _openssl(self, *arguments: Argument) -> None:
        run(["openssl", *arguments])
