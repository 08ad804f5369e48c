"""`meshctl keys`: creates, lists, revokes and rotates the API keys of a file, and sets limits."""

from __future__ import annotations

import json
import secrets
import sys
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path

# Any: of click.
from typing import Any

import click

from common.access.key_file import edited_tenants, remove_key
from common.api_keys import ApiKey, KeyDocument, Limits, Permission, Tenant, hash_of, parse_keys
from common.errors import MeshError, NotFound
from meshctl.options import json_flag
from meshctl.usage import Command, Group
from meshctl.view.screen import align

VARIABLE = "KVMESH_FRONTEND_API_KEYS"
_DEFAULT_SCOPES = f"{Permission.INFER},{Permission.EMBEDDINGS}"
_KEY_BYTES = 32


class _KeysCommand(Command):
    """A command on the file of the keys, which its function receives as the first argument."""

    def invoke(self, ctx: click.Context) -> Any:
        assert ctx.parent is not None
        assert self.callback is not None
        path = ctx.parent.params["api_keys"] or ctx.obj.get(VARIABLE)
        if not path:
            message = f"--api-keys: required and not given; it can also be the variable {VARIABLE}"
            raise click.UsageError(message, ctx.parent)
        try:
            return ctx.invoke(self.callback, Path(path), **ctx.params)
        except (OSError, ValueError, MeshError) as error:
            sys.stderr.write(f"meshctl keys: {error}\n")
            return 1


command = Group(
    "keys",
    help="Creates, lists, revokes and rotates the API keys of the frontend's file. A running "
    "frontend reads the change within 2 s.",
    params=[
        click.Option(
            ["--api-keys"],
            metavar="FILE",
            type=click.Path(),
            help=f"File of the keys, or {VARIABLE}; created if it is missing.",
        )
    ],
)
_days = click.option("--days", type=float, help="Days until the new key expires. Unset: never.")
_id = click.argument("key_id", metavar="ID")


@command.command("create", cls=_KeysCommand)
@click.argument("tenant")
@click.option(
    "--scopes",
    default=_DEFAULT_SCOPES,
    help=f"Of {', '.join(Permission)}; default {_DEFAULT_SCOPES}.",
)
@_days
@json_flag
def create(path: Path, tenant: str, scopes: str, days: float | None, as_json: bool) -> None:
    """Adds a key, and prints it.

    TENANT is the name of the client: letters, digits, '.', '_', '-'.
    """
    key, text = _new_key(_read_scopes(scopes), _now(), days)
    with edited_tenants(path) as tenants:
        _add(tenants, tenant, key)
    _print_new_key(tenant, key, text, as_json=as_json)


@command.command("list", cls=_KeysCommand)
@json_flag
def list_(path: Path, as_json: bool) -> None:
    """Shows all keys, without the keys themselves."""
    document = parse_keys(path.read_bytes())
    if as_json:
        rows = [_json_object(tenant, key) for tenant, key in document.entries()]
        sys.stdout.write(json.dumps(rows) + "\n")
    else:
        _print_keys(document)


@command.command("limits", cls=_KeysCommand)
@click.argument("tenant")
@click.option("--requests-per-s", type=float, help="Requests a second.")
@click.option("--tokens-per-min", type=int, help="Tokens a minute, of prompts and output.")
@click.option("--concurrency", type=int, help="Requests at a time.")
@click.option("--weight", type=float, help="Share of busy workers, relative to others; default 1.")
@click.option("--none", "has_none", is_flag=True, help="Remove all limits.")
@json_flag
def limits(path: Path, tenant: str, has_none: bool, as_json: bool, **values: Any) -> None:
    """Sets the limits of a tenant, and prints them; without flags, prints those in force.

    A call with flags sets all limits: those that are not given are removed.
    """
    given = {name: value for name, value in values.items() if value is not None}
    if given and has_none:
        raise click.UsageError("--none removes all limits: it takes no limit beside it")
    if given or has_none:
        new = Limits(**given)
        with edited_tenants(path) as tenants:
            _limit(tenants, tenant, new)
    _print_limits(_tenant(parse_keys(path.read_bytes()).tenants, tenant).limits, as_json=as_json)


