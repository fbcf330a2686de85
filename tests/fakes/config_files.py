"""Configuration files."""

from pathlib import Path

from agent.model.paths import CONFIG_DIRECTORY, CONFIG_FILE
from agent.system.files import System
from tests.fakes.no_process import no_process


def system_with(root: Path, **files: str) -> System:
    system = System(no_process, str(root))
    for name, text in files.items():
        path = CONFIG_FILE if name == "main" else f"{CONFIG_DIRECTORY}/{name}.toml"
        system.write(path, text.encode())
    return system
