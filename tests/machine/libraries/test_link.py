"""Which links are made, replaced, left alone and removed."""

import contextlib
from collections.abc import Callable

import pytest

from agent.machine.libraries import FOREIGN, LOADER_CONFIGURATION, link_directories, plan_links, wanted_links
from agent.machine.run import run
from agent.model.handoff import GrantedFile
from agent.model.paths import MACHINE_STATE
from agent.system.process import Completed
from tests.fakes.machine import EMPTY, LIBRARIES, REQUEST, ROOT, VERSION, Machine, hang, ldconfig

MULTIARCH = f"/{LIBRARIES}"
CUDA = f"{MULTIARCH}/libcuda.so.1"
TEXT = f"../../..{ROOT}/{LIBRARIES}/libcuda.so.1"
OLD = TEXT.replace("host-nvidia/0", "host-nvidia/7")


def test_library_directory_is_the_machines_own() -> None:
    """Debian's layout, otherwise /usr/lib64; 32-bit libraries only if their directory exists."""
    files = (
        GrantedFile(f"{LIBRARIES}/libcuda.so.1"),
        GrantedFile(f"{LIBRARIES}/vdpau/libvdpau_nvidia.so.1"),
        GrantedFile(f"{LIBRARIES}/deeper/still/x.so"),
        GrantedFile("usr/lib/i386-linux-gnu/libcuda.so.1"),
        GrantedFile("usr/bin/nvidia-smi"),
        GrantedFile("lib/firmware/nvidia/550/gsp.bin"),
    )
    request = REQUEST._replace(files=files)
    debian = wanted_links(request, link_directories("x86_64", {MULTIARCH, "/usr/lib/i386-linux-gnu"}))
    assert sorted(debian) == [
        "/usr/bin/nvidia-smi",
        "/usr/lib/i386-linux-gnu/libcuda.so.1",
        CUDA,
        f"{MULTIARCH}/vdpau/libvdpau_nvidia.so.1",
    ]
    assert debian[f"{MULTIARCH}/vdpau/libvdpau_nvidia.so.1"].startswith(f"../../../..{ROOT}/")
    fedora = wanted_links(request, link_directories("x86_64", {"/usr/lib64"}))
    assert fedora["/usr/lib64/libcuda.so.1"] == f"../..{ROOT}/{LIBRARIES}/libcuda.so.1"
    assert "/usr/lib/i386-linux-gnu/libcuda.so.1" not in fedora
    assert "/usr/lib/aarch64-linux-gnu" in link_directories("aarch64", {"/usr/lib/aarch64-linux-gnu"}).values()


def test_loader_configuration_is_linked_and_removed_with_the_driver(machine: Machine) -> None:
    """The device plugin makes its own specification from what it finds in the machine. An image's own file stays."""
    icd = "/usr/share/vulkan/icd.d/nvidia_icd.json"
    machine.put(icd, "theirs")
    assert machine.verdict("LibrariesLinked") == ("False", "Conflict")
    assert machine.read(icd) == b"theirs"
    machine.drop(icd)
    run(machine)
    assert machine.read_link(icd) == f"../../../..{ROOT}{icd}"
    machine.hand(REQUEST._replace(files=tuple(file for file in REQUEST.files if "vulkan" not in file.target)))
    run(machine)
    assert machine.read_link(icd) is None
    vendor = "/usr/share/glvnd/egl_vendor.d/10_nvidia.json"
    assert machine.read_link(vendor) == f"../../../..{ROOT}{vendor}"


@pytest.mark.parametrize(
    ("present", "remove", "make", "conflicts"),
    [
        ({}, [], [CUDA], []),
        ({CUDA: TEXT}, [], [], []),
        ({CUDA: OLD}, [], [CUDA], []),
        ({CUDA: "/etc/alternatives/libcuda"}, [], [], [CUDA]),
        ({CUDA: TEXT, f"{MULTIARCH}/libold.so": OLD}, [f"{MULTIARCH}/libold.so"], [], []),
        ({CUDA: TEXT, f"{MULTIARCH}/libother.so": "libz.so.1", f"{MULTIARCH}/libz.so.1": FOREIGN}, [], [], []),
        # ldconfig's own link between two of our links: it stays unless its name is needed, then our link replaces it.
        ({CUDA: TEXT, f"{MULTIARCH}/libcuda.so.9": "libcuda.so.1"}, [], [], []),
        ({CUDA: "libcuda.so.550", f"{MULTIARCH}/libcuda.so.550": OLD}, [f"{MULTIARCH}/libcuda.so.550"], [CUDA], []),
        # A link whose target only looks like ours.
        ({CUDA: "../../../run/host-nvidia-evil/0/x"}, [], [], [CUDA]),
    ],
)
def test_difference(present: dict[str, str], remove: list[str], make: list[str], conflicts: list[str]) -> None:
    plan = plan_links({CUDA: TEXT}, present)
    assert list(plan.remove) == remove
    assert plan.make == dict.fromkeys(make, TEXT)
    assert list(plan.conflicts) == conflicts


