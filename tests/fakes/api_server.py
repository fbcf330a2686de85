"""A stand-in for the API server, on TLS: it stores Nodes and ResourceSlices, and serves watches of them.

It has the rules that the agent depends on: versions of objects, a node that lists only what is its own, and that its
conditions are merged by type. What the
real one accepts is tested with the real one (integration/tests/kubernetes/test_slices.py).
"""

import http.server
import json
import math
import os
import socket
import ssl
import subprocess
import threading
import time
import urllib.parse
from collections.abc import Callable
from http import HTTPStatus
from pathlib import Path
from typing import Any

from agent.dra.slices import COLLECTION

NODES, PODS = "/api/v1/nodes", "/api/v1/pods"
Object = dict[str, Any]
TICK = 0.05
"""Seconds between looks of a watch at whether the server is still running."""


class Handler(http.server.BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    api: "ApiServer"

    def handle_any(self) -> None:
        length = int(self.headers["Content-Length"] or 0)
        body = json.loads(self.rfile.read(length)) if length else None
        parts = urllib.parse.urlsplit(self.path)
        query = dict(urllib.parse.parse_qsl(parts.query))
        self.api.requests.append((self.command, parts.path, query, self.headers["Authorization"] or ""))
        if query.get("watch"):
            self._watch(parts.path, int(query["resourceVersion"]))
            return
        kind = self.headers["Content-Type"]
        if self.command == "PATCH" and kind != "application/strategic-merge-patch+json":
            body = None
        scripted = self.api.answer(self.command, parts.path) if self.api.answer else None
        status, answer = scripted or self.api.handle(self.command, parts.path, query, body)
        data = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = handle_any  # noqa: N815

    def _watch(self, path: str, version: int) -> None:
        self.send_response(HTTPStatus.OK)
        self.send_header("Transfer-Encoding", "chunked")
        if self.api.announces_close:
            self.send_header("Connection", "close")
        self.end_headers()
        api, sent, end = self.api, version, time.monotonic() + self.api.watch_seconds
        while not api.stopped.is_set() and time.monotonic() < end:
            with api.changed:
                events = [(number, event) for number, where, event in api.events if where == path and number > sent]
                if not events:
                    api.changed.wait(TICK)
            for number, event in events:
                line = json.dumps(event).encode() + b"\n"
                self.wfile.write(b"%x\r\n%s\r\n" % (len(line), line))
                sent = number
        if not api.stopped.is_set():
            self.wfile.write(b"0\r\n\r\n")
        self.close_connection = True

    def log_message(self, format: str, *args: object) -> None:
        """Print nothing."""


class Listening(http.server.ThreadingHTTPServer):
    """A server whose connections can be cut."""

    daemon_threads = True

    def __init__(self, handler: type[Handler], port: int) -> None:
        self.connections: list[socket.socket] = []
        super().__init__(("127.0.0.1", port), handler)

    def finish_request(self, request: Any, client_address: Any) -> None:  # noqa: ANN401 - as in socketserver
        self.connections.append(request)
        super().finish_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:  # noqa: ANN401
        """Print nothing: clients hang up."""


class ApiServer:
    """The server and its objects."""

    def __init__(self, directory: Path, node: str) -> None:
        """Make certificates in a directory. The node exists, without any resource."""
        self.directory, self.port = directory, 0
        self.certificate, self._key = directory / "api.crt", directory / "api.key"
        make_certificate(self.certificate, self._key, "subjectAltName=IP:127.0.0.1")
        self.objects: dict[str, Object] = {}
        self.events: list[tuple[int, str, Object]] = []
        self.requests: list[tuple[str, str, dict[str, str], str]] = []
        self.answer: Callable[[str, str], tuple[int, Object | bytes] | None] | None = None
        """Returns a scripted status and answer for a method and path; None for what the server does itself."""
        self.stored: Callable[[Object], Object] = lambda item: item
        """What the server makes of a slice that it stores."""
        self.budgets: dict[str, Object] = {}
        """By the name of a pod that must not be evicted: the details of the refusal."""
        self.lingers = False
        """Whether a pod that was evicted is still there."""
        self.announces_close = False
        """Whether answers to watches say `Connection: close`, as those of a server that is about to stop do."""
        self.watch_seconds = math.inf
        """After how many seconds the server ends a watch."""
        self.changed, self.stopped = threading.Condition(), threading.Event()
        self._version = 10
        self._server: Listening | None = None
        self.put(f"{NODES}/{node}", {"metadata": {"name": node, "uid": "uid-1"}, "status": {}})

    @property
    def slices(self) -> list[Object]:
        return [self.objects[path] for path in sorted(self.objects) if path.startswith(COLLECTION)]

    @property
    def written(self) -> list[str]:
        """Return the methods of requests that changed something."""
        return [method for method, *_ in self.requests if method != "GET"]

    def kubeconfig(self, **user: str) -> str:
        """Return a kubeconfig with the token `good`, or with other keys of the user."""
        cluster = {"server": f"https://127.0.0.1:{self.port}", "certificate-authority": "/etc/ca.crt"}
        return json.dumps(
            {
                "clusters": [{"name": "c", "cluster": cluster}],
                "users": [{"name": "u", "user": user or {"token": "good"}}],
                "contexts": [{"name": "x", "context": {"cluster": "c", "user": "u"}}],
                "current-context": "x",
            }
        )

    def start(self) -> None:
        """Listen, at the same port as before."""
        self.stopped.clear()
        handler = type("BoundHandler", (Handler,), {"api": self})
        self._server = Listening(handler, self.port)
        self.port = self._server.server_address[1]
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.certificate, self._key)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True, do_handshake_on_connect=False)
        threading.Thread(target=self._server.serve_forever, args=(TICK,), daemon=True).start()

    def stop(self) -> None:
        """Stop listening, and cut all connections."""
        self.stopped.set()
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self.cut()
        self._server = None

    def cut(self, last: bytes = b"") -> None:
        """Cut all connections that exist now. A client may open the next one at once.

        `last` is sent before, without TLS: otherwise, a client cannot tell the cut from the end of an answer.
        """
        for each in [*self._server.connections] if self._server else ():
            try:
                os.write(each.fileno(), last)
                each.shutdown(socket.SHUT_RDWR)
            except OSError:
                continue

    def put(self, path: str, item: Object) -> Object:
        """Store an object, and tell those who watch."""
        with self.changed:
            self._version += 1
            kind = "MODIFIED" if path in self.objects else "ADDED"
            item = {**item, "metadata": {**item["metadata"], "resourceVersion": str(self._version)}}
            self.objects[path] = item
            self.events.append((self._version, path.rpartition("/")[0], {"type": kind, "object": item}))
            self.changed.notify_all()
            return item

    def drop(self, path: str) -> None:
        """Remove an object, and tell those who watch."""
        with self.changed:
            self._version += 1
            event = {"type": "DELETED", "object": self.objects.pop(path)}
            self.events.append((self._version, path.rpartition("/")[0], event))
            self.changed.notify_all()

    def wipe(self) -> None:
        """Remove all slices, as the kubelet does."""
        for path in [path for path in self.objects if path.startswith(COLLECTION)]:
            self.drop(path)

    def handle(self, method: str, path: str, query: dict[str, str], body: Any) -> tuple[int, Object]:  # noqa: ANN401
        """Return the status and the answer to a request."""
        match method:
            case "GET" if path in (NODES, COLLECTION):
                if "=" not in query.get("fieldSelector", ""):
                    return failure(HTTPStatus.FORBIDDEN, "can only list with a field selector")
                items = [self.objects[each] for each in sorted(self.objects) if each.startswith(f"{path}/")]
                return HTTPStatus.OK, {"metadata": {"resourceVersion": str(self._version)}, "items": items}
            case "GET" if path == PODS:
                return self._pods(query)
            case "POST" if path.endswith("/eviction"):
                return self._evict(path.removesuffix("/eviction"), body)
            case "POST" if query.get("dryRun") == "All":
                return HTTPStatus.CREATED, self.stored(body)
            case "POST":
                where = f"{path}/{body['metadata']['name']}"
                if where in self.objects:
                    return failure(HTTPStatus.CONFLICT, "already exists")
                return HTTPStatus.CREATED, self.put(where, self.stored(body))
            case _:
                return self._handle_one(method, path, body)

    def _pods(self, query: dict[str, str]) -> tuple[int, Object]:
        """List the pods of one Node, in pages if the client wants that."""
        field, _, node = query.get("fieldSelector", "").partition("=")
        if field != "spec.nodeName":
            return failure(HTTPStatus.FORBIDDEN, "can only list with a field selector")
        paths = sorted(path for path in self.objects if "/pods/" in path)
        items = [self.objects[path] for path in paths if self.objects[path]["spec"]["nodeName"] == node]
        first, number = int(query.get("continue", 0)), int(query.get("limit", len(items)))
        more = {"continue": str(first + number)} if first + number < len(items) else {}
        return HTTPStatus.OK, {"metadata": more, "items": items[first : first + number]}

    def _evict(self, path: str, body: Any) -> tuple[int, Object]:  # noqa: ANN401
        if path not in self.objects:
            return failure(HTTPStatus.NOT_FOUND, f"{path} not found")
        pod = self.objects[path]
        if body["deleteOptions"]["preconditions"]["uid"] != pod["metadata"]["uid"]:
            return failure(HTTPStatus.CONFLICT, "the UID in the precondition is another one")
        if details := self.budgets.get(pod["metadata"]["name"]):
            status, answer = failure(HTTPStatus.TOO_MANY_REQUESTS, "Cannot evict pod as it would violate the budget.")
            return status, {**answer, "details": details}
        if self.lingers:
            self.put(path, {**pod, "metadata": {**pod["metadata"], "deletionTimestamp": "2026-11-30T12:00:00Z"}})
        else:
            self.drop(path)
        return HTTPStatus.CREATED, {"kind": "Status"}

    def _handle_one(self, method: str, path: str, body: Any) -> tuple[int, Object]:  # noqa: ANN401
        if method == "PATCH":
            return self._patch(path.removesuffix("/status"), body)
        if path not in self.objects:
            return failure(HTTPStatus.NOT_FOUND, f"{path} not found")
        now = self.objects[path]["metadata"]["resourceVersion"]
        if method == "PUT":
            if body["metadata"].get("resourceVersion") != now:
                return failure(HTTPStatus.CONFLICT, "the object has been modified")
            return HTTPStatus.OK, self.put(path, self.stored(body))
        if method == "DELETE":
            if body["preconditions"]["resourceVersion"] != now:
                return failure(HTTPStatus.CONFLICT, "the precondition has failed")
            self.drop(path)
            return HTTPStatus.OK, {"kind": "Status"}
        return HTTPStatus.OK, self.objects[path]

    def _patch(self, path: str, body: Any) -> tuple[int, Object]:  # noqa: ANN401
        """Merge a Node as a strategic merge patch does: conditions by their type, other parts by key.

        An Event has no lists.
        """
        if path not in self.objects:
            return failure(HTTPStatus.NOT_FOUND, f"{path} not found")
        if body is None:
            return failure(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, "the body of the request was in an unknown format")
        item, metadata = self.objects[path], body.get("metadata") or {}
        if not path.startswith(NODES):
            return HTTPStatus.OK, self.put(path, {**item, **body})
        if metadata.get("resourceVersion") not in (None, item["metadata"]["resourceVersion"]):
            return failure(HTTPStatus.CONFLICT, "the object has been modified")
        if "status" not in body:
            annotations = {**item["metadata"].get("annotations", {}), **metadata["annotations"]}
            merged = {**item["metadata"], "annotations": without_nulls(annotations)}
            spec = without_nulls({**item.get("spec", {}), **body["spec"]})
            return HTTPStatus.OK, self.put(path, {**item, "metadata": merged, "spec": spec})
        conditions = {each["type"]: each for each in item["status"].get("conditions", ())}
        for each in body["status"]["conditions"]:
            if each.get("$patch") == "delete":
                conditions.pop(each["type"], None)
            else:
                conditions[each["type"]] = {**conditions.get(each["type"], {}), **each}
        return HTTPStatus.OK, self.put(
            path, {**item, "status": {**item["status"], "conditions": [*conditions.values()]}}
        )


def without_nulls(merged: Object) -> Object:
    """In a merge patch, null removes a key."""
    return {key: value for key, value in merged.items() if value is not None}


def failure(status: int, message: str) -> tuple[int, Object]:
    """Return a Status object, as the API server answers what it does not do."""
    return status, {"kind": "Status", "status": "Failure", "message": message, "code": status}


def make_certificate(certificate: Path, key: Path, *extensions: str) -> None:
    """Make a key and a certificate that it has signed itself."""
    new = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-days", "1", "-subj", "/CN=test")
    words = [word for each in extensions for word in ("-addext", each)]
    out = ("-keyout", str(key), "-out", str(certificate))
    subprocess.run(["openssl", "req", "-x509", *new, *words, *out], check=True, capture_output=True)
