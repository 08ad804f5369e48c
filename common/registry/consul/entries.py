"""How instances and cards are stored in Consul: names, entries, listings, card parts (pure)."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from common.errors import InvalidRequest, Unauthenticated, Unavailable
from common.namespace import check_namespace
from common.registry.card import CARD_BYTES_MAX, ModelCard, decode_card, encode_card, model_slug
from common.registry.instances import HEALTH_META_KEY, HEALTH_SERVICE_META_KEY, Instance
from common.registry.signature import EntrySigner

CHECK_INTERVAL_S = 1.0
CHECK_TIMEOUT_S = 0.5
REAP_AFTER_S = 60
# Consul allows 512 KiB per value, 512 characters per meta value and 64 meta values.
CARD_PART_BYTES = 384 * 1024
# A card may not take much more memory than it takes in Consul. Tokenizers in base64 shrink to a
# fifth.
CARD_RATIO_MAX = 50
CARD_SLACK_BYTES = 1 << 20
META_VALUE_CHARS = 512
META_PARTS_MAX = 57
SIGNATURE_KEY = "signature"

_CHECKSUM = re.compile(r"[0-9a-f]{64}")
_HOST_PORT = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[^:\s/]+):(\d{1,5})")
_META_PART = re.compile(r"json\d\d")


class HealthState(Enum):
    """Result of Consul's checks. SUSPECTED: failing, to be probed before it counts as dead."""

    PASSING = 1
    SUSPECTED = 2
    FAILING = 3


@dataclass(frozen=True, slots=True)
class Entry:
    """A registered instance. order grows with registrations; the id makes it total."""

    instance: Instance
    order: tuple[int, int]
    health: HealthState


@dataclass(frozen=True, slots=True)
class Listing:
    """All entries of a namespace at `index`. unreadable: service ID → error. has_unauthenticated:
    whether some of these are not proved to be of this mesh."""

    index: int
    entries: tuple[Entry, ...]
    unreadable: Mapping[str, str]
    has_unauthenticated: bool


def service_name(namespace: str) -> str:
    return f"kvmesh-{namespace}"


def service_id(namespace: str, instance_id: int) -> str:
    return f"kvmesh-{namespace}-{instance_id:016x}"


def check_id(namespace: str, instance_id: int) -> str:
    return f"service:{service_id(namespace, instance_id)}"


def departure_key(namespace: str, instance_id: int | None = None) -> str:
    """Returns the key of an instance's departure note; without an id, the prefix of all of them."""
    return f"kvmesh/{namespace}/left/" + ("" if instance_id is None else f"{instance_id:016x}")


def adapters_key(namespace: str, key: str = "") -> str:
    """Returns the key of a desired adapter; without its own key, the prefix of all of them."""
    check_namespace(namespace)
    return f"kvmesh/{namespace}/adapters/{key}"


def registration(
    instance: Instance, text: bytes, ttl_s: float, signature: str = ""
) -> dict[str, Any]:
    """Returns arguments of `agent.service.register`. Raises InvalidRequest for an invalid
    instance. text: its JSON."""
    host, _, port = instance.address.rpartition(":")
    return {
        "name": service_name(instance.namespace),
        "service_id": service_id(instance.namespace, instance.id),
        "tags": [instance.service],
        "address": host.strip("[]"),
        "port": int(port),
        "meta": _meta(instance, text.decode("ascii"))
        | ({SIGNATURE_KEY: signature} if signature else {}),
        "check": _check(instance, ttl_s),
    }


def _check(instance: Instance, ttl_s: float) -> dict[str, Any]:
    check: dict[str, Any] = {
        "CheckID": check_id(instance.namespace, instance.id),
        "Name": f"kvmesh {instance.service}",
        "DeregisterCriticalServiceAfter": f"{REAP_AFTER_S}s",
    }
    target = instance.meta.get(HEALTH_META_KEY)
    if target is None:
        return check | {"TTL": f"{ttl_s}s", "Status": "passing"}
    if not _HOST_PORT.fullmatch(target):
        raise InvalidRequest(
            f"meta.health must be host:port, not {target!r}", f"meta.{HEALTH_META_KEY}"
        )
    service = instance.meta.get(HEALTH_SERVICE_META_KEY, "")
    # Critical until the agent has reached it: a wrong address never becomes routable.
    return check | {
        "GRPC": f"{target}/{service}" if service else target,
        "Interval": f"{CHECK_INTERVAL_S}s",
        "Timeout": f"{CHECK_TIMEOUT_S}s",
    }


def _meta(instance: Instance, text: str) -> dict[str, str]:
    parts = [text[n : n + META_VALUE_CHARS] for n in range(0, len(text), META_VALUE_CHARS)]
    if len(parts) > META_PARTS_MAX:
        limit = META_PARTS_MAX * META_VALUE_CHARS
        raise InvalidRequest(f"instance too large for Consul: {len(text)}/{limit} bytes", "meta")
    # The rest is shown on Consul's pages and never read back; `rivals_filter` uses slug and card.
    shown = {"model": instance.model, "role": instance.role, "stable_name": instance.stable_name}
    readable = {k: v.encode()[:META_VALUE_CHARS].decode(errors="ignore") for k, v in shown.items()}
    if instance.card_checksum:
        card = model_slug(instance.card_checksum)
        readable |= {"slug": model_slug(instance.model), "card": card}
    return readable | {f"json{n:02}": part for n, part in enumerate(parts)}