@pytest.mark.parametrize(
    ("what", "expected"),
    [("file", "(a file)"), ("link", "(a link to stubs/libcuda.so)"), ("directory", "(a directory)")],
)
def test_a_conflict_is_reported_and_the_rest_is_linked(machine: Machine, what: str, expected: str) -> None:
    """A stub in the image keeps no other link from being made; ldconfig must not redirect its own link."""
    place = machine.tree / CUDA.lstrip("/")
    if what == "file":
        machine.put(CUDA, "a stub")
    elif what == "link":
        machine.link(CUDA, "stubs/libcuda.so")
    else:
        place.mkdir()
    before = (place.lstat().st_ino, place.lstat().st_mtime_ns)
    assert machine.verdict("LibrariesLinked") == ("False", "Conflict")
    assert (
        f"{CUDA} {expected}; remove these files, or the package that contains them (`dpkg -S {CUDA}` in the machine)"
        in machine.message("LibrariesLinked")
    )
    assert (place.lstat().st_ino, place.lstat().st_mtime_ns) == before
    assert machine.read_link(f"{MULTIARCH}/libnvidia-ml.so.1")
    assert [call for call in machine.calls if call[0] == "ldconfig" and "-p" not in call] == [("ldconfig", "-X")]
    if what == "directory":
        place.rmdir()
    else:
        place.unlink()
    assert machine.verdict("LibrariesLinked") == ("True", "Linked")
    assert machine.read_link(CUDA) == TEXT


def test_a_conflict_with_a_text_file_runs_no_program_later(machine: Machine) -> None:
    """A loader cache never lists a text file in a library's place, and the timer runs each minute."""

    def libraries(argv: tuple[str, ...]) -> Completed:
        found = ldconfig(machine, argv)
        lines = found.stdout.splitlines(keepends=True)
        return Completed(0, b"".join(each for each in lines if b"libcuda.so.1" not in each), b"")

    machine.put(CUDA, "a stub")
    machine.program("ldconfig", libraries)
    run(machine)
    machine.calls.clear()
    assert machine.verdict("LibrariesLinked") == ("False", "Conflict")
    assert not [call for call in machine.calls if call[0] == "ldconfig"]


def test_a_new_generation_replaces_all_links(machine: Machine) -> None:
    run(machine)
    (machine.tree / "run/host-nvidia/0").rename(machine.tree / "run/host-nvidia/1")
    files = tuple(file for file in REQUEST.files if "nvidia-api" not in file.target)
    machine.hand(REQUEST._replace(driver_root="/run/host-nvidia/1", files=files))
    run(machine)
    links = [machine.read_link(f"{MULTIARCH}/{name}") for name in machine.entries(MULTIARCH)]
    assert all(text and "/host-nvidia/1/" in text for text in links if text)
    assert not machine.exists(f"{MULTIARCH}/libnvidia-api.so.1")
    assert machine.conditions()["LibrariesLinked"] == ("True", "Linked")


@pytest.mark.parametrize("how", ["missing", "link", "empty"])
def test_the_driver_root_must_be_a_directory_with_files(machine: Machine, how: str) -> None:
    """nvidia-ctk on a link leaves out all libraries with exit code 0. ldconfig would delete links that lead nowhere."""
    run(machine)
    place = machine.tree / ROOT.lstrip("/")
    place.rename(place.with_name("away"))
    if how == "link":
        place.symlink_to("away")
    elif how == "empty":
        place.mkdir()
    machine.calls.clear()
    assert machine.verdict("LibrariesLinked") == ("False", "NotStaged")
    assert machine.read_link(CUDA) == TEXT
    assert ("ldconfig",) not in machine.calls


@pytest.mark.parametrize("killed", [False, True])
def test_links_of_a_withdrawn_driver_leave_the_loader_cache_too(machine: Machine, killed: bool) -> None:
    """It would list names that lead nowhere. Without links, and without a driver, no program is started."""
    run(machine)
    machine.hand(EMPTY)
    if killed:
        working = machine.programs["ldconfig"]
        machine.program("ldconfig", die)
        with pytest.raises(KeyboardInterrupt):
            run(machine)
        assert machine.read_link(CUDA) is None
        machine.program("ldconfig", working)
    for times in (1, 0):
        machine.calls.clear()
        run(machine)
        assert machine.calls.count(("ldconfig",)) == times
        assert machine.read_link(CUDA) is None
    assert machine.conditions()["LibrariesLinked"] == ("True", "NotApplicable")


