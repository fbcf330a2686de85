"""`unbounded-agent kube manifests`: the Kubernetes manifests and Helm values that come with the agent."""

import argparse
import os
from collections.abc import Iterator, Sequence

import agent
from agent.cli.host import this_host
from agent.cli.printing import say
from agent.model.errors import ApplyError, ConfigError
from agent.system.files import System

DIRECTORY = f"{os.path.dirname(agent.__file__)}/manifests"
"""The directory with the manifests: files NAME.yaml, each of which begins with a comment that says what it is."""
SUFFIX = ".yaml"


def run_manifests(options: argparse.Namespace) -> int:
    """Run `kube manifests` with these options."""
    return manifests(options.names, options.out, this_host())


def manifests(names: Sequence[str], directory: str | None, system: System) -> int:
    """Print the manifests of these names one after the other, or list all manifests if there are no names.

    With a directory, write the manifests there instead: those of these names, or all if there are no names. Raises
    ConfigError for an unknown name, and ApplyError if a file there has other content: somebody may have edited it.
    """
    known = [each.removesuffix(SUFFIX) for each in system.entries(DIRECTORY)]
    if unknown := [name for name in names if name not in known]:
        raise ConfigError(f"there is no manifest {', '.join(unknown)}: choose from {', '.join(known)}")
    texts = {name: system.read_text(f"{DIRECTORY}/{name}{SUFFIX}") for name in names or known}
    if directory is not None:
        contents = {f"{os.path.abspath(directory)}/{name}{SUFFIX}": text.encode() for name, text in texts.items()}
        _refuse_changed(contents, system)
        for path, content in contents.items():
            system.write(path, content)
            say([path])
    elif names:
        say(["---\n".join(texts.values()).rstrip("\n")])
    else:
        say(_names_and_purposes(texts))
    return 0


def _refuse_changed(contents: dict[str, bytes], system: System) -> None:
    changed = [path for path, content in contents.items() if system.exists(path) and system.read(path) != content]
    if changed:
        raise ApplyError(
            f"nothing was written, because these files have other content, perhaps edited: {', '.join(changed)}",
            "write into an empty directory, and compare the two with `diff -ru`; or name only manifests that are not "
            "there; to replace a file, remove it first",
        )


def _names_and_purposes(texts: dict[str, str]) -> Iterator[str]:
    width = max(map(len, texts))
    for name, text in texts.items():
        yield f"{name.ljust(width)}  {text.splitlines()[0].removeprefix('# ')}"
