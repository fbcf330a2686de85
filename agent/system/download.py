"""Opens a URL by HTTP or HTTPS, through the proxy that the environment names, and follows a few redirects.

A redirect from HTTPS to HTTP is refused. Nothing secret is sent to any server.
"""

import http.client
import urllib.error
import urllib.parse
import urllib.request
from email.message import Message
from typing import IO, Literal

REDIRECTS = 5
"""The largest number of redirects that are followed. dl.k8s.io redirects once, to its content delivery network."""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects with the same method. Before Python 3.13, the library turns HEAD into GET."""

    max_redirections = REDIRECTS
    inf_msg = "it redirects too often; the last answer: "

    def redirect_request(
        self, request: urllib.request.Request, file: IO[bytes], code: int, reason: str, headers: Message, url: str
    ) -> urllib.request.Request:
        """Return the next request. Raises URLError if the redirect to `url` must not be followed."""
        target = urllib.parse.urlsplit(url)
        if target.scheme not in {"https", urllib.parse.urlsplit(request.full_url).scheme}:
            raise urllib.error.URLError(f"it redirects to {url}, which is less protected")
        if "@" in target.netloc:
            raise urllib.error.URLError("it redirects to a URL with a password")
        return urllib.request.Request(url, method=request.get_method())


def open_url(url: str, timeout: float, method: Literal["GET", "HEAD"] = "GET") -> http.client.HTTPResponse:
    """Return the server's response, whose body is still to be read.

    `timeout` is how many seconds may pass without any data. Raises urllib.error.HTTPError for a status that means
    failure, and OSError or http.client.HTTPException for other errors.
    """
    opener = urllib.request.build_opener(_Redirects)
    response: http.client.HTTPResponse = opener.open(urllib.request.Request(url, method=method), timeout=timeout)
    return response
