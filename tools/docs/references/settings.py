"""The settings of the services, from their pydantic models."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from batch_svc.config import BatchConfig
from common.runtime.config import FILE_SUFFIX, ConfigSetting, ServiceConfig, flag_name, settings_of
from console_svc.config import ConsoleConfig
from epp_svc.config import EppConfig
from frontend_svc.config import FrontendConfig
from indexer_svc.config import IndexerConfig
from router_svc.config import RouterConfig
from tools.docs.references.text import code, page, prose, table
from worker_svc.config import WorkerConfig

SERVICES: Final[dict[str, type[ServiceConfig]]] = {
    "frontend": FrontendConfig,
    "router": RouterConfig,
    "indexer": IndexerConfig,
    "worker": WorkerConfig,
    "batch": BatchConfig,
    "console": ConsoleConfig,
    "epp": EppConfig,
}
COLUMNS: Final = ("flag and variable", "value", "default", "meaning")
# By the end of a name; the first that fits.
_UNITS: Final = {
    "_s": "seconds",
    "_secs": "seconds",
    "_ms": "milliseconds",
    "_mb": "MB",
    "_kb": "KB",
    "_bytes": "bytes",
    "_tokens": "tokens",
    "_blocks": "blocks",
    "_ratio": "share",
}
_BOUNDS: Final = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}
_NOTE = """A flag has precedence over its variable, and the variable of a service over that of all \
services. In a [mesh file](../operate/mesh-file.md), a setting has the name of its flag without \
the first dashes, and with underscores. A flag of the value `on, off` needs no value; `--no-` and \
its name turn it off. A secret can be in a file: its flag and its variables with `-file` and \
`_FILE` at the end name it."""


def settings_page() -> str:
    """Returns the page of all settings."""
    parts = [_NOTE, "## Every service", setting_table(settings_of(ServiceConfig, None))]
    for name, config in SERVICES.items():
        own = [
            setting
            for setting in settings_of(config, name.upper())
            if setting.name not in ServiceConfig.model_fields
        ]
        parts += [f"## {name.capitalize()}", setting_table(own)]
        parts.append(_changed_defaults(config))
    return page("Settings", "the configuration of the services", *parts)


def setting_table(settings: Iterable[ConfigSetting]) -> str:
    """Returns the table of settings, each with the variables that it has."""
    return table(COLUMNS, map(_row, settings))


def _row(setting: ConfigSetting) -> list[str]:
    names = [setting.flag, *setting.variables]
    if setting.is_secret:
        names.append(flag_name(setting.name + FILE_SUFFIX))
    default = "required" if setting.field.is_required() else code(setting.default_text) or "unset"
    return [" ".join(map(code, names)), _value(setting), default, prose(setting.description)]


def _value(setting: ConfigSetting) -> str:
    """Returns the type of a setting, its unit and its limits."""
    if setting.kind is bool:
        return "`on`, `off`"
    kind = setting.metavar
    if "|" in kind:
        return ", ".join(map(code, kind.split("|")))
    unit = next((unit for end, unit in _UNITS.items() if setting.name.endswith(end)), "")
    limits = [
        f"{sign} {getattr(limit, name)}"
        for limit in _constraints(setting)
        for name, sign in _BOUNDS.items()
        if getattr(limit, name, None) is not None
    ]
    return ", ".join([kind, *filter(None, [unit]), *limits])


def _constraints(setting: ConfigSetting) -> list[object]:
    """Returns the limits of a field, also those of a type that None is joined to."""
    found = list(setting.field.metadata)
    for part in getattr(setting.field.annotation, "__args__", ()):
        found += getattr(part, "__metadata__", ())
    return [
        constraint for item in found for constraint in (getattr(item, "metadata", None) or [item])
    ]


def _changed_defaults(config: type[ServiceConfig]) -> str:
    """Returns the settings of every service that have another default here."""
    lines = [
        f"- {code(flag_name(name))}: default {code(setting.default_text) or 'unset'}."
        for name, setting in ((s.name, s) for s in settings_of(config, None))
        if name in ServiceConfig.model_fields
        and setting.field.default != ServiceConfig.model_fields[name].default
    ]
    return (
        "\n".join(["Settings of every service with another default:", "", *lines]) if lines else ""
    )
