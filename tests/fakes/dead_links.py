"""Links that lead to a file system which no longer answers, such as a FUSE mount whose process hangs."""

from agent.system.files import System

DEAD = "/dead"
TARGET = f"/proc/1/root{DEAD}"


class HangError(BaseException):
    """The kernel was made to follow a dead link, which never returns. No `except Exception` catches this."""


class WithDeadLinks(System):
    """A System in which following one of `dead_links`, or reaching DEAD, fails the test. A link's text may be read."""

    dead_links: frozenset[str] = frozenset()

    def _at(self, path: str, *, follow: bool = True) -> str:
        below = path.startswith(tuple(f"{each}/" for each in self.dead_links))
        if below or (follow and path in self.dead_links and self.read_link(path)):
            raise HangError(path)
        return super()._at(path, follow=follow)

    def _resolve(self, path: str, *, of_processes: bool = True) -> str:
        resolved = super()._resolve(path, of_processes=of_processes)
        if resolved.startswith(DEAD):
            raise HangError(path)
        return resolved
