"""A process that a DRA driver takes for the kubelet: it passes on connections of a test to the driver's socket.

Run with the kubelet's arguments. It listens at RELAY in the kubelet's directory, and needs only the standard library.
"""

import contextlib
import os
import socket
import sys
import threading

RELAY = "relay.sock"
DRIVER = "plugins/gpu.unbounded-agent.io/dra.sock"


def _copy(source: socket.socket, target: socket.socket) -> None:
    """Pass on bytes until one side hangs up, and then hang up on both."""
    with contextlib.suppress(OSError):
        while data := source.recv(65536):
            target.sendall(data)
    for each in (source, target):
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)


def _relay(client: socket.socket, driver_path: str) -> None:
    driver = socket.socket(socket.AF_UNIX)
    with client, driver, contextlib.suppress(OSError):
        driver.connect(driver_path)
        back = threading.Thread(target=_copy, args=(driver, client), daemon=True)
        back.start()
        _copy(client, driver)
        back.join()


def main() -> None:
    (root,) = (each.partition("=")[2] for each in sys.argv if each.startswith("--root-dir="))
    os.makedirs(root, exist_ok=True)
    with socket.socket(socket.AF_UNIX) as listener:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{root}/{RELAY}")
        listener.bind(f"{root}/{RELAY}")
        listener.listen()
        while True:
            arguments = (listener.accept()[0], f"{root}/{DRIVER}")
            threading.Thread(target=_relay, args=arguments, daemon=True).start()


if __name__ == "__main__":
    main()
