"""`ldconfig -p`: recorded outputs, and every tag that glibc's elf/cache.c can print."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.host.observe.host import list_loader_cache, parse_listing
from agent.model.facts import Absent, Broken, CacheEntry, Unseen
from tests.fakes.host import HOSTS, Host

DEBIAN = (HOSTS / "debian-13-driver-550" / "ldconfig.txt").read_text()


def listing(*lines: str) -> str:
    return "\n".join([f"{len(lines)} libs found in cache `/etc/ld.so.cache'", *(f"\t{line}" for line in lines), ""])


def only(line: str) -> CacheEntry:
    parsed = parse_listing(listing(line))
    assert isinstance(parsed, tuple)
    (entry,) = parsed
    return entry


def test_recorded_debian_output() -> None:
    parsed = parse_listing(DEBIAN)
    assert isinstance(parsed, tuple)
    assert len(parsed) == int(DEBIAN.split()[0])
    cuda = [each for each in parsed if each.soname == "libcuda.so.1"]
    assert cuda == [
        CacheEntry("libcuda.so.1", "x86_64", "/lib/x86_64-linux-gnu/libcuda.so.1"),
        CacheEntry("libcuda.so.1", "i686", "/lib/i386-linux-gnu/libcuda.so.1"),
    ]


@pytest.mark.parametrize(
    ("tags", "architecture"),
    [
        ("libc6,x86-64", "x86_64"),
        ("libc6,AArch64", "aarch64"),
        ("libc6", "i686"),
        ("libc6, OS ABI: Linux 3.2.0", "i686"),
        ('libc6, hwcap: "x86-64-v3"', "i686"),
        ('libc6,x86-64, hwcap: "x86-64-v3"', "x86_64"),
        ("libc6,x86-64, hwcap: 0x0000000000000001, OS ABI: Linux 3.2.0", "x86_64"),
        ('libc6,x32, hwcap: "x86-64-v3"', ""),
        ("libc6,hard-float", ""),
        ("libc6,64bit", ""),
        ("libc6,aarch64", ""),
        ("libc6,4096", ""),
        ("ELF", ""),
    ],
)
def test_architecture_is_the_second_tag_compared_whole(tags: str, architecture: str) -> None:
    assert only(f"libcuda.so.1 ({tags}) => /x86-64/AArch64/libcuda.so.1").architecture == architecture


def test_parentheses_and_arrows_in_paths() -> None:
    entry = only("liba b(1).so (libc6,x86-64) => /opt/a (libc6) => /b/liba b(1).so")
    assert (entry.soname, entry.path) == ("liba b(1).so", "/opt/a (libc6) => /b/liba b(1).so")


def test_broken_lines_are_skipped_and_counted() -> None:
    parsed = parse_listing(
        listing("libcuda.so.1 => /lib/libcuda.so.1", "a.so (libc6) => relative", "b.so (libc6) => /b")
    )
    assert isinstance(parsed, tuple)
    assert [each.path for each in parsed] == ["/b"]


@pytest.mark.parametrize(
    "output",
    [
        *("", "187 Bibliotheken im Cache »/etc/ld.so.cache« gefunden\n", DEBIAN[: len(DEBIAN) // 2], DEBIAN[5:]),
        DEBIAN.replace(" => ", " -> "),
    ],
    ids=["nothing", "translated", "cut short", "garbled", "a new form"],
)
def test_an_incomplete_listing_is_broken(output: str) -> None:
    assert isinstance(parse_listing(output), Broken)


@given(st.text(), st.integers(0, 3))
def test_no_text_raises_an_exception(text: str, count: int) -> None:
    parse_listing(text)
    parse_listing(f"{count} libs found in cache `x'\n{text}")


def test_a_cache_that_cannot_be_listed_is_not_absent(host: Host) -> None:
    assert isinstance(list_loader_cache(host), Absent)
    assert host.runner.calls == []
    host.loader_cache(DEBIAN)
    host.command("ldconfig", "-p", stderr="ldconfig: Permission denied\n", status=1)
    seen = list_loader_cache(host)
    assert isinstance(seen, Unseen)
    assert "Permission denied" in seen.why
    host.remove("/etc/ld.so.cache")
    host.symlink("/etc/ld.so.cache", "ld.so.cache")
    assert isinstance(list_loader_cache(host), Broken)
