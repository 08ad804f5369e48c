"""What tenants use, and what their limits refuse."""

from __future__ import annotations

from tools.dashboards.model import Board, Panel, Query
from tools.dashboards.queries import of_model, rate, ratio, total

_F = "kvmesh_frontend"
_OUTPUT = rate(of_model(f"{_F}_usage_output_tokens_total"))


def _use(title: str, metric: str, label: str, text: str) -> Panel:
    """Returns the panel of a counter of use."""
    expr = total(rate(of_model(f"{_F}_usage_{metric}_total")), label)
    return Panel(title, "ops", (Query(expr, f"{{{{{label}}}}}"),), text)


TENANTS = (
    _use("Requests", "requests", "tenant", "Ended requests a second, by tenant."),
    _use("Requests that failed", "failed_requests", "tenant", "With an error or a disconnect."),
    _use("Prompt tokens", "prompt_tokens", "tenant", "A second, by tenant."),
    _use("Output tokens", "output_tokens", "tenant", "A second, by tenant."),
    Panel(
        "Share of prompt tokens in the cache",
        "percentunit",
        (
            Query(
                ratio(
                    total(rate(of_model(f"{_F}_usage_cached_tokens_total")), "tenant"),
                    total(rate(of_model(f"{_F}_usage_prompt_tokens_total")), "tenant"),
                ),
                "{{tenant}}",
            ),
        ),
        "Tenants share no cache: a small one has fewer hits.",
    ),
    Panel(
        "Share of all tokens",
        "percentunit",
        (
            Query(
                f"{total(_OUTPUT, 'tenant')} / scalar({total(_OUTPUT)} > 0)",
                "{{tenant}}",
            ),
        ),
        "Of output. While requests queue, shares follow the weights of the tenants.",
    ),
)
KEYS = (
    _use("Output tokens by key", "output_tokens", "key", "A second, by API key."),
    _use("Output tokens by adapter", "output_tokens", "adapter", "A second, by LoRA adapter."),
)
LIMITS = (
    Panel(
        "Refused by limits and keys",
        "ops",
        (
            Query(
                total(
                    rate(
                        of_model(
                            f"{_F}_failures_total",
                            'error_type=~"rate_limited|unauthorized"',
                        )
                    ),
                    "error_type",
                ),
                "{{error_type}}",
            ),
        ),
        "Requests above a limit of their tenant, and without a valid key.",
    ),
)

BOARD = Board(
    "tenants",
    "KVMesh: tenants",
    "Use by tenant, key, model and adapter; refusals by limits.",
    {"Tenants": TENANTS, "Keys and adapters": KEYS, "Limits": LIMITS},
)
