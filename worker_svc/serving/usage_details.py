"""Counts of a worker by the details of usage that its engine reports. Pure."""

from __future__ import annotations

from collections import Counter
from typing import Final

from common.request.preprocessed import CompletionUsage

CACHED: Final = ("device", "host", "disk")
"""Tiers of the cache, in the counters `cached_tokens_<tier>`."""

DRAFTS: Final = ("accepted", "rejected")
"""What the model decides about drafted tokens, in the counters `draft_tokens_<result>`."""


def count_details(counters: Counter[str], counts: CompletionUsage, *, has_prompt: bool) -> None:
    """Counts the cached tokens of a prompt by tier, and the drafted tokens of its response.

    has_prompt: whether this worker computed the prompt.
    """
    prompt, completion = counts.prompt_tokens_details, counts.completion_tokens_details
    if has_prompt and prompt is not None and prompt.cached_tokens is not None:
        host, disk = prompt.host_cached_tokens or 0, prompt.disk_cached_tokens or 0
        device = max(0, prompt.cached_tokens - host - disk)
        for tier, tokens in zip(CACHED, (device, host, disk), strict=True):
            counters[f"cached_tokens_{tier}"] += tokens
    if completion is not None:
        counters["draft_tokens_accepted"] += completion.accepted_prediction_tokens or 0
        counters["draft_tokens_rejected"] += completion.rejected_prediction_tokens or 0