def rivals_filter(instance: Instance) -> str:
    """Returns a filter for health queries: its own entry, and those of its model with another
    card."""
    own = f'Service.ID == "{service_id(instance.namespace, instance.id)}"'
    if not instance.card_checksum:
        return own
    slug, card = model_slug(instance.model), model_slug(instance.card_checksum)
    return f'{own} or (Service.Meta.slug == "{slug}" and Service.Meta.card != "{card}")'


class InstanceReader:
    """Instances in entries. An entry that is listed again unchanged is not read again."""

    def __init__(self, signer: EntrySigner) -> None:
        self._signer = signer
        self._known: dict[str, tuple[str, str, Instance]] = {}

    def read(self, key: str, text: str, signature: str) -> Instance:
        """Returns the instance in `text`. Raises Unauthenticated, InvalidRequest."""
        known = self._known.get(key)
        if known is not None and known[:2] == (text, signature):
            return known[2]
        raw = text.encode(errors="replace")
        self._signer.check(raw, signature)
        instance = Instance.from_json(text)
        self._signer.check_seal(raw, instance.id)
        self._known[key] = (text, signature, instance)
        return instance

    def retain(self, keys: Collection[str]) -> None:
        """Forgets all other entries."""
        for key in self._known.keys() - keys:
            del self._known[key]


# Any: Consul's JSON.
def parse_listing(namespace: str, index: str, services: Any, reader: InstanceReader) -> Listing:
    """Returns the listing in a response to a health query. Raises Unavailable if it is not one."""
    if not index.isdecimal() or int(index) < 1 or not isinstance(services, list):
        raise Unavailable(f"unreadable list of services from Consul, index {index}", 1.0)
    entries, unreadable, has_unauthenticated = [], {}, False
    for item in services:
        try:
            entries.append(_parse_entry(namespace, item, reader))
        except (InvalidRequest, Unauthenticated) as error:
            unreadable[str(item["Service"]["ID"])] = error.message
            has_unauthenticated |= isinstance(error, Unauthenticated)
    return Listing(int(index), tuple(entries), unreadable, has_unauthenticated)


def _parse_entry(namespace: str, item: Any, reader: InstanceReader) -> Entry:
    service = item["Service"]
    meta: Mapping[str, str] = service["Meta"] or {}
    text = "".join(meta[k] for k in sorted(meta) if _META_PART.fullmatch(k))
    instance = reader.read(service["ID"], text, meta.get(SIGNATURE_KEY, ""))
    # Consul's names ignore case; namespaces do not.
    if instance.namespace != namespace or service["ID"] != service_id(namespace, instance.id):
        raise InvalidRequest(f"the entry belongs to namespace {instance.namespace!r}", "id")
    order = (int(service["CreateIndex"]), instance.id)
    return Entry(instance, order, _health_state(instance, item["Checks"]))


def _health_state(instance: Instance, checks: Iterable[Any]) -> HealthState:
    failing = {check["CheckID"] for check in checks if check["Status"] != "passing"}
    if not failing:
        return HealthState.PASSING
    needs_probe = {"serfHealth"}
    if HEALTH_META_KEY in instance.meta:
        needs_probe.add(check_id(instance.namespace, instance.id))
    return HealthState.SUSPECTED if failing <= needs_probe else HealthState.FAILING


def card_key(checksum: str) -> str:
    """Returns the prefix of a card's keys. Raises InvalidRequest unless `checksum` is 64 hex
    digits."""
    if not _CHECKSUM.fullmatch(checksum):
        raise InvalidRequest(f"{checksum!r} is not 64 hex digits", "card_checksum")
    return f"kvmesh/cards/{checksum}"


def pack_card(card: ModelCard) -> dict[str, bytes]:
    """Returns values by key below `card_key`, the manifest last: a card with a manifest is
    complete."""
    packed = zlib.compress(encode_card(card))
    starts = range(0, len(packed), CARD_PART_BYTES)
    parts = {str(n): packed[i : i + CARD_PART_BYTES] for n, i in enumerate(starts)}
    return parts | {"manifest": json.dumps({"parts": len(parts)}).encode()}


def unpack_card(parts: Iterable[bytes], checksum: str) -> ModelCard:
    """Returns the card in `parts`. Raises InvalidRequest (field `checksum`) if they are damaged."""
    inflate = zlib.decompressobj()
    packed = b"".join(parts)
    limit = min(CARD_BYTES_MAX, CARD_SLACK_BYTES + CARD_RATIO_MAX * len(packed))
    try:
        raw = inflate.decompress(packed, limit)
    except zlib.error as error:
        raise InvalidRequest(f"the stored card is damaged: {error}", "checksum") from error
    if not inflate.eof:
        raise InvalidRequest(
            f"the stored card is incomplete, or larger than {limit} bytes", "checksum"
        )
    return decode_card(raw, checksum)


def parse_manifest(manifest: bytes) -> int:
    """Returns the number of parts of a card. Raises InvalidRequest (field `checksum`) if
    unreadable."""
    try:
        part_count = int(json.loads(manifest)["parts"])
    except (ValueError, KeyError, TypeError) as error:
        raise InvalidRequest(f"the card's manifest is damaged: {error}", "checksum") from error
    if not 0 < part_count <= CARD_BYTES_MAX // CARD_PART_BYTES:
        raise InvalidRequest(f"the card's manifest names {part_count} parts", "checksum")
    return part_count
