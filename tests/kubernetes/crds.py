"""Schemas of the custom resources of deploy/kubernetes: the fields that it uses, and no others.

No package of the supported versions of Python has the schemas of these kinds. Fields, types and
values are those of prometheus-operator 0.93, KEDA 2.20, the inference extension of the Gateway API
1.5, the Gateway API 1.5 and Istio 1.30.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

# JSON schema.
Schema = dict[str, Any]

_TEXT: Final[Schema] = {"type": "string", "minLength": 1}
_TEXTS: Final[Schema] = {"type": "object", "additionalProperties": {"type": "string"}}
_DURATION: Final[Schema] = {"type": "string", "pattern": r"^(\d+(ms|s|m|h|d))+$"}
_COUNT: Final[Schema] = {"type": "integer", "minimum": 0}
_NAMES: Final[Schema] = {"type": "array", "items": _TEXT, "minItems": 1}


def _object(required: Mapping[str, Schema], optional: Mapping[str, Schema] | None = None) -> Schema:
    return {
        "type": "object",
        "properties": {**required, **(optional or {})},
        "required": [*required],
        "additionalProperties": False,
    }


def _resource(api_version: str, kind: str, spec: Schema) -> Schema:
    metadata = _object({"name": _TEXT, "namespace": _TEXT, "labels": _TEXTS})
    return _object(
        {
            "apiVersion": {"const": api_version},
            "kind": {"const": kind},
            "metadata": metadata,
            "spec": spec,
        }
    )


_SELECTOR: Final = _object(
    {"matchLabels": _TEXTS},
    {
        "matchExpressions": {
            "type": "array",
            "items": _object(
                {"key": _TEXT, "operator": {"enum": ["In", "NotIn"]}, "values": _NAMES}
            ),
        }
    },
)
_RELABELING: Final = _object({"targetLabel": _TEXT}, {"replacement": _TEXT, "sourceLabels": _NAMES})
_KEEP: Final = _object({"action": {"const": "keep"}, "sourceLabels": _NAMES, "regex": _TEXT})
_AUTHORIZATION: Final = _object(
    {"type": {"const": "Bearer"}, "credentials": _object({"name": _TEXT, "key": _TEXT})}
)
_ENDPOINT: Final = _object(
    {
        "port": _TEXT,
        "interval": _DURATION,
        "authorization": _AUTHORIZATION,
        "relabelings": {"type": "array", "items": _RELABELING},
    }
)
_MONITOR: Final = _object(
    {
        "selector": _SELECTOR,
        "podMetricsEndpoints": {"type": "array", "items": _ENDPOINT, "minItems": 1},
    }
)
_TARGETS: Final = _object(
    {
        "url": {"type": "string", "pattern": "^https?://"},
        "refreshInterval": _DURATION,
        "authorization": _AUTHORIZATION,
    }
)
_SCRAPE: Final = _object(
    {
        "httpSDConfigs": {"type": "array", "items": _TARGETS, "minItems": 1},
        "authorization": _AUTHORIZATION,
        "scrapeInterval": _DURATION,
        "relabelings": {"type": "array", "items": {"anyOf": [_RELABELING, _KEEP]}},
    }
)
_RULE: Final = _object(
    {"alert": _TEXT, "expr": _TEXT, "labels": _TEXTS, "annotations": _TEXTS}, {"for": _DURATION}
)
_RULES: Final = _object(
    {
        "groups": {
            "type": "array",
            "items": _object({"name": _TEXT, "rules": {"type": "array", "items": _RULE}}),
        }
    }
)
_STEPS: Final = _object(
    {
        "stabilizationWindowSeconds": {**_COUNT, "maximum": 3600},
        "tolerance": {"anyOf": [{"type": "integer"}, {"type": "string"}]},
    }
)
_TRIGGER: Final = _object(
    {
        "type": {"const": "prometheus"},
        "metricType": {"enum": ["AverageValue", "Value"]},
        # KEDA reads numbers and conditions as texts.
        "metadata": _object(
            {
                "serverAddress": {"type": "string", "pattern": "^https?://"},
                "query": _TEXT,
                "threshold": {"type": "string", "pattern": r"^\d+(\.\d+)?$"},
            },
            {
                "activationThreshold": {"type": "string", "pattern": r"^\d+(\.\d+)?$"},
                "ignoreNullValues": {"enum": ["true", "false"]},
            },
        ),
    }
)
_SCALED_OBJECT: Final = _object(
    {
        "scaleTargetRef": _object({"name": _TEXT}),
        "pollingInterval": {"type": "integer", "minimum": 1},
        "minReplicaCount": _COUNT,
        "maxReplicaCount": {"type": "integer", "minimum": 1},
        "advanced": _object(
            {
                "horizontalPodAutoscalerConfig": _object(
                    {"behavior": _object({"scaleUp": _STEPS, "scaleDown": _STEPS})}
                )
            }
        ),
        "triggers": {"type": "array", "items": _TRIGGER, "minItems": 1},
    }
)
_NAME: Final[Schema] = {
    "type": "string",
    "pattern": "^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$",
    "maxLength": 253,
}
_PORT: Final = _object({"number": {"type": "integer", "minimum": 1, "maximum": 65_535}})
_POOL: Final = _object(
    {
        # One value a label, as in the selector of a Service.
        "selector": _object({"matchLabels": {**_TEXTS, "minProperties": 1}}),
        "targetPorts": {
            "type": "array",
            "items": _PORT,
            "minItems": 1,
            "maxItems": 8,
            "uniqueItems": True,
        },
        # The port is required for a Service, which is the default of `kind`.
        "endpointPickerRef": _object(
            {"name": _NAME, "port": _PORT}, {"failureMode": {"enum": ["FailOpen", "FailClose"]}}
        ),
    },
    {"appProtocol": {"enum": ["http", "kubernetes.io/h2c"]}},
)
_ROUTE: Final = _object(
    {
        "parentRefs": {"type": "array", "items": _object({"name": _NAME}), "minItems": 1},
        "rules": {
            "type": "array",
            "items": _object(
                {
                    "matches": {
                        "type": "array",
                        "items": _object(
                            {
                                "path": _object(
                                    {
                                        "type": {"enum": ["Exact", "PathPrefix"]},
                                        "value": {"type": "string", "pattern": "^/"},
                                    }
                                )
                            }
                        ),
                    },
                    "backendRefs": {
                        "type": "array",
                        "items": _object(
                            {
                                "group": {"const": "inference.networking.k8s.io"},
                                "kind": {"const": "InferencePool"},
                                "name": _NAME,
                            }
                        ),
                    },
                    "timeouts": _object(
                        {"request": {"type": "string", "pattern": "^\\d+(ms|s|m|h)$"}}
                    ),
                }
            ),
            "minItems": 1,
            "maxItems": 16,
        },
    }
)
_DESTINATION: Final = _object(
    {
        "host": _NAME,
        "trafficPolicy": _object(
            {
                "tls": _object(
                    {
                        "mode": {"enum": ["DISABLE", "SIMPLE", "MUTUAL", "ISTIO_MUTUAL"]},
                        "insecureSkipVerify": {"type": "boolean"},
                    }
                )
            }
        ),
    }
)
# By API version and kind.
SCHEMAS: Final[Mapping[tuple[str, str], Schema]] = {
    key: _resource(*key, spec)
    for key, spec in {
        ("monitoring.coreos.com/v1", "PodMonitor"): _MONITOR,
        ("monitoring.coreos.com/v1alpha1", "ScrapeConfig"): _SCRAPE,
        ("monitoring.coreos.com/v1", "PrometheusRule"): _RULES,
        ("keda.sh/v1alpha1", "ScaledObject"): _SCALED_OBJECT,
        ("inference.networking.k8s.io/v1", "InferencePool"): _POOL,
        ("gateway.networking.k8s.io/v1", "HTTPRoute"): _ROUTE,
        ("networking.istio.io/v1", "DestinationRule"): _DESTINATION,
    }.items()
}
