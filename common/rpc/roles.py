"""Which services may call which methods, if certificates name the roles of their owners.

`certificate_names.py` has the form of these names.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Final

from common.errors import PermissionDenied
from common.runtime.certificate_names import OPERATOR, certificate_name

_ENGINE: Final = "/kvmesh.engine.v1.EngineService/"
_INDEXER: Final = "/kvmesh.indexer.v1.IndexerService/"
_ROUTER: Final = "/kvmesh.router.v1.RouterService/"
# By the package of a method.
_SERVER: Final = (
    ("/kvmesh.batch.", "batch"),
    ("/kvmesh.engine.", "worker"),
    ("/kvmesh.frontend.", "frontend"),
    ("/kvmesh.indexer.", "indexer"),
    ("/kvmesh.router.", "router"),
)
# Methods that several services call.
_CALLERS: Final[Mapping[str, tuple[str, ...]]] = {
    "/kvmesh.member.v1.MemberService/Acknowledge": ("indexer", "router", "worker"),
}
# An operator may call every method.
_CALLER: Final[Mapping[str, str]] = {
    f"{_ENGINE}Attach": "frontend",
    f"{_ENGINE}GetArtifact": "frontend",
    f"{_ENGINE}ListKvBlocks": "indexer",
    f"{_INDEXER}Publish": "worker",
    f"{_INDEXER}Subscribe": "router",
    f"{_ROUTER}Session": "frontend",
    **{
        f"/kvmesh.batch.v1.BatchService/{name}": "frontend"
        for name in (
            *("UploadFile", "GetFile", "ListFiles", "DeleteFile", "ReadFile"),
            *("CreateBatch", "GetBatch", "CancelBatch", "ListBatches"),
        )
    },
    **{
        f"/kvmesh.batch.v1.StoredResponseService/{name}": "frontend"
        for name in (
            *("PutResponse", "GetStoredResponse", "DeleteStoredResponse"),
            *("StartResponse", "CancelResponse"),
        )
    },
    **{
        f"/kvmesh.batch.v1.ConversationService/{name}": "frontend"
        for name in (
            *("CreateConversation", "GetConversation", "UpdateConversation"),
            *("DeleteConversation", "AddItems", "ListItems", "GetItem", "DeleteItem"),
            "ReadConversation",
        )
    },
    "/kvmesh.frontend.v1.BackgroundResponseService/RunResponse": "batch",
    "/kvmesh.frontend.v1.BatchLineService/RunLine": "batch",
    f"{_ROUTER}Sync": "router",
    "/kvmesh.frontend.v1.ResponseStoreService/GetResponse": "frontend",
    "/kvmesh.frontend.v1.ResponseStoreService/DeleteResponse": "frontend",
}


def server_role(method: str) -> str:
    """Returns the role of the servers of a method; "" if no service has it."""
    return next((role for package, role in _SERVER if method.startswith(package)), "")


def is_for_operators(method: str) -> bool:
    """Returns whether operators call the method, and no service does."""
    return method not in _CALLER and method not in _CALLERS


def check_caller(method: str, names: Collection[str], domain: str) -> None:
    """Raises PermissionDenied if no role among a certificate's `names` may call the method."""
    roles = _CALLERS.get(method) or (_CALLER.get(method, OPERATOR),)
    if not any(certificate_name(role, domain) in names for role in (OPERATOR, *roles)):
        wanted = " or ".join(certificate_name(role, domain) for role in roles)
        raise PermissionDenied(f"{method} needs a certificate with the name {wanted}")
