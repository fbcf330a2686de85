"""Sends one request by HTTPS, and reads the head of the response within a time limit.

It uses no proxy and follows no redirect.
"""

import contextlib
import email.utils
import http.client
import ssl
import urllib.error
import urllib.parse
import urllib.request
from email.message import Message
from typing import IO, Literal, NamedTuple

from agent.system.api_server import client_context
from agent.system.deadlines import bounded

TIME_LIMIT = 10.0
"""Seconds for each operation on the connection."""
MARGIN = 5.0
"""Seconds by which the whole request may exceed TIME_LIMIT. Looking up a host's name has no limit of its own."""


class Answer(NamedTuple):
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
    try:
        context = client_context(ca)
    except (ssl.SSLError, ValueError) as error:
        raise ValueError("no certificate in PEM format") from error
    parts, date = urllib.parse.urlsplit(url), None
    connection = http.client.HTTPSConnection(parts.hostname or "", parts.port, timeout=TIME_LIMIT, context=context)
    try:
        connection.request("GET", parts.path or "/", headers={"Authorization": f"Bearer {token}"} if token else {})
        response = connection.getresponse()
        with contextlib.suppress(ValueError):
            date = email.utils.parsedate_to_datetime(response.headers["Date"] or "").timestamp()
        return Answer(response.status, date)
    except http.client.HTTPException as error:
        raise OSError(f"not an HTTP response: {type(error).__name__}") from error
    finally:
        connection.close()


# Opens a URL by HTTP or HTTPS, through the proxy that the environment names, and follows a few redirects.
#
# A redirect from HTTPS to HTTP is refused. Nothing secret is sent to any server.


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects with the same method. Before Python 3.13, the library turns HEAD into GET."""

    inf_msg = "it redirects too often; the last answer: "

    def redirect_request(
        self, request: urllib.request.Request, file: IO[bytes], code: int, reason: str, headers: Message, url: str
    ) -> urllib.request.Request:
        """Return the next request. Raises URLError if the redirect to `url` must not be followed."""
        target = urllib.parse.urlsplit(url)
        if target.scheme not in {"https", urllib.parse.urlsplit(request.full_url).scheme}:
            raise urllib.error.URLError(f"it redirects to {url}, which is less protected")
        return urllib.request.Request(url, method=request.get_method())


def open_url(url: str, timeout: float, method: Literal["GET", "HEAD"] = "GET") -> http.client.HTTPResponse:
    """Return the server's response, whose body is still to be read.

    `timeout` is how many seconds may pass without any data. Raises urllib.error.HTTPError for a status that means
    failure, and OSError or http.client.HTTPException for other errors.
    """
    opener = urllib.request.build_opener(_Redirects)
    response: http.client.HTTPResponse = opener.open(urllib.request.Request(url, method=method), timeout=timeout)
    return response
