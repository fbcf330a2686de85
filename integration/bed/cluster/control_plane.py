"""A Kubernetes control plane outside the virtual machine: etcd, API server, controller-manager and scheduler.

All listen on 127.0.0.1. The simulated host reaches the API server as 10.0.2.2 (QEMU's user-mode network), and the
API server reaches a node's kubelet under the node's name, at the port that QEMU forwards.
"""

import base64
import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Callable, Iterable
from pathlib import Path

from integration.bed.cache import step
from integration.bed.cluster.certificates import Certificates
from integration.bed.cluster.kubernetes import RELEASE, kubernetes
from integration.bed.free_ports import free_ports
from integration.bed.lifetime import Lifetime
from integration.bed.process import Argument, CommandError, run
from integration.bed.run_directory import run_directory
from integration.bed.vm.transfer import HOST_FROM_GUEST
from integration.bed.waiting import wait

SERVICE_NETWORK = "10.96.0.0/16"
SERVICE_ADDRESS = "10.96.0.1"
SECONDS = 120.0
ADMIN = "admin"
CONTROLLER_MANAGER = "system:kube-controller-manager"
SCHEDULER = "system:kube-scheduler"
APPROVAL = "system:certificates.k8s.io:certificatesigningrequests"
BOOTSTRAP_ROLES = (
    ("bed-ask", "system:node-bootstrapper", "system:bootstrappers"),
    ("bed-approve", f"{APPROVAL}:nodeclient", "system:bootstrappers"),
    ("bed-renew", f"{APPROVAL}:selfnodeclient", "system:nodes"),
)
"""For each ClusterRoleBinding its name, its role and its group."""
CERTIFICATE_FILES = {"client-certificate": "crt", "client-key": "key"}
"""Keys of a user in a kubeconfig, and the suffixes of the files that they name."""
API_SERVER = "kube-apiserver"
CLUSTER_LIMIT = 900.0
"""Seconds for all that may hang: each kubectl, which may wait itself (`kubectl delete`), and each wait of a test."""


class ControlPlaneError(Exception):
    """A part of the control plane exited or does not answer; the text has the end of its log."""


def node_user(node: str) -> str:
    """Return the user name by which the Node authorizer knows a kubelet."""
    return f"system:node:{node}"


