"""Makes the TLS settings of clients of an API server.

They accept what Kubernetes' own clients accept: those are written in Go, whose verification (crypto/x509) is mostly
less strict than Python's default.
"""

import ssl


def client_context(ca: bytes | None) -> ssl.SSLContext:
    """Return settings that accept servers whose certificates one of the CAs in `ca` has signed.

    `ca` has the CAs' certificates in PEM format. Raises ValueError or ssl.SSLError if it contains none. If `ca` is
    None, the CAs that the host trusts are used.
    """
    # Not ssl.create_default_context: since Python 3.13, it refuses certificates without key identifiers.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # TLS 1.2 is the oldest version that the API server accepts by default (tls-min-version).
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    # Accept a CA that is not a root CA: the CA of a cluster may be an intermediate CA of a company.
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    # Go looks for the server's name only in subjectAltName.
    context.hostname_checks_common_name = False
    if ca is None:
        context.load_default_certs()
    else:
        # Between certificates, there may be comments in any language. Python accepts ASCII only.
        context.load_verify_locations(cadata=ca.decode("ascii", errors="ignore"))
    return context
