"""Which client a key names, and what it permits."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from common.access.caller import ANONYMOUS, Caller, KeyTable
from common.access.key_file import KeyFile
from common.api_keys import KeyDocument, Permission, Tenant, hash_of, parse_keys
from common.errors import InvalidRequest, PermissionDenied, Unauthenticated
from common.request.preprocessed import (
    PreprocessedRequest,
    RoutingHints,
    SessionControl,
    TokenIds,
)
from frontend_svc.access.permissions import check_permissions
from frontend_svc.openai.body.nvext import Nvext

NOW = datetime(2026, 1, 1, tzinfo=UTC)
TENANTS = ("a", "a.b", "b")
NAMES = st.text(max_size=8)
# Fields of `nvext` that any key may use: they change the client's own output, or mark its requests.
FREE = {
    *("session_control", "agent_context", "request_timestamp_ms", "extra_args", "token_data"),
    *("ignore_eos", "top_k", "min_p", "repetition_penalty", "cache_salt"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    "guided_whitespace_pattern",
    # Deadlines order the requests of a tenant only.
    "router",
    # Refused for every client.
    *("greed_sampling", "use_raw_prompt", "max_thinking_tokens", "cache_control"),
    "metadata_upload",
}
VALUES = {
    "allowed_worker_ids": [1],
    "router_config_override": {},
    "agent_hints": {"osl": 1},
    "routing_constraints": {},
    "annotations": ["llm_metrics"],
    "extra_fields": ["kv_hit"],
}


def caller(tenant: str, *scopes: Permission) -> Caller:
    return Caller(tenant, "k", frozenset(scopes))


def confined(tenant: str, salt: str | None, session: str) -> tuple[str | None, str]:
    hints = RoutingHints(cache_salt=salt, session_control=SessionControl(session))
    request = PreprocessedRequest(token_ids=TokenIds.of([1]), routing=hints)
    (caller(tenant) if tenant else ANONYMOUS).confine(request)
    assert request.routing is not None
    assert request.routing.session_control is not None
    return request.routing.cache_salt, request.routing.session_control.session_id


@given(st.sampled_from(TENANTS), st.sampled_from(TENANTS), NAMES, NAMES)
def test_names_of_two_tenants_or_two_clients_never_meet(
    one: str, other: str, name: str, other_name: str
) -> None:
    is_same = (one, name) == (other, other_name)
    salt, session = confined(one, name, name)
    assert (salt == confined(other, other_name, "")[0]) is is_same
    assert (session == confined(other, "", other_name)[1]) is is_same
    assert salt != name
    assert len(session) <= 256, "the limit of routers"


def test_without_keys_requests_are_unchanged() -> None:
    assert confined("", "s", "t") == ("s", "t")
    request = PreprocessedRequest(token_ids=TokenIds.of([1]))
    ANONYMOUS.confine(request)
    assert request == PreprocessedRequest(token_ids=TokenIds.of([1]))


def test_each_field_of_nvext_needs_a_scope_or_is_free_on_purpose() -> None:
    for name in Nvext.model_fields.keys() - FREE:
        nvext = Nvext.model_validate({name: VALUES.get(name, 1)})
        with pytest.raises(PermissionDenied) as raised:
            check_permissions(caller("a", Permission.INFER), nvext)
        assert (raised.value.field or "").startswith(f"nvext.{name}")
        check_permissions(caller("a", *Permission), nvext)
    assert Nvext.model_fields.keys() > FREE
    harmless = Nvext(annotations=["mark"], extra_fields=["token_ids", "completion_token_ids"])
    check_permissions(caller("a", Permission.INFER), harmless)
    check_permissions(caller("a", Permission.INFER), None)


def document(**expires: str | None) -> bytes:
    """The file of keys with their names as ids and texts."""
    keys = [
        {
            **{"id": name, "sha256": hash_of(name.encode()), "scopes": ["infer"]},
            **{"created": "2025-01-01T00:00:00Z", "expires": end},
        }
        for name, end in expires.items()
    ]
    tenants = {"t": Tenant.model_validate({"keys": keys})}
    return KeyDocument(tenants=tenants).model_dump_json().encode()


def test_a_key_is_valid_until_it_expires() -> None:
    table = KeyTable.of(parse_keys(document(ever=None, once="2026-01-01T01:00:00+01:00")))

    def tenant(*headers: tuple[bytes, bytes], now_s: float = NOW.timestamp()) -> str:
        return table.identify(headers, now_s).tenant

    assert tenant((b"authorization", b"BEARER  ever ")) == "t"
    once = (b"x-api-key", b"once")
    assert tenant(once, now_s=NOW.timestamp() - 1) == "t"
    for headers, reason in (
        ([once], "EXPIRED_API_KEY"),
        ([(b"x-api-key", b"")], "INVALID_API_KEY"),
        ([(b"x-api-key", b"ever"), (b"x-api-key", b"once")], "SEVERAL_API_KEYS"),
        ([(b"authorization", b"ever"), (b"cookie", b"ever")], "NO_API_KEY"),
    ):
        with pytest.raises(Unauthenticated) as raised:
            tenant(*headers)
        assert raised.value.reason == reason


@pytest.mark.parametrize(
    ("change", "field"),
    [
        (lambda text: text.replace('"infer"', '"root"'), "tenants.t.keys.0.scopes.0"),
        (lambda text: text.replace('["infer"]', "[]"), "tenants.t.keys.0.scopes"),
        (lambda text: text.replace('"t":', '"t:":'), "tenants.t:.[key]"),
        (lambda text: text.replace('"id":', '"name":', 1), "tenants.t.keys.0.id"),
        (lambda text: text.replace('"id":"b"', '"id":"a"'), "id"),
        (lambda text: text.replace(hash_of(b"b"), hash_of(b"a")), "sha256"),
        (lambda text: text.replace("00Z", "00", 1), "tenants.t.keys.0.created"),
        (lambda text: text[:-1], ""),
    ],
)
def test_an_invalid_file_is_refused_by_its_part(change, field) -> None:  # type: ignore[no-untyped-def]
    text = document(a=None, b=None).decode()
    parse_keys(text.encode())
    with pytest.raises(InvalidRequest) as raised:
        parse_keys(change(text).encode())
    assert raised.value.field == field
    assert hash_of(b"a") not in raised.value.message


def test_a_file_that_is_being_written_is_not_logged_and_an_invalid_one_once(tmp_path: Path) -> None:
    path, text = tmp_path / "keys.json", document(a=None)
    path.write_bytes(text)
    with capture_logs() as logs:
        keys = KeyFile(path)
        for content in (b"", text[:-1], text, text[:-1], text[:-1], text[:-1], text, document()):
            path.write_bytes(content)
            keys.reload()
    assert [line["event"] for line in logs] == [
        "api_keys_loaded",
        "api_keys_rejected",
        "api_keys_loaded",
    ]
