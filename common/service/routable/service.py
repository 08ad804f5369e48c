"""MemberService over gRPC, and its client functions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import grpc.aio

from common.errors import Unimplemented
from common.rpc import channel as rpc
from common.service.routable.peers import Routable, WaitingPeer
from common.streams.backoff import Backoff
from common.streams.silence import ACKNOWLEDGE
from kvmesh.member.v1 import member_pb2, member_pb2_grpc

READ_TIMEOUT_S = 2.0
# Pause between two looks at the state of a process whose caller waits for a change.
FIRST_LOOK_S, LONGEST_LOOK_S = 0.01, 0.1

Context = grpc.aio.ServicerContext[Any, Any]

# Takes a member's id and whether it leaves; returns why it is not acknowledged, "" if it is.
ReasonAgainst = Callable[[int, bool], Awaitable[str]]


class MemberServicer(member_pb2_grpc.MemberServiceServicer):
    """The state of this process, for its peers and for operators.

    reason_against: of this process.
    read_state: returns whether this process is routable.
    """

    def __init__(self, reason_against: ReasonAgainst, read_state: Callable[[], Routable]) -> None:
        self._reason_against = reason_against
        self._read_state = read_state

    async def Acknowledge(
        self, request: member_pb2.AcknowledgeRequest, context: Context
    ) -> member_pb2.AcknowledgeResponse:
        loop = asyncio.get_running_loop()
        respond_at = loop.time() + ACKNOWLEDGE.heartbeat_s
        pause = Backoff(FIRST_LOOK_S, LONGEST_LOOK_S, None)
        while reason := await self._reason_against(request.instance_id, request.is_leaving):
            # A process that leaves responds at once: its callers do not wait for it any more.
            pause_s = pause.next_s()
            if self._read_state().is_leaving or loop.time() + pause_s > respond_at:
                break
            await asyncio.sleep(pause_s)
        return member_pb2.AcknowledgeResponse(is_acknowledged=not reason, reason=reason)

    async def GetRoutable(
        self, request: member_pb2.GetRoutableRequest, context: Context
    ) -> member_pb2.GetRoutableResponse:
        state = self._read_state()
        return member_pb2.GetRoutableResponse(
            is_routable=state.is_routable,
            is_leaving=state.is_leaving,
            missing=_peers_to_proto(state.missing),
            given_up=_peers_to_proto(state.given_up),
        )


async def read_routable(
    channel: rpc.MeshChannel, *, timeout_s: float = READ_TIMEOUT_S
) -> Routable | None:
    """Returns whether the member at the other end of a channel is routable, and the peers that it
    waits for; None if it is of an earlier version, which does not report it.

    Raises MeshError if it does not respond.
    """
    stub = member_pb2_grpc.MemberServiceStub(channel)
    request = member_pb2.GetRoutableRequest()
    try:
        response: member_pb2.GetRoutableResponse
        response = await rpc.unary(stub.GetRoutable, request, timeout_s=timeout_s)
    except Unimplemented:
        return None
    return Routable(
        response.is_routable,
        response.is_leaving,
        tuple(map(_peer_from_proto, response.missing)),
        tuple(map(_peer_from_proto, response.given_up)),
    )


async def read_reason(
    channel: rpc.MeshChannel, member_id: int, *, is_leaving: bool, timeout_s: float
) -> str:
    """Returns why a peer does not acknowledge a member, within its heartbeat; "" if it does, or is
    of an earlier version. Raises MeshError if it does not respond."""
    stub = member_pb2_grpc.MemberServiceStub(channel)
    request = member_pb2.AcknowledgeRequest(instance_id=member_id, is_leaving=is_leaving)
    try:
        response: member_pb2.AcknowledgeResponse
        response = await rpc.unary(stub.Acknowledge, request, timeout_s=timeout_s)
    except Unimplemented:
        return ""
    return "" if response.is_acknowledged else response.reason or "no reason is stated"


def _peers_to_proto(peers: Iterable[WaitingPeer]) -> list[member_pb2.WaitingPeer]:
    return [
        member_pb2.WaitingPeer(
            instance_id=peer.instance_id,
            stable_name=peer.stable_name,
            service=peer.service,
            reason=peer.reason,
        )
        for peer in peers
    ]


def _peer_from_proto(peer: member_pb2.WaitingPeer) -> WaitingPeer:
    return WaitingPeer(peer.instance_id, peer.stable_name, peer.service, peer.reason)
