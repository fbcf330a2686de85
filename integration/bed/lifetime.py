"""Base class of everything that runs as long as a `with` block, and no longer."""

from typing import Self


class Lifetime:
    """A context manager that is closed even if its start fails."""

    def start(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """Stop everything, even after an incomplete start."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
