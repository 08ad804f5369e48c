"""The order in which processes take the modules of tests: long ones first, so that none is left
with one when the others have nothing to do.

The Makefile passes `--no-loadscope-reorder`, else xdist has an order of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping

# Seconds of modules whose number of tests does not show their length, on two idle cores
# (`make test ARGS=--durations=60`).
LONG_S: Mapping[str, int] = {
    "tests/e2e/test_rolling.py": 179,
    "tests/e2e/test_router_ha.py": 98,
    "tests/e2e/test_mesh_file.py": 91,
    "tests/e2e/test_hostile_templates.py": 67,
    "tests/e2e/test_tools.py": 50,
    "tests/integration/test_deploy.py": 45,
    "tests/e2e/test_demo.py": 36,
    "tests/chaos/test_chaos_smoke.py": 35,
    "tests/e2e/test_routable.py": 32,
    "tests/e2e/test_structured_output.py": 28,
    "tests/e2e/test_lost_requests.py": 23,
    "tests/chaos/test_chaos_kv_drift.py": 21,
    "tests/e2e/test_fair_share.py": 21,
    "tests/e2e/test_long_steps.py": 20,
    "tests/e2e/test_gpu_parts.py": 18,
    "tests/e2e/test_failing_worker.py": 17,
    "tests/e2e/test_cluster.py": 16,
    "tests/e2e/test_fuzz.py": 14,
}


def module_of(node_id: str) -> str:
    return node_id.partition("::")[0]


def longest_first(node_ids: Iterable[str]) -> Callable[[str], tuple[int, int, str]]:
    """Returns the key that sorts these tests: by the length of their module, then by its number of
    tests. The tests of a module stay together, in their order."""
    counts = Counter(map(module_of, node_ids))

    def key(node_id: str) -> tuple[int, int, str]:
        module = module_of(node_id)
        return -LONG_S.get(module, 0), -counts[module], module

    return key
