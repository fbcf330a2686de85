"""Opens what a URL has, by HTTP or HTTPS: through the proxy of the environment, and after a few redirects.

Whoever redirects does not choose the protection: HTTPS never becomes HTTP. Nothing secret is sent, to any server.
"""

import http.client
import urllib.error
import urllib.parse
import urllib.request
from email.message import Message
from typing import IO, Literal

REDIRECTS = 5
"""dl.k8s.io answers with one, to the network that distributes its files."""


class _Redirects(urllib.request.HTTPRedirectHandler):
    """Follows redirects with the same method. The library would ask with GET, also after HEAD (until Python 3.13)."""

    max_redirections = REDIRECTS
    inf_msg = "it redirects too often; the last answer: "

    def redirect_request(
        self, request: urllib.request.Request, file: IO[bytes], code: int, reason: str, headers: Message, url: str
    ) -> urllib.request.Request:
        """Return the next request. Raises URLError if the URL is not one to follow."""
        there = urllib.parse.urlsplit(url)
        if there.scheme not in {"https", urllib.parse.urlsplit(request.full_url).scheme}:
            raise urllib.error.URLError(f"it redirects from HTTPS to {url}, which is not protected")
        if "@" in there.netloc:
            raise urllib.error.URLError("it redirects to a URL with a password")
        return urllib.request.Request(url, method=request.get_method())


def open_url(url: str, timeout: float, method: Literal["GET", "HEAD"] = "GET") -> http.client.HTTPResponse:
    """Return the open answer. Raises urllib.error.HTTPError for its status; other errors are OSError or HTTPException.

    `timeout` is in seconds without any byte.
    """
    opener = urllib.request.build_opener(_Redirects)
    answer: http.client.HTTPResponse = opener.open(urllib.request.Request(url, method=method), timeout=timeout)
    return answer
