"""A link to a file system which no longer answers, such as a FUSE mount whose process hangs."""

import os

import pytest

DEAD = "/dead-file-system"
TARGET = f"/proc/1/root{DEAD}"


class HangError(BaseException):
    """A call never returns. No `except Exception` catches this."""


def hang(patch: pytest.MonkeyPatch) -> None:
    """From now on, whoever follows a link to TARGET fails the test. The link's text may be read."""
    readlink = os.readlink

    def of_a_living_file_system(path: str, *, dir_fd: int | None = None) -> str:
        if DEAD in path:
            raise HangError(path)
        return readlink(path, dir_fd=dir_fd)

    patch.setattr(os, "readlink", of_a_living_file_system)
