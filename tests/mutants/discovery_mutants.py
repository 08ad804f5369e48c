"""Defects of discovery (S0), and the rows whose tests must find them."""

from __future__ import annotations

from tests.mutants.mutant import mutant

_INSTANCES = "common/registry/instances.py"
_MODEL_WATCH = "frontend_svc/models/model_watch.py"
_CATALOG = "frontend_svc/models/catalog.py"
_MEMBERS = "meshctl/view/members.py"
_STATUS = "meshctl/commands/status.py"

DISCOVERY_MUTANTS = (
    mutant("S0-12", _INSTANCES, "{self.name}-{unsigned_id:x}", "{self.name}-{unsigned_id:016x}"),
    mutant("S0-12", _INSTANCES, '.sub("_", text.lower())', '.sub("_", text)'),
    mutant(
        "S0-05 S0-36",
        _MODEL_WATCH,
        "return self.model_type is EntryType.BACKEND",
        "return True",
    ),
    mutant(
        "S0-30",
        _MODEL_WATCH,
        "if served is not None and served.entry not in self._entries.values():",
        "if served is not None:",
    ),
    mutant(
        "S0-32",
        _MODEL_WATCH,
        "            del self.served[name]\n",
        "            rest = dict([*served.engines.items()][1:])\n"
        "            self.served[name] = Built(served.entry, rest)\n",
    ),
    mutant(
        "S0-07",
        _MODEL_WATCH,
        'return f"cards/{entry.checksum}"',
        'return f"cards/{entry.name}"',
    ),
    mutant(
        "S0-46",
        _MODEL_WATCH,
        "return [action for name in tuple(self.not_ready) for action in self._build_if_new(name)]",
        "return []",
    ),
    mutant(
        "S0-08",
        _CATALOG,
        "card_missing(entry) if missing else card_unreadable(entry, error)",
        "card_missing(entry)",
    ),
    mutant(
        "S0-31",
        _MODEL_WATCH,
        'return f"models/{instance.key}"',
        'return "models/" + instance.key.replace("models.", "")',
    ),
    mutant(
        "S0-45",
        _MODEL_WATCH,
        "self.served[name] = Built(build.entry, engines)",
        "self.served[name] = Built(build.entry, dict([*engines.items()][:1]))",
    ),
    mutant(
        "S0-42",
        _MODEL_WATCH,
        '            return ("chat",)\n',
        '            return ("chat", "completions")\n',
    ),
    mutant("S0-46", "frontend_svc/models/loading.py", "if models.not_ready:", "if False:"),
    mutant(
        "S0-17",
        _MEMBERS,
        "if text in (instance.stable_name, str(instance.id), instance.key):",
        "if text == instance.stable_name or instance.key.startswith(text):",
    ),
    mutant(
        "S0-03 S0-10 S0-16",
        _STATUS,
        '"key": instance.key, "endpoint": asdict(instance.endpoint)',
        '"key": instance.stable_name, "endpoint": str(instance.endpoint)',
    ),
    mutant(
        "S0-11 S0-14 S0-15 S0-21",
        _INSTANCES,
        "return self.endpoint.instance_key(self.id)",
        "return self.endpoint.instance_key(0)",
    ),
    # Entries.
    mutant(
        "S0-01 S0-02",
        _INSTANCES,
        "raw = {f.name: getattr(self, f.name) for f in fields(self)}",
        'raw = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "model"}',
    ),
    mutant(
        "S0-04 S0-26 S0-28",
        _MODEL_WATCH,
        'raise InvalidRequest(text, f"meta.{MODEL_TYPE_KEY}") from error',
        "model_type = EntryType.BACKEND",
    ),
    mutant("S0-19", "common/registry/file_view.py", 'return "<not UTF-8>"', 'return ""'),
    mutant(
        "S0-06 S0-20 S0-27",
        _MODEL_WATCH,
        "if name in self.served or name in self.building:",
        "if name in self.building:",
    ),
    mutant("S0-29 S0-33", _MODEL_WATCH, "actions.append(ModelRemoved(name))", "pass"),
    # Pipelines.
    mutant(
        "S0-34",
        "common/registry/registry.py",
        "return self._store.members(namespace).snapshot",
        'return self._store.members("elsewhere").snapshot',
    ),
    mutant(
        "S0-37",
        _MODEL_WATCH,
        'raise InvalidRequest(f"missing model deployment card: {reason}", "card_checksum")',
        'return ("chat", "completions")',
    ),
    mutant(
        "S0-38 S0-40",
        _CATALOG,
        "Engine(name, created, entry.checksum, card, model)",
        "Engine(name, created, entry.checksum, card, None)",
    ),
    mutant(
        "S0-39",
        _MODEL_WATCH,
        "in table_by_type.items() if flag in card.model_type)",
        "in table_by_type.items() if flag in card.model_type)[:1]",
    ),
    mutant(
        "S0-41 S1-40", "router_svc/app.py", "load_selector(config.selector)", 'load_selector("kv")'
    ),
    mutant(
        "S0-43 S0-44",
        _MODEL_WATCH,
        '            return ("completions",)\n',
        '            return ("chat",)\n',
    ),
)
