"""Sends one request by HTTPS, and reads the head of the response within a time limit.

It uses no proxy and follows no redirect.
"""

import email.utils
import http.client
import ssl
import urllib.parse
from dataclasses import dataclass

from agent.system.deadlines import bounded
from agent.system.tls import client_context

TIME_LIMIT = 10.0
"""Seconds for each operation on the connection."""
MARGIN = 5.0
"""Seconds by which the whole request may exceed TIME_LIMIT. Looking up a host's name has no limit of its own."""


@dataclass(frozen=True, slots=True)
class Answer:
    """What the head of the response says."""

    status: int
    date: float | None
    """The server's clock, in seconds since the epoch; None if the `Date` header is missing or invalid."""


def ask(url: str, *, ca: bytes, token: str = "") -> Answer:
    """Send a GET request, with a bearer token if one is given, and return the answer.

    `ca` has the accepted CA certificates in PEM format. Raises ValueError if it contains no certificate, and OSError if
    the request fails: ssl.SSLCertVerificationError if the server's certificate is not accepted.
    """
    return bounded(f"GET {url}", lambda: _ask(url, ca, token), TIME_LIMIT + MARGIN)


def _ask(url: str, ca: bytes, token: str) -> Answer:
    connection = _connection(url, ca)
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    try:
        connection.request("GET", urllib.parse.urlsplit(url).path or "/", headers=headers)
        response = connection.getresponse()
        return Answer(response.status, _date(response.headers["Date"]))
    except http.client.HTTPException as error:
        raise OSError(f"not an HTTP response: {type(error).__name__}") from error
    finally:
        connection.close()


def _connection(url: str, ca: bytes) -> http.client.HTTPConnection:
    parts = urllib.parse.urlsplit(url)
    try:
        context = client_context(ca)
    except (ssl.SSLError, ValueError) as error:
        raise ValueError("no certificate in PEM format") from error
    return http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=TIME_LIMIT, context=context)


def _date(text: str | None) -> float | None:
    try:
        return email.utils.parsedate_to_datetime(text).timestamp() if text else None
    except ValueError:
        return None