@pytest.mark.parametrize("meanwhile", [False, True])
def test_the_loader_cache_of_another_program_is_updated(machine: Machine, meanwhile: bool) -> None:
    """A package's trigger may have run ldconfig while the driver root was missing.

    Or it searched the directories before the links were made, and ended after the agent had listed the cache.
    """
    working = machine.programs["ldconfig"]

    def listed(argv: tuple[str, ...]) -> Completed:
        found = working(argv)
        if "-p" in argv and meanwhile:
            machine.put("/etc/ld.so.cache", "\tx (libc6,x86-64) => /lib/x86_64-linux-gnu/libc.so.6")
        return found

    machine.program("ldconfig", listed)
    run(machine)
    machine.program("ldconfig", working)
    if not meanwhile:
        machine.put("/etc/ld.so.cache", "\tx (libc6,x86-64) => /lib/x86_64-linux-gnu/libc.so.6")
    machine.calls.clear()
    run(machine)
    assert machine.calls.count(("ldconfig",)) == 1
    assert machine.conditions()["LibrariesLinked"] == ("True", "Linked")


@pytest.mark.parametrize(
    ("merged", "stub_first", "reason"),
    [(True, False, "Linked"), (False, True, "Shadowed"), (False, False, "NotInLoaderCache")],
)
def test_a_library_below_lib_is_ours_only_with_a_merged_usr(
    machine: Machine, merged: bool, stub_first: bool, reason: str
) -> None:
    """Debian's loader cache lists /lib/<triplet>, which is the same directory there.

    LibrariesLinked was True, although the loader found the stub: /lib was always taken for /usr/lib.
    """
    stub = CUDA.removeprefix("/usr")
    if merged:
        machine.link("/lib", "usr/lib")
    else:
        machine.put(stub, "a stub")

    def below_lib(argv: tuple[str, ...]) -> Completed:
        return Completed(0, ldconfig(machine, argv).stdout.replace(CUDA.encode(), stub.encode()), b"")

    machine.program("ldconfig", below_lib)
    if stub_first:
        put_first(f"\tlibcuda.so.1 (libc6,x86-64) => {stub}")(machine)
    assert machine.verdict("LibrariesLinked") == (str(merged), reason)
    assert (f"load {stub} instead of {CUDA}" in machine.message("LibrariesLinked")) is stub_first
    assert merged or CUDA in machine.message("LibrariesLinked")


def test_a_directory_that_ldconfig_does_not_search(machine: Machine) -> None:
    machine.put("/etc/ld.so.cache")
    machine.program("ldconfig", "")
    assert machine.verdict("LibrariesLinked") == ("False", "NotInLoaderCache")
    assert "/etc/ld.so.conf.d" in machine.message("LibrariesLinked")
    assert f"libnvidia-glcore.so.{VERSION}" not in machine.message("LibrariesLinked")


@pytest.mark.parametrize(
    "change", ["/etc/ld.so.conf.d/driver.conf", "/etc/ld.so.conf", "/etc/ld.so.cache", "the handoff"]
)
def test_ldconfig_that_does_not_help_becomes_rare(
    machine: Machine, becomes_rare: Callable[..., None], change: str
) -> None:
    """It ran, and wrote the loader cache, each minute. A change of what it depends on is not missed."""
    working = machine.programs["ldconfig"]

    def useless(argv: tuple[str, ...]) -> Completed:
        if argv == ("ldconfig",):
            machine.put("/etc/ld.so.cache", "1 libs found in cache\n")
        return Completed(0, b"", b"")

    def tries() -> bool:
        machine.calls.clear()
        assert machine.verdict("LibrariesLinked") == ("False", "NotInLoaderCache")
        return ("ldconfig",) in machine.calls

    machine.program("ldconfig", useless)
    becomes_rare(tries, 26 if change == "the handoff" else 3)
    machine.program("ldconfig", working)
    if change == "the handoff":
        machine.hand(REQUEST)
    else:
        machine.put(change, "changed\n")
    assert machine.verdict("LibrariesLinked") == ("True", "Linked")


def die(argv: tuple[str, ...]) -> Completed:
    raise KeyboardInterrupt


