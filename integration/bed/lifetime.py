"""What runs for as long as a block of code, and never longer."""

from typing import Self


class Lifetime:
    """A context manager, which is closed also when its start fails."""

    def start(self) -> None:
        raise NotImplementedError

    def close(self) -> None:
        """After any part of a start."""
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
