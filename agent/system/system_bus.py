"""The host half's backend of `agent.system.commands.Bus`: the jeepney package, over one socket."""

import errno
import os
import socket
import time
from itertools import count
from typing import Any

from jeepney import DBusAddress, HeaderFields, Message, MessageType, Parser, new_method_call
from jeepney.bus_messages import message_bus
from jeepney.io.blocking import prep_socket

from agent.errors import BusAnswerError, BusError

SOCKET = "/run/dbus/system_bus_socket"
"""D-Bus specification, "System message bus" (/var/run there). No variable of the environment leads root elsewhere."""
REPLY_LIMIT = 1 << 20
"""Bytes of one message. The bus's own limit is 128 MiB."""
CHUNK = 1 << 16
HINT = "see `systemctl status dbus.socket dbus.service`"


class SystemBus:
    """A Bus. The connection is kept from call to call, and made anew where it broke; not for several threads."""

    def __init__(self, path: str = SOCKET) -> None:
        self._path = path
        self._connection: _Connection | None = None

    def __call__(
        self, service: str, path: str, method: str, signature: str, arguments: tuple[object, ...], timeout: float
    ) -> tuple[object, ...]:
        interface, _, member = method.rpartition(".")
        address = DBusAddress(path, service, interface)
        call = new_method_call(address, member, signature or None, arguments)
        try:
            reply = self._reply(call, time.monotonic() + timeout)
        except OSError as error:
            raise BusError(f"{method} of {service} on {self._path}: {error.strerror or error}", HINT) from error
        if reply.header.message_type is not MessageType.method_return:
            name = reply.header.fields.get(HeaderFields.error_name, "an answer that is none")
            text = reply.body[0] if reply.body and isinstance(reply.body[0], str) else ""
            raise BusAnswerError(f"{method} of {service} for {arguments or path}: {name}: {text[:500]}")
        return tuple(reply.body)

    def close(self) -> None:
        """The next call connects anew."""
        if self._connection:
            self._connection.close()
        self._connection = None

    def _reply(self, call: Message, deadline: float) -> Message:
        if self._connection:
            try:
                return self._exchange(self._connection, call, deadline)
            except (ConnectionError, _TooLargeError):
                # The bus was started anew since the last call; or somebody has filled this connection meanwhile, as
                # every user of the host may send signals to anybody.
                pass
        self._connection = _Connection(self._path, deadline)
        return self._exchange(self._connection, call, deadline)

    def _exchange(self, connection: "_Connection", call: Message, deadline: float) -> Message:
        try:
            return connection.exchange(call, deadline)
        except BaseException:
            # A reply that comes late, or half of one, must not meet the next call.
            self.close()
            raise


class _TooLargeError(OSError):
    """Of a message, ours or not."""


class _Connection:
    """One connection that has said Hello. Raises OSError, also for what is no D-Bus message."""

    def __init__(self, path: str, deadline: float) -> None:
        try:
            self._socket: socket.socket = prep_socket(path, timeout=_left(deadline))
        except OSError:
            raise
        except Exception as error:
            raise OSError(errno.EPROTO, f"not authenticated: {error}") from error
        self._parser, self._serials = Parser(), count(1)
        try:
            self.exchange(message_bus.Hello(), deadline)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        self._socket.close()

    def exchange(self, call: Message, deadline: float) -> Message:
        """The reply to a call."""
        serial, received = next(self._serials), 0
        self._socket.settimeout(_left(deadline))
        self._socket.sendall(call.serialise(serial=serial))
        while True:
            message = self._next()
            if message is None:
                self._socket.settimeout(_left(deadline))
                data = self._socket.recv(CHUNK)
                received += len(data)
                if not data:
                    raise ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET))
                if received > REPLY_LIMIT:
                    raise _TooLargeError(errno.EMSGSIZE, f"a message of more than {REPLY_LIMIT} bytes")
                self._parser.add_data(data)
            elif message.header.fields.get(HeaderFields.reply_serial) == serial:
                return message
            else:
                received = 0

    def _next(self) -> Message | None:
        try:
            found: Any = self._parser.get_next_message()
        except Exception as error:
            # jeepney raises what the broken part happens to cause.
            raise OSError(errno.EBADMSG, f"not a D-Bus message: {error!r}"[:200]) from error
        return found


def _left(deadline: float) -> float:
    """Seconds; raises TimeoutError when there are none left, as a socket's limit of 0 would mean another thing."""
    seconds = deadline - time.monotonic()
    if seconds <= 0:
        raise TimeoutError(errno.ETIMEDOUT, "no answer in time")
    return seconds
