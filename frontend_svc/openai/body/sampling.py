"""Sampling fields of request bodies, `nvext` and request templates (pure).

A field is declared once, in the group of the objects that have it:

  NucleusFields      bodies, request templates
  OpenAiSampling     bodies
  CutoffFields       bodies, `nvext`, request templates
  ExtensionSampling  bodies, `nvext`

A request carries each under its own name in `SamplingOptions`. The names and limits of fields that
OpenAI's API does not have are those of vLLM.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

from pydantic import AfterValidator, Field

from frontend_svc.openai.body.fields import I64, N_MAX, StrictModel, unexpected_value

_Penalty: TypeAlias = Annotated[float, Field(ge=-2, le=2)]


def _check_top_k(value: int) -> int:
    if value == 0:
        raise unexpected_value("-1 (off) or at least 1")
    return value


class NucleusFields(StrictModel):
    """OpenAI's fields that a request template can set."""

    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    """Divides the logits; 0: the most likely token."""
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    """Sampling uses the most likely tokens, whose probabilities sum to this value; 1: all."""


class OpenAiSampling(NucleusFields):
    """OpenAI's fields of both generation endpoints."""

    seed: I64 | None = None
    """Makes the choice of tokens repeatable; without effect at a temperature of 0."""
    presence_penalty: _Penalty | None = None
    """Subtracted from the logit of each token in the output."""
    frequency_penalty: _Penalty | None = None
    """Subtracted from the logit of each token, times its number in the output."""
    n: Annotated[int, Field(ge=1, le=N_MAX)] | None = None
    """Choices per prompt. Each is a request of its own, so no worker receives the number."""


class CutoffFields(StrictModel):
    """Fields that OpenAI's API does not have, and that a request template can set."""

    top_k: Annotated[int, Field(ge=-1, le=2**31 - 1), AfterValidator(_check_top_k)] | None = None
    """Sampling uses this many of the most likely tokens; -1: all."""
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    """Sampling uses tokens with at least this fraction of the largest probability; 0: all."""


class ExtensionSampling(CutoffFields):
    """Fields that OpenAI's API does not have."""

    repetition_penalty: Annotated[float, Field(gt=0, le=2)] | None = None
    """Divides positive logits of tokens in prompt and output, multiplies negative ones; 1: off."""