@command.command("revoke", cls=_KeysCommand)
@_id
def revoke(path: Path, key_id: str) -> None:
    """Removes a key."""
    with edited_tenants(path) as tenants:
        remove_key(tenants, key_id)


@command.command("rotate", cls=_KeysCommand)
@_id
@_days
@click.option(
    "--overlap-s",
    type=float,
    default=86_400.0,
    help="Seconds for which the old key stays valid; default 86400.",
)
@json_flag
def rotate(path: Path, key_id: str, days: float | None, overlap_s: float, as_json: bool) -> None:
    """Adds a key like another one, which then expires."""
    now = _now()
    end = now + timedelta(seconds=overlap_s)
    with edited_tenants(path) as tenants:
        tenant, old = remove_key(tenants, key_id)
        old = old.model_copy(update={"expires": min(old.expires or end, end)})
        key, text = _new_key(old.scopes, now, days)
        _add(tenants, tenant, old, key)
    _print_new_key(tenant, key, text, as_json=as_json)


def _now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def _print_new_key(tenant: str, key: ApiKey, text: str, *, as_json: bool) -> None:
    """Prints a key that the file already has, as the only line of the output."""
    sys.stderr.write(f"{key.id}: this is the only time that the key is shown\n")
    shown = json.dumps(_json_object(tenant, key) | {"key": text}) if as_json else text
    sys.stdout.write(f"{shown}\n")


def _json_object(tenant: str, key: ApiKey) -> dict[str, object]:
    """Returns a key without its text, for programs."""
    return {
        "id": key.id,
        "tenant": tenant,
        "scopes": sorted(key.scopes),
        "created": key.created.isoformat(),
        "expires": None if key.expires is None else key.expires.isoformat(),
    }


def _read_scopes(text: str) -> frozenset[Permission]:
    """Returns the permissions that `--scopes` names. Raises ValueError for an unknown one."""
    names = text.split(",")
    if unknown := [name for name in names if name not in frozenset(Permission)]:
        raise ValueError(f"{unknown[0]!r} is not a valid Scope")
    return frozenset(map(Permission, names))


def _new_key(
    scopes: frozenset[Permission], now: datetime, days: float | None
) -> tuple[ApiKey, str]:
    """Returns a key, and its text. days: until it expires; None: never."""
    text = f"kvmesh_{secrets.token_urlsafe(_KEY_BYTES)}"
    expires = None if days is None else now + timedelta(days=days)
    id_ = f"key_{secrets.token_hex(4)}"
    key = ApiKey(id=id_, sha256=hash_of(text.encode()), scopes=scopes, created=now, expires=expires)
    return key, text


def _add(tenants: dict[str, Tenant], name: str, *keys: ApiKey) -> None:
    tenant = tenants.get(name, Tenant())
    tenants[name] = tenant.model_copy(update={"keys": (*tenant.keys, *keys)})


def _limit(tenants: dict[str, Tenant], name: str, limits: Limits) -> None:
    """Raises NotFound."""
    tenants[name] = _tenant(tenants, name).model_copy(update={"limits": limits})


def _tenant(tenants: Mapping[str, Tenant], name: str) -> Tenant:
    """Raises NotFound."""
    if name not in tenants:
        raise NotFound(f"no tenant has the name {name!r}")
    return tenants[name]


def _print_limits(limits: Limits, *, as_json: bool) -> None:
    values = limits.model_dump()
    if as_json:
        sys.stdout.write(json.dumps(values) + "\n")
        return
    rows = [(name, "none" if value is None else f"{value:g}") for name, value in values.items()]
    sys.stdout.writelines(f"{line}\n" for line in align(rows))


def _print_keys(document: KeyDocument) -> None:
    rows = [("ID", "TENANT", "SCOPES", "CREATED", "EXPIRES")]
    for tenant, key in document.entries():
        expires = "never" if key.expires is None else key.expires.isoformat()
        rows.append(
            (key.id, tenant, ",".join(sorted(key.scopes)), key.created.isoformat(), expires)
        )
    sys.stdout.writelines(f"{line}\n" for line in align(rows))
