"""The table of all findings of doctor, with their remedies (pure).

`docs/operate/doctor.md` has the same table; a test compares both.
"""

from __future__ import annotations

from typing import Final

from meshctl.doctor.findings import Finding, Rule, Severity, Subject

_ERROR, _WARNING, _NOTE = Severity.ERROR, Severity.WARNING, Severity.NOTE

# The remedy of notes that need none.
NOTHING: Final = "nothing"

RULES = {
    rule.name: rule
    for rule in (
        # Settings and files.
        Rule(
            "setting_invalid",
            _ERROR,
            "a setting is unknown or invalid",
            "correct or unset {setting}; `--help` of the service lists its settings",
        ),
        Rule(
            "secret_missing",
            _ERROR,
            "a file of secrets does not exist or cannot be used",
            "write {path}, or name another file with {setting}; API keys: `meshctl keys create`",
        ),
        Rule(
            "secret_readable",
            _WARNING,
            "other users can read or change a file of secrets",
            "`chmod 600 {path}`",
        ),
        # Registry.
        Rule(
            "registry_unreadable",
            _ERROR,
            "the folder of the registry cannot be read",
            "run doctor as the user of the services, or set KVMESH_REGISTRY_PATH to their folder",
        ),
        Rule(
            "registry_read_only",
            _ERROR,
            "no file can be written in the folder of the registry: no service can register",
            "make {path} writable for the user of the services (owner, `mount -o remount,rw`), or"
            " set KVMESH_REGISTRY_PATH to another folder for all of them",
        ),
        Rule(
            "consul_unreachable",
            _ERROR,
            "Consul does not answer or has no leader: no service can register",
            "start the agent, or set KVMESH_CONSUL_URL to its address; members keep serving",
        ),
        Rule(
            "consul_refuses",
            _ERROR,
            "the access control of Consul refuses what a service needs",
            "set KVMESH_CONSUL_TOKEN_FILE to a token with the policy of deploy/consul_policy.hcl",
        ),
        Rule(
            "entry_not_of_mesh",
            _ERROR,
            "a registered process has another mesh token, or none; other members ignore it",
            "restart {name} with the KVMESH_MESH_TOKEN of the mesh (or start doctor with it)",
        ),
        Rule(
            "name_shared",
            _WARNING,
            "two live processes have one stable name: the mesh uses the newer one only",
            "if no replacement is in progress, end the older one ({address}), or start it with"
            " another --stable-name",
        ),
        Rule(
            "entry_orphaned",
            _WARNING,
            "the registry has an entry of a process that has ended",
            "none if it is gone: each reader of the registry removes it, and so does doctor; else"
            " `rm {path}` as its owner",
        ),
        Rule(
            "entry_unreadable",
            _WARNING,
            "the registry has a file that is no entry; members ignore it",
            "find out what wrote {path}, and remove it",
        ),
        Rule(
            "card_missing",
            _ERROR,
            "the card of a model is missing or damaged: a new frontend cannot serve the model",
            "restart one worker of {model}: it stores the card again",
        ),
        # Members.
        Rule(
            "no_members",
            _WARNING,
            "no member is registered",
            "start a mesh (`meshctl up`), or set KVMESH_NAMESPACE and the registry to those of it",
        ),
        Rule(
            "supervisor_silent",
            _ERROR,
            "a `meshctl up` runs in this folder of logs and does not answer",
            "continue it if it is stopped (`kill -CONT`), or end it and start it again",
        ),
        Rule(
            "service_failing",
            _ERROR,
            "a service of `meshctl up` ends again and again",
            "read the end of its log: `meshctl logs {name}`",
        ),
        Rule(
            "service_stopped",
            _WARNING,
            "a service of `meshctl up` is stopped",
            "`meshctl start {name}`",
        ),
        Rule(
            "member_missing",
            _ERROR,
            "a service of the mesh file is not registered",
            "start {name}, or remove it from the mesh file",
        ),
        Rule(
            "role_missing",
            _ERROR,
            "the mesh has no member of a role that others need",
            "start {role}",
        ),
        Rule(
            "member_stopped",
            _ERROR,
            "the process of a member is stopped by a signal or a debugger",
            "`kill -CONT {pid}`, or `kill -KILL {pid}`: its supervisor starts it again",
        ),
        Rule(
            "member_silent",
            _ERROR,
            "a member does not answer within the limit",
            "read its log; if it hangs, end it: its supervisor starts it again. On another host:"
            " check that {address} can be reached (--advertise-host, firewall)",
        ),
        Rule(
            "member_refuses",
            _ERROR,
            "a member refuses the mesh token or the certificate of doctor",
            "start doctor with the KVMESH_MESH_TOKEN and the KVMESH_TLS_* settings of the mesh; if"
            " other members accept it, restart {name} with them",
        ),
        Rule(
            "member_not_serving",
            _ERROR,
            "a registered member does not serve: it starts, drains or fails",
            "read its log (`meshctl logs {name}`); if the state lasts, restart {name}"
            " (`meshctl restart --wait {name}`)",
        ),
        Rule(
            "member_not_routable",
            _ERROR,
            "peers have not acknowledged a member: they send it no work yet",
            "remove the reasons that it names; a peer that does not respond is given up after"
            " --routable-limit-s",
        ),
        Rule(
            "peer_given_up",
            _WARNING,
            "a peer never acknowledged a member, which serves without it",
            "see the findings of that peer; restart it if it does not respond",
        ),
        Rule(
            "engine_failing",
            _ERROR,
            "the engine of a worker fails its probes; frontends send it no requests",
            "restart {name} (`meshctl restart --wait {name}`); if it fails again, check its"
            " accelerator and the log of the engine",
        ),
        Rule(
            "frontend_not_ready",
            _ERROR,
            "a frontend cannot serve requests",
            "remove the reasons that it names",
        ),
        Rule(
            "model_not_served",
            _ERROR,
            "the test requests of a frontend to a model fail (canaries)",
            "repair what its stage names (docs/operate/failures.md: How a model that is not served"
            " is detected); see the findings of routers and workers",
        ),
        Rule(
            "frontend_degraded",
            _WARNING,
            "a frontend serves, but a part is impaired",
            "remove the reasons that it names",
        ),
        Rule(
            "clock_too_far",
            _ERROR,
            "the clock of a member differs so much that calls with a mesh token are refused",
            "synchronize the clocks of both hosts: `timedatectl set-ntp true`",
        ),
        Rule(
            "clock_differs",
            _WARNING,
            "the clock of a member differs: times of logs and traces do not fit together",
            "synchronize the clocks of both hosts: `timedatectl set-ntp true`",
        ),
        # Index.
        Rule(
            "indexer_lost",
            _ERROR,
            "routers followed an indexer, and none is registered any more",
            "start an indexer; routers follow it without a restart",
        ),
        Rule(
            "indexer_missing",
            _WARNING,
            "workers publish KV events, and no indexer is registered",
            "start an indexer, or set KVMESH_WORKER_KV_EVENTS=off",
        ),
        Rule(
            "index_not_followed",
            _ERROR,
            "a router has no exact index of a worker although an indexer is registered",
            "check that the router reaches the indexer (`indexer_lost` in its log); if it does,"
            " restart the indexer",
        ),
        Rule(
            "index_source_missing",
            _ERROR,
            "a worker publishes KV events, and an indexer has none of them",
            "check that the worker reaches the indexer; if it does, restart worker {name}",
        ),
        Rule(
            "index_source_inexact",
            _ERROR,
            "an indexer has no exact copy of a worker's blocks: they do not count",
            "wait some seconds; if it lasts, restart worker {name}",
        ),
        Rule(
            "index_degraded",
            _WARNING,
            "an indexer has a part of a worker's blocks only",
            "events lost: flush the cache (AdminService/FlushCache) or restart worker {name}; over"
            " budget: raise KVMESH_INDEXER_BUDGET_MB",
        ),
        Rule(
            "index_drift",
            _ERROR,
            "the index and a worker disagree about the worker's blocks",
            "restart worker {name}, and report the defect with the logs of both",
        ),
        Rule(
            "index_unverified",
            _NOTE,
            "the index of a worker could not be compared with its blocks",
            "run doctor again",
        ),
        Rule(
            "index_full",
            _WARNING,
            "an indexer uses nearly all of its memory: workers must withdraw blocks",
            "raise KVMESH_INDEXER_BUDGET_MB",
        ),
        Rule(
            "hashes_differ",
            _ERROR,
            "members compute different block hashes: cached blocks are not found",
            "set the same KVMESH_MESH_KEY, block size and version for all members, and restart"
            " those that differ",
        ),
        # This host.
        Rule(
            "port_taken",
            _ERROR,
            "another process listens on a port that a setting names",
            "stop that process, or change {setting}",
        ),
        Rule(
            "port_unusable",
            _ERROR,
            "a port that a setting names cannot be bound",
            "change {setting} or the host setting beside it; ports below 1024 need privileges",
        ),
        Rule(
            "certificate_unusable",
            _ERROR,
            "a certificate cannot be read, or its key does not fit",
            "write a new certificate and key; services read them again by themselves",
        ),
        Rule(
            "certificate_expired",
            _ERROR,
            "a certificate is not valid now: peers and clients refuse it",
            "renew {place}; services read it again by themselves",
        ),
        Rule(
            "certificate_ends_soon",
            _WARNING,
            "a certificate expires soon",
            "renew {place}; services read it again by themselves",
        ),
        Rule(
            "disk_full",
            _ERROR,
            "a folder that services write to has too little space",
            "free space on the file system of {path}, or move the folder",
        ),
        Rule(
            "descriptors_too_few",
            _ERROR,
            "the hard limit of file descriptors is so low that services do not start",
            "raise it: `ulimit -Hn {wanted}`, LimitNOFILE= of systemd, --ulimit nofile= of a"
            " container engine",
        ),
        Rule(
            "descriptors_few",
            _WARNING,
            "the hard limit of file descriptors reduces the connections of a frontend",
            "raise it: `ulimit -Hn {wanted}`, LimitNOFILE= of systemd, --ulimit nofile= of a"
            " container engine",
        ),
        Rule(
            "descriptors_used",
            _WARNING,
            "a member uses nearly all of its file descriptors",
            "raise its limit (LimitNOFILE= of systemd, --ulimit nofile= of a container engine) and"
            " restart {name}",
        ),
        Rule(
            "versions_differ",
            _WARNING,
            "members are of different versions or forms",
            "finish the upgrade: replace {names} by the version of the others",
        ),
        Rule(
            "not_compiled",
            _NOTE,
            "services run from source and not as compiled modules: a router serves fewer decisions",
            "use the images, or `pip install .` with a C compiler (see Compiled modules)",
        ),
        Rule("python", _NOTE, "the Python that runs doctor", NOTHING),
        Rule("cores", _NOTE, "the processor cores of this host", NOTHING),
    )
}


def finding(name: str, subject: Subject, found: str, /, **parts: object) -> Finding:
    """Returns a finding of the rule with this name. parts: those of its remedy."""
    rule = RULES[name]
    return Finding(name, rule.severity, subject, found, rule.remedy.format_map(parts))