class ControlPlane(Lifetime):
    """A control plane; kubelets may register under the names in `nodes`.

    Without `controllers`, the scheduler does not run either, and a Node changes only when somebody writes it.
    `release` is one that integration.bed.cluster.kubernetes builds.
    """

    def __init__(self, nodes: Iterable[str], *, controllers: bool = True, release: str = RELEASE) -> None:
        self._controllers = controllers
        self.directory = run_directory("control-plane")
        self.nodes = tuple(nodes)
        self.port, self._etcd, self._etcd_peers = free_ports(3)
        self.binaries = kubernetes(release)
        self._groups = {ADMIN: "system:masters", CONTROLLER_MANAGER: "", SCHEDULER: ""}
        self._groups |= {node_user(node): "system:nodes" for node in self.nodes}
        self._tokens = {user: secrets.token_hex(16) for user in self._groups}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self) -> None:
        self._write_files()
        with step("start the Kubernetes control plane"):
            self._run("etcd", *self._etcd_arguments())
            self.start_api_server()
            if self._controllers:
                self._start_controllers()

    def close(self) -> None:
        """Stop every part and remove all files that they wrote."""
        for process in reversed(self._processes.values()):
            process.kill()
            process.wait()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _start_controllers(self) -> None:
        # Not before the API server is ready: both exit if it rejects them.
        for name, user, options in (
            ("kube-controller-manager", CONTROLLER_MANAGER, self._controller_options()),
            ("kube-scheduler", SCHEDULER, []),
        ):
            kubeconfig = self.write_kubeconfig(user, self.directory / f"{name}.kubeconfig")
            self._run(name, f"--kubeconfig={kubeconfig}", "--leader-elect=false", "--secure-port=0", *options)

    def start_api_server(self) -> None:
        """Start the API server, and wait until it is ready."""
        self._run(API_SERVER, *self._api_server_arguments(), wrapper=self._with_node_names())
        self._wait_ready()

    def stop_api_server(self) -> None:
        """Kill the API server: for a node, this is an outage. The other parts keep running."""
        process = self._processes.pop(API_SERVER)
        process.kill()
        process.wait()

    @property
    def certificate_authority(self) -> str:
        """Return the certificate of the cluster's authority, in PEM."""
        return (self.directory / "ca.crt").read_text()

    def kubeconfig(self, user: str = ADMIN, address: str = "127.0.0.1") -> str:
        """Return a kubeconfig of `user`; `address` is where its reader finds the API server."""
        cluster = {
            "server": f"https://{address}:{self.port}",
            "certificate-authority-data": _base64(self.certificate_authority),
        }
        content = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "bed", "cluster": cluster}],
            "users": [{"name": user, "user": {"token": self._tokens[user]}}],
            "contexts": [{"name": "bed", "context": {"cluster": "bed", "user": user}}],
            "current-context": "bed",
        }
        return json.dumps(content)

    def kubelet_kubeconfig(self, node: str) -> str:
        """Return a kubeconfig for use on this computer, with the client certificate of a node's kubelet."""
        content = json.loads(self.kubeconfig(node_user(node)))
        files = {key: str(self.directory / f"kubelet-{node}.{end}") for key, end in CERTIFICATE_FILES.items()}
        content["users"][0]["user"] = files
        return json.dumps(content)

    def write_kubeconfig(self, user: str, path: Path) -> Path:
        """Write a kubeconfig of `user` for use on this computer, readable only by the file's owner; return its path."""
        _write_private(path, self.kubeconfig(user))
        return path

    def kubectl(self, *arguments: Argument, stdin: str = "", user: str = ADMIN) -> str:
        """Run one kubectl command and return its standard output. Raises CommandError with what it printed."""
        path = self.directory / f"{user.replace(':', '-')}.kubeconfig"
        if not path.exists():
            self.write_kubeconfig(user, path)
        options = [f"--kubeconfig={path}", f"--cache-dir={self.directory / 'kubectl'}"]
        return run([self.binaries / "kubectl", *options, *arguments], stdin=stdin, timeout=CLUSTER_LIMIT)

    def bootstrap_token(self, valid_until: str = "2099-01-01T00:00:00Z") -> str:
        """Make a token with which kubelets join, as `kubeadm token create` does, and return it.

        Kubernetes' documentation ("Authenticating with Bootstrap Tokens", "TLS bootstrapping") lists the Secret's keys,
        and the roles that let kubelets ask for a certificate, get it without a person's approval, and replace it in
        time.
        """
        name, secret = secrets.token_hex(3), secrets.token_hex(8)
        data = {"token-id": name, "token-secret": secret, "expiration": valid_until}
        data |= {"usage-bootstrap-authentication": "true", "auth-extra-groups": "system:bootstrappers:bed"}
        token = {
            "apiVersion": "v1",
            "kind": "Secret",
            "type": "bootstrap.kubernetes.io/token",
            "metadata": {"name": f"bootstrap-token-{name}", "namespace": "kube-system"},
            "stringData": data,
        }
        roles = [_role_binding(*each) for each in BOOTSTRAP_ROLES]
        self.kubectl("apply", "-f", "-", stdin="\n---\n".join(json.dumps(each) for each in (token, *roles)))
        return f"{name}.{secret}"

    def check(self) -> None:
        """Raise ControlPlaneError if a part has exited."""
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise ControlPlaneError(f"{name} ended with status {process.returncode}; {self.evidence()}")

    def checked(self, reached: Callable[[], bool]) -> Callable[[], bool]:
        """Return a function that returns `reached()`, and raises ControlPlaneError if a part has exited."""

        def with_check() -> bool:
            self.check()
            return reached()

        return with_check

    def evidence(self) -> str:
        """Return the end of each part's log, for error messages."""
        ends = []
        for name in self._processes:
            lines = (self.directory / f"{name}.log").read_text(errors="replace").splitlines()
            ends.append(f"end of {name}'s log:\n" + "\n".join(lines[-8:]))
        return "\n".join(ends)

    def _write_files(self) -> None:
        certificates = Certificates(self.directory)
        certificates.serving("apiserver", ["127.0.0.1", HOST_FROM_GUEST, SERVICE_ADDRESS], ["localhost", "kubernetes"])
        certificates.client("apiserver-kubelet-client", "kube-apiserver", "system:masters")
        for node in self.nodes:
            certificates.client(f"kubelet-{node}", node_user(node), "system:nodes")
        certificates.key("service-account")
        rows = [f'{token},{user},{user},"{self._groups[user]}"' for user, token in self._tokens.items()]
        _write_private(self.directory / "tokens.csv", "\n".join(rows) + "\n")
        names = "".join(f"127.0.0.1 {node}\n" for node in self.nodes)
        (self.directory / "hosts").write_text(f"127.0.0.1 localhost\n{names}")

    def _with_node_names(self) -> list[Argument]:
        """Return a command prefix that makes node names resolve to 127.0.0.1.

        A kubelet registers an address of the virtual machine's network, which nothing outside can reach.
        """
        script = 'mount --bind "$0" /etc/hosts && exec "$@"'
        return ["unshare", "--mount", "sh", "-c", script, self.directory / "hosts"]

    def _etcd_arguments(self) -> list[Argument]:
        clients, peers = (f"http://127.0.0.1:{port}" for port in (self._etcd, self._etcd_peers))
        return [
            f"--data-dir={self.directory / 'etcd'}",
            f"--listen-client-urls={clients}",
            f"--advertise-client-urls={clients}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
            # The data is not needed after etcd has exited.
            "--unsafe-no-fsync",
        ]

    def _api_server_arguments(self) -> list[Argument]:
        file = {path.name: path for path in self.directory.iterdir()}
        return [
            f"--etcd-servers=http://127.0.0.1:{self._etcd}",
            "--bind-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--advertise-address={HOST_FROM_GUEST}",
            f"--service-cluster-ip-range={SERVICE_NETWORK}",
            f"--token-auth-file={file['tokens.csv']}",
            "--enable-bootstrap-token-auth=true",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            # The device plugin's pods are privileged if it writes CDI specifications.
            "--allow-privileged=true",
            f"--tls-cert-file={file['apiserver.crt']}",
            f"--tls-private-key-file={file['apiserver.key']}",
            f"--client-ca-file={file['ca.crt']}",
            f"--kubelet-client-certificate={file['apiserver-kubelet-client.crt']}",
            f"--kubelet-client-key={file['apiserver-kubelet-client.key']}",
            "--kubelet-preferred-address-types=Hostname",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={file['service-account.pub']}",
            f"--service-account-signing-key-file={file['service-account.key']}",
        ]

    def _controller_options(self) -> list[Argument]:
        return [
            f"--root-ca-file={self.directory / 'ca.crt'}",
            # The controller-manager signs the certificates of kubelets that join with a bootstrap token.
            f"--cluster-signing-cert-file={self.directory / 'ca.crt'}",
            f"--cluster-signing-key-file={self.directory / 'ca.key'}",
            f"--service-account-private-key-file={self.directory / 'service-account.key'}",
            "--use-service-account-credentials=true",
            # By default, a node whose kubelet has been silent for 50 s gets a taint. Some tests have a node without a
            # kubelet, and in an emulated host the kubelet may need longer.
            "--node-monitor-grace-period=1h",
        ]

    def _run(self, name: str, *arguments: Argument, wrapper: Iterable[Argument] = ()) -> None:
        # setpriv: if this process is killed, the kernel kills the control plane too.
        argv = ["setpriv", "--pdeathsig", "KILL", *wrapper, self.binaries / name, *arguments]
        with (self.directory / f"{name}.log").open("wb") as log:
            self._processes[name] = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def _wait_ready(self) -> None:
        wait("the API server is ready", self.checked(self._is_ready), SECONDS, self.evidence)

    def _is_ready(self) -> bool:
        try:
            self.kubectl("get", "--raw=/readyz")
        except CommandError:
            return False
        return True


def _role_binding(name: str, role: str, group: str) -> dict[str, object]:
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "ClusterRoleBinding",
        "metadata": {"name": name},
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": role},
        "subjects": [{"apiGroup": "rbac.authorization.k8s.io", "kind": "Group", "name": group}],
    }


def _write_private(path: Path, text: str) -> None:
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text)


def _base64(text: str) -> str:
    return base64.b64encode(text.encode()).decode()
