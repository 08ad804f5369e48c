"""`meshctl keys`: creates, lists, revokes and rotates the API keys of a file, and sets limits."""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import os
import secrets
import stat
import sys
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path

from common.api_keys import ApiKey, KeyDocument, Limits, Permission, Tenant, hash_of, parse_keys
from common.errors import MeshError, NotFound
from meshctl.view.screen import align

VARIABLE = "KVMESH_FRONTEND_API_KEYS"
_DEFAULT_SCOPES = f"{Permission.INFER},{Permission.EMBEDDINGS}"
_KEY_BYTES = 32


def keys(argv: Sequence[str], environ: Mapping[str, str]) -> int:
    """Runs a command line; returns its exit status. A new key is the only line of the output."""
    options = _parser(environ).parse_args(argv)
    path, now = options.api_keys, datetime.now(UTC).replace(microsecond=0)
    try:
        match options.command:
            case "create":
                scopes = _read_scopes(options.scopes)
                key, text = _new_key(scopes, now, options.days)
                with _edited(path) as tenants:
                    _add(tenants, options.tenant, key)
            case "rotate":
                end = now + timedelta(seconds=options.overlap_s)
                with _edited(path) as tenants:
                    tenant, old = _removed(tenants, options.id)
                    old = old.model_copy(update={"expires": min(old.expires or end, end)})
                    key, text = _new_key(old.scopes, now, options.days)
                    _add(tenants, tenant, old, key)
            case "limits":
                limits = Limits(
                    requests_per_s=options.requests_per_s,
                    tokens_per_min=options.tokens_per_min,
                    concurrency=options.concurrency,
                    weight=options.weight,
                )
                with _edited(path) as tenants:
                    _limit(tenants, options.tenant, limits)
                return 0
            case "revoke":
                with _edited(path) as tenants:
                    _removed(tenants, options.id)
                return 0
            case _:
                _print_keys(parse_keys(path.read_bytes()))
                return 0
    except (OSError, ValueError, MeshError) as error:
        sys.stderr.write(f"meshctl keys: {error}\n")
        return 1
    # Only after the file has it.
    sys.stderr.write(f"{key.id}: this is the only time that the key is shown\n")
    sys.stdout.write(f"{text}\n")
    return 0


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
    if name not in tenants:
        raise NotFound(f"no tenant has the name {name!r}")
    tenants[name] = tenants[name].model_copy(update={"limits": limits})


def _removed(tenants: dict[str, Tenant], key_id: str) -> tuple[str, ApiKey]:
    """Removes a key; returns its tenant and the key. Raises NotFound."""
    for name, tenant in tenants.items():
        for key in tenant.keys:
            if key.id == key_id:
                others = tuple(other for other in tenant.keys if other is not key)
                tenants[name] = tenant.model_copy(update={"keys": others})
                return name, key
    raise NotFound(f"no key has the id {key_id!r}")


@contextlib.contextmanager
def _edited(path: Path) -> Iterator[dict[str, Tenant]]:
    """Replaces a file, in one step, by the tenants that the block leaves; creates it. Other edits
    wait."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        document, mode = KeyDocument(), 0o600
        if path.exists():
            document, mode = parse_keys(path.read_bytes()), stat.S_IMODE(path.stat().st_mode)
        tenants = dict(document.tenants)
        yield tenants
        document = document.model_copy(update={"tenants": tenants})
        text = document.model_dump_json(indent=2, exclude_defaults=True).encode() + b"\n"
        parse_keys(text)
        new = path.with_name(f".{path.name}.new")
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
        with open(os.open(new, flags, 0o600), "wb") as file:
            os.fchmod(file.fileno(), mode)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(new, path)
        os.fsync(folder)
    finally:
        os.close(folder)


def _print_keys(document: KeyDocument) -> None:
    rows = [("ID", "TENANT", "SCOPES", "CREATED", "EXPIRES")]
    for tenant, key in document.entries():
        expires = "never" if key.expires is None else key.expires.isoformat()
        rows.append(
            (key.id, tenant, ",".join(sorted(key.scopes)), key.created.isoformat(), expires)
        )
    sys.stdout.writelines(f"{line}\n" for line in align(rows))


def _parser(environ: Mapping[str, str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="meshctl keys",
        description="Creates, lists, revokes and rotates the API keys of the frontend's file. A "
        "running frontend reads the change within 2 s.",
        allow_abbrev=False,
    )
    default = environ.get(VARIABLE)
    parser.add_argument(
        "--api-keys",
        metavar="FILE",
        type=Path,
        default=default and Path(default),
        required=not default,
        help=f"file of the keys, or {VARIABLE}; created if it is missing",
    )
    commands = parser.add_subparsers(dest="command", required=True)
    create = commands.add_parser("create", help="add a key, and print it")
    create.add_argument("tenant", help="name of the client: letters, digits, '.', '_', '-'")
    scopes = ", ".join(Permission)
    create.add_argument(
        "--scopes", default=_DEFAULT_SCOPES, help=f"of {scopes}; default {_DEFAULT_SCOPES}"
    )
    limits = commands.add_parser("limits", help="set the limits of a tenant; unset: no limit")
    limits.add_argument("tenant", help="its name: see list")
    limits.add_argument("--requests-per-s", type=float, help="requests a second")
    limits.add_argument("--tokens-per-min", type=int, help="tokens a minute, prompts and output")
    limits.add_argument("--concurrency", type=int, help="requests at a time")
    limits.add_argument(
        "--weight", type=float, default=1.0, help="share of busy workers, relative to others"
    )
    commands.add_parser("list", help="show all keys, without the keys themselves")
    revoke = commands.add_parser("revoke", help="remove a key")
    rotate = commands.add_parser("rotate", help="add a key like another one, which then expires")
    for command in (revoke, rotate):
        command.add_argument("id", help="of the key: see list")
    for command in (create, rotate):
        command.add_argument("--days", type=float, help="until the new key expires; unset: never")
    rotate.add_argument(
        "--overlap-s",
        type=float,
        default=86_400.0,
        help="seconds for which the old key stays valid; default 86400",
    )
    return parser
