"""The servers that a request may go to (pure).

An endpoint is the `host:port` of a server that runs already; its worker of the engine `openai`
announces it. Workers of other engines have none, since they serve no HTTP. A prefill or decode
worker is no endpoint: an answer names one server for the whole request.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from common.errors import Unavailable
from common.registry.instances import SERVER_META_KEY, SERVER_MODEL_META_KEY, Instance

NO_ENDPOINT = "NO_ENDPOINT"


@dataclass(frozen=True, slots=True)
class Endpoints:
    """The endpoints of a model: worker id -> `host:port`."""

    by_id: Mapping[int, str]

    is_restricted: bool
    """Whether the model has other workers, which the router must not choose."""

    def worker_of(self, endpoint: str) -> int | None:
        """Returns the worker of an endpoint, or None."""
        return next((id_ for id_, address in self.by_id.items() if address == endpoint), None)


def endpoint_of(worker: Instance) -> str:
    """Returns the endpoint of a worker; "" if it has none."""
    return worker.meta.get(SERVER_META_KEY, "") if worker.role == "aggregated" else ""


def server_model(worker: Instance) -> str:
    """Returns the `model` that the server of a worker expects in bodies; "" if unknown."""
    return worker.meta.get(SERVER_MODEL_META_KEY, "")


def find_endpoints(
    model: str, workers: Iterable[Instance], subset: Collection[str] | None
) -> Endpoints:
    """Returns the endpoints of a model.

    subset: those that the gateway permits; None: all. Raises Unavailable if none is left.
    """
    workers = tuple(workers)
    found = {worker.id: endpoint for worker in workers if (endpoint := endpoint_of(worker))}
    if not found:
        others = f"; its {len(workers)} workers serve no HTTP" if workers else ""
        text = f"no server serves {model!r} at the moment{others}"
        raise Unavailable(text, 1.0, reason=NO_ENDPOINT)
    permitted = found
    if subset is not None:
        permitted = {id_: endpoint for id_, endpoint in found.items() if endpoint in subset}
    if not permitted:
        text = f"none of the {len(subset or ())} endpoints of the gateway's subset serves {model!r}"
        raise Unavailable(text, 1.0, reason=NO_ENDPOINT)
    return Endpoints(permitted, is_restricted=len(permitted) < len(workers))


def retry_order(
    endpoints: Endpoints,
    chosen: int,
    excluded: Collection[int],
    open_picks: Mapping[int, int],
    limit: int,
) -> tuple[str, ...]:
    """Returns the endpoint of a worker, then those that the gateway tries if it does not respond:
    at most `limit`, those with the fewest open requests first.

    excluded: workers that get no requests now.
    """
    others = [id_ for id_ in endpoints.by_id if id_ != chosen and id_ not in excluded]
    others.sort(key=lambda id_: (open_picks.get(id_, 0), endpoints.by_id[id_]))
    order = [chosen, *others[:limit]]
    return tuple(dict.fromkeys(endpoints.by_id[id_] for id_ in order))