@pytest.mark.parametrize("boot", [False, True], ids=["next run", "next boot"])
@pytest.mark.parametrize("end", [hang, die], ids=["time limit", "killed"])
def test_an_interrupted_ldconfig_runs_again(
    machine: Machine, end: Callable[[tuple[str, ...]], Completed], boot: bool
) -> None:
    """The cache lists every name already, from the previous files or another version."""
    run(machine)
    (machine.tree / "run/host-nvidia/0").rename(machine.tree / "run/host-nvidia/1")
    machine.hand(REQUEST._replace(driver_root="/run/host-nvidia/1"))
    working = machine.programs["ldconfig"]
    machine.program("ldconfig", end)
    with contextlib.suppress(KeyboardInterrupt):
        assert machine.verdict("LibrariesLinked") == ("False", "Failed")
    machine.program("ldconfig", working)
    if boot:
        machine.remove_tree(MACHINE_STATE)
    for times in (1, 0):
        machine.calls.clear()
        run(machine)
        assert machine.calls.count(("ldconfig",)) == times
        assert machine.conditions()["LibrariesLinked"] == ("True", "Linked")


def put_first(entry: str) -> Callable[[Machine], None]:
    """Return a step that puts this entry in the loader cache before all others of its name."""

    def prepare(machine: Machine) -> None:
        def listed(argv: tuple[str, ...]) -> Completed:
            found = ldconfig(machine, argv)
            return Completed(0, f"1 libs found in cache\n{entry}\n".encode() + found.stdout, b"")

        machine.program("ldconfig", listed)

    return prepare


STUB = "/usr/local/cuda/lib64/stubs/libcuda.so.1"


@pytest.mark.parametrize("more", ["", ", OS ABI: Linux 3.2.0", ', hwcap: "x86-64-v3"'])
def test_a_stub_that_the_loader_prefers_is_reported(machine: Machine, more: str) -> None:
    """A directory in /etc/ld.so.conf.d precedes the system's: programs may not load what the cache lists later."""
    machine.put(STUB, "a stub")
    put_first(f"\tlibcuda.so.1 (libc6,x86-64{more}) => {STUB}")(machine)
    for _ in range(2):
        assert machine.verdict("LibrariesLinked") == ("False", "Shadowed")
        assert f"load {STUB} instead of {CUDA}" in machine.message("LibrariesLinked")
    assert machine.calls.count(("ldconfig",)) == 1
    machine.program("ldconfig", lambda argv: ldconfig(machine, argv))
    assert machine.verdict("LibrariesLinked") == ("True", "Linked")


@pytest.mark.parametrize(
    ("reason", "advice"),
    [("Conflict", "in the machine)"), ("NotInLoaderCache", LOADER_CONFIGURATION), ("Shadowed", "then run ldconfig")],
)
def test_a_whole_driver_cuts_off_no_advice(machine: Machine, reason: str, advice: str) -> None:
    """As in an image that has a driver of its own."""
    names = [f"libnvidia-{index}-{'x' * 20}.so" for index in range(60)]
    linked = [GrantedFile(f"{LIBRARIES}/{name}.1", f"{name}.{VERSION}") for name in names]
    machine.hand(REQUEST._replace(files=(*linked, *(GrantedFile(f"{LIBRARIES}/{name}.{VERSION}") for name in names))))
    if reason == "Conflict":
        for name in names:
            machine.put(f"{MULTIARCH}/{name}.1", "theirs")
    elif reason == "NotInLoaderCache":
        machine.put("/etc/ld.so.cache")
        machine.program("ldconfig", "")
    else:
        for name in names:
            machine.put(f"/opt/{name}.1", "another driver's")
        put_first("\n".join(f"\t{name}.1 (libc6,x86-64) => /opt/{name}.1" for name in names))(machine)
    assert machine.verdict("LibrariesLinked") == ("False", reason)
    assert machine.message("LibrariesLinked").endswith(advice)


@pytest.mark.parametrize(
    "entry",
    [
        f"\tlibcuda.so.1 (libc6) => {STUB}",
        "\tlibcuda.so.1 (libc6,x86-64, OS ABI: Linux 3.2.0) => /lib/x86_64-linux-gnu/libcuda.so.1",
        "\tlibcuda.so.1 (libc6,x86-64) => /usr/local/lib/libcuda.so.1",
        "\tlibcuda.so.1 (libc6,x86-64) => /opt/gone/libcuda.so.1",
    ],
    ids=["another ABI", "another name of the directory", "a link to ours", "not there any more"],
)
def test_entries_that_do_not_shadow(machine: Machine, entry: str) -> None:
    machine.put(STUB, "a stub")
    machine.link("/lib", "usr/lib")
    machine.link("/usr/local/lib/libcuda.so.1", CUDA)
    put_first(entry)(machine)
    assert machine.verdict("LibrariesLinked") == ("True", "Linked")
