"""Record what a real root tree with NVIDIA's packages has: `python tests/data/record.py TREE DIRECTORY`, as root.

Writes `files.tsv` (kind, path, size or link target; the contents are NVIDIA's and are not kept) and `ldconfig.txt`
(what the tree's own `ldconfig -p` prints). These trees were made with mmdebstrap --mode=root:

debian-13-driver-550: trixie with contrib and non-free, --architectures=amd64,i386, --include=libcuda1,libnvidia-ml1,
  nvidia-smi,libnvidia-encode1,libnvcuvid1,libnvidia-ptxjitcompiler1,libnvidia-opticalflow1,libnvidia-fbc1,
  libnvidia-cfg1,libnvidia-allocator1,libnvidia-nvvm4,nvidia-opencl-icd,libglx-nvidia0,libegl-nvidia0,
  libgles-nvidia2,nvidia-vdpau-driver,nvidia-vulkan-icd,libnvoptix1,libnvidia-ngx1,libcudadebugger1,libcuda1:i386,
  libnvidia-ml1:i386,nvidia-persistenced
ubuntu-24.04-driver-580: noble and noble-updates with restricted, --variant=extract, --include=libc-bin,libc6,
  libnvidia-{compute,gl,decode,encode,extra,fbc1,cfg1}-580,nvidia-utils-580,nvidia-compute-utils-580; then /lib and
  /sbin moved into /usr, as base-files' script would have done it
Both were recorded before PLACES had /usr/share and /usr/local/nvidia.

One was recorded on a host with a real GPU, an H200, as `python tests/data/record.py / DIRECTORY`:

ubuntu-24.04-driver-580-in-usr-local-nvidia: the driver is a read-only squashfs at /usr/local/nvidia, which ld.so.conf
  names; the usual directories have links to its libraries, and scripts that run its programs
"""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

PLACES = (
    "etc/alternatives",
    "usr/bin",
    "usr/sbin",
    "usr/lib",
    "usr/share/glvnd",
    "usr/share/vulkan",
    "usr/local/nvidia",
)
DRIVER = re.compile(r"nvidia|libcuda|libnvcuvid|libnvoptix|^ldconfig(\.real)?$")
DOCUMENTATION = re.compile(r"\.gz$|/modprobe\.d/|/systemd/|/firmware/|\.(conf|service|rules|d|ko|pc)$")


def rows(tree: Path) -> Iterator[str]:
    """Yield one line for each file or link of the driver."""
    for name in ("bin", "lib", "lib64", "sbin"):
        if (tree / name).is_symlink():
            yield f"link\t/{name}\t{(tree / name).readlink()}"
    for place in PLACES:
        for path in sorted((tree / place).rglob("*")):
            where = f"/{path.relative_to(tree)}"
            if not DRIVER.search(path.name) or DOCUMENTATION.search(where):
                continue
            if path.is_symlink():
                yield f"link\t{where}\t{path.readlink()}"
            elif path.is_file():
                status = path.stat()
                yield f"{_kind(path, status.st_mode)}\t{where}\t{status.st_size}"


def _kind(path: Path, mode: int) -> str:
    if not mode & 0o111:
        return "file"
    with path.open("rb") as file:
        return "script" if file.read(2) == b"#!" else "program"


def main(tree: Path, directory: Path) -> None:
    directory.mkdir(exist_ok=True)
    # Ubuntu's ldconfig is a shell script around ldconfig.real, and the extracted tree has no shell.
    program = "/sbin/ldconfig.real" if (tree / "usr/sbin/ldconfig.real").exists() else "/sbin/ldconfig"
    command = ["env", "LC_ALL=C", "chroot", str(tree), program]
    subprocess.run(command, check=True)
    listing = subprocess.run([*command, "-p"], check=True, capture_output=True).stdout
    (directory / "ldconfig.txt").write_bytes(listing)
    # After ldconfig, which makes soname links.
    (directory / "files.tsv").write_text("".join(f"{row}\n" for row in rows(tree)))


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
