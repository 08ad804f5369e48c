"""The errors of the Responses API: those of the OpenAI API, with its names of fields (pure)."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import replace
from typing import Final

from common.errors import MeshError
from frontend_svc import errors as openai
from frontend_svc.errors import OPENAI_ERRORS, HttpError
from frontend_svc.responses.translation import client_error


def _http_error(error: BaseException, _: str, headers: Container[bytes]) -> HttpError:
    named = client_error(error) if isinstance(error, MeshError) else error
    return openai.http_error(named, headers)


RESPONSES_ERRORS: Final = replace(OPENAI_ERRORS, http_error=_http_error)
"""The form of the Responses API."""
