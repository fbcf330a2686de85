"""`make pins`, and images of a release's recipes: with a registry of the bed and a simulated archive of snapshots."""

import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from integration.bed.cache import REPOSITORY
from integration.bed.machine import buildah
from integration.bed.machine.machine_image import base_image, base_suite
from integration.bed.packages import debian_root, repository
from integration.bed.process import CommandError, run
from integration.bed.registry import Registry
from integration.bed.tools import MODULE, TOOLKIT, pinned
from tests.fakes.web_server import serving

DAY = "20261130T120000Z"
SOURCES = """\
Types: deb
URIs: http://archive.ubuntu.com/ubuntu/
Suites: ./
Trusted: yes

Types: deb
URIs: http://security.ubuntu.com/ubuntu/
Suites: ./
Trusted: yes
"""
"""Like the file of Ubuntu's image, but the archive has no directories for suites and is not signed."""


@contextmanager
def archive(answer: Callable[[str], bytes | None]) -> Iterator[str]:
    """Yield the address of an HTTP proxy that stands in for Ubuntu's servers: `answer` has the content of each URL."""

    class Proxy(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            content = answer(self.path)
            self.send_response(HTTPStatus.OK if content is not None else HTTPStatus.NOT_FOUND)
            self.send_header("Content-Length", str(len(content or b"")))
            self.end_headers()
            self.wfile.write(content or b"")

        def log_message(self, *_: object) -> None:
            pass

    with serving(Proxy) as port:
        yield f"http://127.0.0.1:{port}"


def package(directory: Path, version: str) -> Path:
    """Make an archive with one package in that version."""
    (directory / "tree/DEBIAN").mkdir(parents=True)
    control = f"Package: probe\nVersion: {version}\nArchitecture: all\nMaintainer: a\nDescription: b\n"
    (directory / "tree/DEBIAN/control").write_text(control)
    deb = directory / "probe.deb"
    run(["dpkg-deb", "--build", directory / "tree", deb])
    repository(directory / "archive", deb)
    return directory / "archive"


def test_packages_are_those_of_the_day(tmp_path: Path) -> None:
    """apt in the image has today's again, from the same file as before."""
    now = package(tmp_path / "now", "2")
    places = {f"http://{name}.ubuntu.com/ubuntu/": now for name in ("archive", "security")}
    places[f"http://snapshot.ubuntu.com/ubuntu/{DAY}/"] = package(tmp_path / "then", "1")

    def answer(url: str) -> bytes | None:
        found = [path / url.removeprefix(place) for place, path in places.items() if url.startswith(place)]
        return found[0].read_bytes() if found and found[0].is_file() else None

    # Debian's apt reads Ubuntu's file as well.
    with debian_root("trixie") as root, archive(answer) as proxy:
        (root.path / "etc/apt/sources.list").unlink()
        sources = root.path / "etc/apt/sources.list.d/ubuntu.sources"
        sources.write_text(SOURCES)
        (root.path / "etc/apt/apt.conf.d/proxy").write_text(f'Acquire::http::Proxy "{proxy}";\n')
        shutil.copy(REPOSITORY / "containerfiles/at-snapshot", root.path / "srv")

        def installed(*environment: str) -> str:
            install = ("sh", "-ec", "dpkg --purge probe; apt-get update; apt-get install --yes probe")
            root.run("env", *environment, "/srv/at-snapshot", *install)
            return root.run("dpkg-query", "--show", "--showformat=${Version}", "probe")

        assert installed() == "2"
        assert installed(f"SNAPSHOT={DAY}") == "1"
        assert sources.read_text() == SOURCES
        assert installed() == "2"


@contextmanager
def docker_io() -> Iterator[Registry]:
    """Start a registry, which the programs of this process then find as docker.io."""
    with Registry(tls=False) as registry, pytest.MonkeyPatch.context() as environment:
        settings = registry.directory / ".config/containers/registries.conf"
        settings.parent.mkdir(parents=True)
        location = f'location = "127.0.0.1:{registry.port}"\ninsecure = true\n'
        settings.write_text(f'[[registry]]\nprefix = "docker.io"\n{location}')
        environment.setenv("CONTAINERS_REGISTRIES_CONF", str(settings))
        yield registry


def pins(registry: Registry, proxy: str) -> str:
    # HOME: Debian 12's skopeo looks only there for registries.conf.
    return run([REPOSITORY / "deploy/generate/pins"], env={"http_proxy": proxy, "HOME": str(registry.directory)})


def test_pins_are_printed_only_if_all_is_known() -> None:
    base, toolkit = base_image(base_suite()), pinned(MODULE, TOOLKIT)
    with docker_io() as registry:
        with archive(lambda url: b"signed") as proxy:
            with pytest.raises(CommandError, match=r"cannot ask for the digest of docker.io/library/ubuntu:24.04; run"):
                pins(registry, proxy)
            digest = registry.push(base, "library/ubuntu", "24.04")
            comment, *lines = pins(registry, proxy).splitlines()
        assert comment.startswith("# ")
        assert lines[::2] == [f"BASE=docker.io/library/ubuntu@{digest}", f"TOOLKIT={toolkit}-1"]
        snapshot = re.fullmatch(r"SNAPSHOT=(20\d{6}T\d{6}Z)", lines[1])
        assert snapshot
        asked = list[str]()
        with archive(asked.append) as proxy, pytest.raises(CommandError) as found:
            pins(registry, proxy)
        (url,) = set(asked)
        directory = url.removesuffix("/dists/noble/InRelease")
        assert re.fullmatch(r"http://snapshot\.ubuntu\.com/ubuntu/20\d{6}T\d{6}Z", directory)
        assert f"cannot find {directory}; run it where Ubuntu's snapshots answer" in str(found.value)


def test_an_image_has_the_pinned_base_after_its_tag_has_moved(tmp_path: Path) -> None:
    recipes, other = tmp_path / "recipes", "localhost/unbounded-agent-bed/other"
    for name in ("agent", "containerfiles", "deploy", "systemd"):
        shutil.copytree(REPOSITORY / name, recipes / name)
    (recipes / "containerfiles/probe").mkdir()
    probe = 'ARG BASE\nFROM ${BASE}\nARG SNAPSHOT\nARG TOOLKIT\nRUN echo "$SNAPSHOT $TOOLKIT" >/pinned\n'
    (recipes / "containerfiles/probe/Containerfile").write_text(probe)
    buildah.import_root(other, recipes / "agent")
    with docker_io() as registry:
        base = f"docker.io/library/ubuntu@{registry.push(base_image(base_suite()), 'library/ubuntu', '24.04')}"
        registry.push(other, "library/ubuntu", "24.04")
        (recipes / "containerfiles/pins").write_text(f"# by\nBASE={base}\nSNAPSHOT={DAY}\nTOOLKIT=1.19.1-1\n")
        image = buildah.build("probe", "", recipes=recipes)
        with buildah.working_container(image) as container:
            root = Path(buildah.buildah("mount", container))
            assert (root / "etc/os-release").is_file()
            assert (root / "pinned").read_text() == f"{DAY} 1.19.1-1\n"
        buildah.buildah("rmi", image, "localhost/unbounded-agent/probe", base, other)
