"""All defects of one line each, by document: S0 to S4."""

from __future__ import annotations

from tests.mutants.discovery_mutants import DISCOVERY_MUTANTS
from tests.mutants.engine_mutants import ENGINE_MUTANTS
from tests.mutants.metric_mutants import METRIC_MUTANTS
from tests.mutants.request_mutants import REQUEST_MUTANTS
from tests.mutants.router_mutants import ROUTER_MUTANTS

MUTANTS = (
    *DISCOVERY_MUTANTS,
    *ROUTER_MUTANTS,
    *REQUEST_MUTANTS,
    *METRIC_MUTANTS,
    *ENGINE_MUTANTS,
)
