"""Reads ResourceClaims from the API server."""

import urllib.parse
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Any

from agent.dra.api_client import ApiClient
from agent.dra.api_errors import ApiError
from agent.dra.claims import ClaimGoneError
from agent.dra.messages import ClaimReference
from agent.dra.slices import API

GONE = (HTTPStatus.NOT_FOUND, HTTPStatus.FORBIDDEN)
"""The answers for a claim that is gone. The node authorizer answers 403 if no pod of this node has the claim
(authorizeGet of node_authorizer.go)."""


def claim_reader(client: ApiClient) -> Callable[[ClaimReference], Mapping[str, Any]]:
    """Return a function that returns a claim as the API server has it.

    The function raises ClaimGoneError or another AgentError.
    """

    def fetch(claim: ClaimReference) -> Mapping[str, Any]:
        namespace, name = (urllib.parse.quote(each, safe="") for each in (claim.namespace, claim.name))
        try:
            return client.get(f"/apis/{API}/namespaces/{namespace}/resourceclaims/{name}")
        except ApiError as error:
            if error.status in GONE:
                raise ClaimGoneError(error.message, error.hint) from error
            raise

    return fetch
