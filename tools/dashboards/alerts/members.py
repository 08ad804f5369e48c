"""Alerts on processes: absent, silent, not in the mesh, short of something."""

from __future__ import annotations

from tools.dashboards.alerts.model import Alert, Example, counter, gauge

_SERVICES = ("frontend", "router", "indexer", "worker", "batch")
_CERTIFICATE_DAYS = 14
_DAY_S = 86_400

ALERTS = (
    Alert(
        "FrontendAbsent",
        'absent(kvmesh_instance_info{service="frontend"})',
        "1m",
        "page",
        "No frontend can be scraped",
        "Clients have no endpoint, or Prometheus finds none. Most other alerts read metrics of"
        " frontends, so they are silent too.",
        (
            "`meshctl status`: is a frontend registered and healthy?",
            "`/api/v1/targets` of Prometheus: the last error of a scrape, and of `http_sd`.",
            "`meshctl logs frontend-0`: why the last one ended.",
        ),
        (
            "Start a frontend (`meshctl start NAME`, or its unit or pod).",
            "If it runs: correct address and key of the metrics port in `prometheus.yml`.",
        ),
        Example(
            (
                gauge(
                    'kvmesh_instance_info{service="frontend", instance="frontend-0"}',
                    1,
                    None,
                ),
            ),
            {"service": "frontend"},
        ),
    ),
    Alert(
        "RoleAbsent",
        "max by (role) (kvmesh_frontend_members) == 0"
        " and max by (role) (max_over_time(kvmesh_frontend_members[1h])) > 0",
        "1m",
        "page",
        "No {{ $labels.role }} is registered any more",
        "The mesh had a member of this role within the last hour and has none now. Without routers,"
        " frontends place requests by their own load figures; without decode or aggregated workers"
        " nothing is served; without prefill workers, decode workers compute prompts if they may.",
        (
            "`meshctl status` and `meshctl doctor`: which members are left.",
            "`meshctl logs`: how the last member of the role ended.",
        ),
        (
            "Start a member of the role.",
            "If the role was removed on purpose: the alert ends an hour later; silence it.",
        ),
        Example((gauge('kvmesh_frontend_members{role="prefill"}', 2, 0),), {"role": "prefill"}),
    ),
    Alert(
        "NoWorker",
        "max(kvmesh_router_workers) == 0",
        "10s",
        "page",
        "No router sees a worker",
        "Requests wait, then fail with 503.",
        (
            "`meshctl status`: are workers registered, with a card of the same model?",
            "The log of a router: `fleet_changed`, `registry_watch_failed`.",
        ),
        ("Start a worker.", "If workers are registered: see RegistryUnreachable."),
        Example((gauge('kvmesh_router_workers{instance="router-0"}', 2, 0),), {}),
    ),
    Alert(
        "NotRoutable",
        " or ".join(f"min by (instance) (kvmesh_{name}_routable) == 0" for name in _SERVICES),
        "5m",
        "ticket",
        "{{ $labels.instance }} is not routable",
        "Its peers have not acknowledged the process, so it gets no work.",
        (
            "`meshctl status NAME`: the peers that are missing, with their reasons.",
            "`meshctl doctor`: `member_not_routable`.",
        ),
        (
            "Remove the reasons: start the peer that does not respond, or correct its settings.",
            "`meshctl restart --wait NAME` if the reason is in the process itself.",
        ),
        Example(
            (gauge('kvmesh_worker_routable{instance="worker-0"}', 1, 0),),
            {"instance": "worker-0"},
        ),
    ),
    Alert(
        "PeerGivenUp",
        "max by (instance) (kvmesh_routable_given_up) > 0",
        "1m",
        "ticket",
        "{{ $labels.instance }} serves without a peer that does not respond",
        "A registered peer never acknowledged the process within `--routable-limit-s`. The process"
        " is routable without it; the peer sends it no work.",
        (
            "`meshctl status NAME`: `given_up` names the peer and the reason.",
            "`meshctl doctor`: `member_stopped`, `member_silent` of that peer.",
        ),
        ("Restart the peer, or remove it from the registry by ending it.",),
        Example(
            (gauge('kvmesh_routable_given_up{instance="worker-0"}', 0, 1),),
            {"instance": "worker-0"},
        ),
    ),
    Alert(
        "ScrapeFails",
        'min by (instance) (up{job="kvmesh"}) == 0',
        "2m",
        "ticket",
        "{{ $labels.instance }} is registered, but its metrics cannot be read",
        "The process hangs or is stopped, its metrics port is not reachable, or the key is wrong."
        " Other alerts do not see this process.",
        (
            "`/api/v1/targets` of Prometheus: the error of the last scrape.",
            "`meshctl doctor`: `member_stopped`, `member_silent`.",
        ),
        (
            "`kill -CONT PID` if it is stopped; end it if it hangs: its supervisor starts it"
            " again.",
            "Correct `authorization` or the certificate authority in `prometheus.yml`.",
        ),
        Example((gauge('up{job="kvmesh", instance="worker-0"}', 1, 0),), {"instance": "worker-0"}),
    ),
    Alert(
        "RegistryUnreachable",
        "min by (instance) (kvmesh_registry_reachable) == 0",
        "30s",
        "page",
        "{{ $labels.instance }} cannot use the registry",
        "The process serves with the last members that it read, and others may not see it. A"
        " process that starts now has no members.",
        (
            "`meshctl doctor`: `consul_unreachable`, `consul_refuses`, `registry_unreadable`.",
            "The log of the process: `registry_lost`, `registration_lost`, `registry_unreadable`.",
        ),
        (
            "Repair Consul, or the folder of the registry. Replace no member before that.",
            "See [While the registry is unavailable]"
            "(operate/registry.md#while-the-registry-is-unavailable).",
        ),
        Example(
            (gauge('kvmesh_registry_reachable{instance="router-0"}', 1, 0),),
            {"instance": "router-0"},
        ),
    ),
    Alert(
        "CertificateExpires",
        "min by (instance, certificate) (kvmesh_certificate_expiry_timestamp_seconds) - time()"
        f" < {_CERTIFICATE_DAYS * _DAY_S}",
        "5m",
        "ticket",
        f"{{{{ $labels.certificate }}}} of {{{{ $labels.instance }}}} ends within"
        f" {_CERTIFICATE_DAYS} days",
        "Peers and clients refuse the certificate after its end: with mutual TLS the mesh falls"
        " apart member by member.",
        ("`meshctl doctor`: `certificate_ends_soon` names the files.",),
        (
            "Replace certificate and key. Services read them again by themselves; the log has"
            " `certificates_loaded`.",
        ),
        Example(
            (
                gauge(
                    "kvmesh_certificate_expiry_timestamp_seconds"
                    '{instance="frontend-0", certificate="http_tls_cert_path"}',
                    (_CERTIFICATE_DAYS + 1) * _DAY_S,
                    (_CERTIFICATE_DAYS - 1) * _DAY_S,
                ),
            ),
            {"instance": "frontend-0", "certificate": "http_tls_cert_path"},
        ),
    ),
    Alert(
        "EventLoopLags",
        "max by (instance) (rate(kvmesh_event_loop_stalled_seconds_total[5m])) > 0.1",
        "2m",
        "ticket",
        "{{ $labels.instance }} does not run for more than a tenth of the time",
        "Every request of the process waits meanwhile. The host has too few processors, or swaps.",
        (
            "The dashboard *frontend*, row *Processes*: delay, memory, tasks.",
            "Load and steal time of the host; `nr_throttled` of its cgroup.",
        ),
        (
            "Give the process a core of its own, or raise its limit of processor time.",
            "A frontend: start more, or raise `--processes`.",
        ),
        Example(
            (counter('kvmesh_event_loop_stalled_seconds_total{instance="frontend-0"}', 0, 12),),
            {"instance": "frontend-0"},
        ),
    ),
    Alert(
        "ChildProcessesEnd",
        "sum by (instance, kind) (increase(kvmesh_child_process_ends_total[10m])) > 3",
        "0s",
        "ticket",
        "{{ $labels.kind }} processes of {{ $labels.instance }} end again and again",
        "Processes that render chat templates, or try inputs, end at their limits of time or"
        " memory. Requests with such inputs fail with 400; a hostile client may be the cause.",
        (
            "The log: `template_process_ended`, `trial_process_ended`, and the requests before.",
            "The kernel's log: ended for lack of memory?",
        ),
        (
            "Revoke the key of a client that sends such inputs (`meshctl keys revoke`).",
            "If the template of a model is the cause: serve a corrected card.",
        ),
        Example(
            (
                counter(
                    'kvmesh_child_process_ends_total{instance="frontend-0", kind="template"}', 0, 1
                ),
            ),
            {"instance": "frontend-0", "kind": "template"},
        ),
    ),
    Alert(
        "RecordsLost",
        "sum by (instance, file) (increase(kvmesh_frontend_records_dropped_total[10m])) > 0",
        "0s",
        "ticket",
        "{{ $labels.instance }} loses records of {{ $labels.file }}",
        "The disk is full or slower than the requests. Requests go on; the file has gaps.",
        ("`meshctl doctor`: `disk_full`.", "The log: the error of the last write."),
        ("Free space, or move the file to a faster disk.",),
        Example(
            (
                counter(
                    'kvmesh_frontend_records_dropped_total{instance="frontend-0", file="audit"}',
                    0,
                    5,
                ),
            ),
            {"instance": "frontend-0", "file": "audit"},
        ),
    ),
    Alert(
        "SpansLost",
        "sum by (instance, endpoint) (increase(kvmesh_spans_dropped_total[10m])) > 0",
        "5m",
        "ticket",
        "{{ $labels.instance }} loses spans for {{ $labels.endpoint }}",
        "The collector does not accept them, or is slower than the requests. Requests go on; traces"
        " have gaps.",
        ("Whether the collector runs, and accepts connections from this host.", "Its own log."),
        ("Repair or enlarge the collector, or lower `--trace-sample-ratio`.",),
        Example(
            (
                counter(
                    "kvmesh_spans_dropped_total"
                    '{instance="frontend-0", endpoint="http://collector:4317"}',
                    0,
                    50,
                ),
            ),
            {"instance": "frontend-0", "endpoint": "http://collector:4317"},
        ),
    ),
    Alert(
        "DescriptorsUsed",
        "max by (instance) (process_open_fds / process_max_fds) > 0.9",
        "1m",
        "ticket",
        "{{ $labels.instance }} uses more than 90 % of its file descriptors",
        "New connections are refused soon.",
        ("`meshctl doctor`: `descriptors_used`.",),
        (
            "Raise the limit (LimitNOFILE= of systemd, --ulimit nofile= of a container engine) and"
            " restart the process.",
        ),
        Example(
            (
                gauge('process_open_fds{instance="frontend-0"}', 100, 950),
                gauge('process_max_fds{instance="frontend-0"}', 1000, 1000),
            ),
            {"instance": "frontend-0"},
        ),
    ),
)
