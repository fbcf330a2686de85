"""Stand-ins for programs."""

from pathlib import Path


def program(path: Path, script: str) -> None:
    """Write a script for sh as a program, with the directory that it is in."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
