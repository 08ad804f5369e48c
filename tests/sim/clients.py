"""Clients of a simulated mesh: their requests, expected responses and behaviour."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, cast

from common.errors import MeshError
from common.kv.hashing import HASH_SCHEME_ID, PrefixHasher
from common.request.preprocessed import (
    FinishReason,
    OutputOptions,
    PreprocessedRequest,
    RoutingHints,
    SessionAction,
    SessionControl,
    StopConditions,
    TokenIds,
    TokenLogprob,
)
from frontend_svc.request.buffer import UNREAD_TOKENS_MAX, ResponseBuffer
from frontend_svc.request.handle import RequestHandle
from frontend_svc.request.types import RequestOutcome, RequestPlan
from tests.kit.placements import placement_request
from tests.sim.fleet import MODEL, SimFrontend
from worker_svc.engines.sim.token_oracle import TokenOracle

DEADLINE_S = 120.0
# Conversations are truncated to this length, so that every engine has capacity for them.
_TURN_TOKENS_MAX = 600


@dataclass(frozen=True, slots=True)
class ClientSpec:
    """One client: its request and its behaviour. Times are virtual seconds, relative to `at`.

    disconnect_after_s: when it disconnects. stop_after_tokens: tokens after which its stop string
    is complete. pause_s: how long it takes to read. unread_max: with more unread tokens the
    request must be ended, None: never. target_draw: 0..1, selects its frontend. lora: its adapter.
    session, action: its session, and the operation on it. strict_priority, priority_jump_s: its
    position in a router's queue.
    """

    number: int
    at: float
    prompt: tuple[int, ...]
    stop: StopConditions
    deadline_s: float = DEADLINE_S
    disconnect_after_s: float | None = None
    stop_after_tokens: int | None = None
    pause_s: float = 0.0
    migratable: bool = True
    logprobs: int | None = None
    target_draw: float = 0.0
    model: str = MODEL
    lora: str = ""
    session: str = ""
    action: SessionAction | None = None
    strict_priority: int = 0
    priority_jump_s: float = 0.0
    unread_max: int | None = None

    @property
    def request_id(self) -> str:
        """Unique in the mesh."""
        return f"r{self.number}"

    @property
    def routing(self) -> RoutingHints | None:
        """Routing hints of the request, None if it has none."""
        if not (self.lora or self.session or self.priority_jump_s):
            return None
        return RoutingHints(
            lora_name=self.lora or None,
            priority_jump=self.priority_jump_s or None,
            session_control=SessionControl(self.session, self.action) if self.session else None,
        )


def expected_response(
    spec: ClientSpec, token_oracle: TokenOracle
) -> tuple[list[int], FinishReason]:
    """The whole response of the model, and its finish reason."""
    stop = spec.stop
    limit = stop.max_tokens or 0
    minimum = stop.min_tokens or 0
    tokens = token_oracle.continue_tokens(
        spec.prompt,
        limit,
        ignore_eos=bool(stop.ignore_eos),
        min_tokens=minimum,
        lora_name=spec.lora,
    )
    if not stop.ignore_eos:
        for index in range(minimum, len(tokens)):
            if tokens[index] in stop.stop_token_ids_visible:
                return tokens[: index + 1], FinishReason.STOP
            if tokens[index] in stop.stop_token_ids_hidden:
                return tokens[:index], FinishReason.STOP
    return tokens, FinishReason.LENGTH if len(tokens) == limit else FinishReason.EOS


class _NullMeter:
    """A meter that counts nothing."""

    def tokens(self, count: int, now: float) -> None:
        pass


@dataclass(eq=False)
class Client:
    """An open client: the request's ResponseSink, in front of a real `ResponseBuffer`."""

    spec: ClientSpec
    expected: list[int]
    expected_finish: FinishReason
    on_tokens: Callable[[Client, list[int]], None]
    on_finish: Callable[[Client, RequestOutcome], None]
    began_at: float = 0.0
    placed_at: float | None = None
    frontend: SimFrontend | None = None
    handle: RequestHandle | None = None
    delivered: list[int] = field(default_factory=list)
    outcomes: list[RequestOutcome] = field(default_factory=list)
    read: int = 0
    ended_at: float | None = None
    # Whether it disconnected, or stopped, before the end.
    has_disconnected: bool = False
    has_stopped: bool = False
    _token_weight: int = 1
    _buffer: ResponseBuffer | None = None

    @property
    def is_slow_reader(self) -> bool:
        """Whether more tokens are unread than allowed."""
        unread_limit = self.spec.unread_max
        unread = (len(self.delivered) - self.read) * self._token_weight
        return unread_limit is not None and unread > unread_limit

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        """See ResponseSink."""
        if logprobs:  # each counts as one token more, and so does each alternative
            self._token_weight = 2 + len(logprobs[-1].top)
        self.on_tokens(self, token_ids)
        assert self._buffer is not None
        self._buffer.tokens(token_ids, logprobs)

    def finished(self, outcome: RequestOutcome) -> None:
        """See ResponseSink."""
        self.on_finish(self, outcome)
        assert self._buffer is not None
        self._buffer.finished(outcome)

    async def run(self, frontend: SimFrontend, hasher: PrefixHasher) -> None:
        """Opens the request and reads to the end, like the HTTP endpoint."""
        loop = asyncio.get_running_loop()
        spec = self.spec
        self.frontend, self.began_at = frontend, loop.time()
        # Any: a meter has many methods, a ResponseBuffer uses one.
        unread_limit = UNREAD_TOKENS_MAX if spec.unread_max is None else spec.unread_max

        def fail(error: MeshError, reason: str) -> None:
            handle.fail(error, reason)

        response = self._buffer = ResponseBuffer(
            cast(Any, _NullMeter()), loop.time, fail, unread_max=unread_limit
        )
        request = PreprocessedRequest(
            model=spec.model,
            token_ids=TokenIds.of(spec.prompt),
            stop_conditions=spec.stop,
            output_options=OutputOptions(logprobs=spec.logprobs),
            routing=spec.routing,
        )
        plan = RequestPlan(spec.request_id, request, loop.time() + spec.deadline_s, spec.migratable)
        query = placement_request(
            spec.model,
            0,
            loop.time(),
            hash_scheme=HASH_SCHEME_ID,
            block_size=hasher.block_size,
            routing=spec.routing,
            strict_priority=spec.strict_priority,
            hasher=hasher,
        ).extended(request.token_ids, len(request.token_ids))
        handle = self.handle = frontend.gateway.open(plan, query, self)
        disconnect_timer = None
        if spec.disconnect_after_s is not None:
            disconnect_timer = loop.call_later(spec.disconnect_after_s, self._disconnect)
        try:
            await self._read(response)
        finally:
            if disconnect_timer is not None:
                disconnect_timer.cancel()

    async def _read(self, response: ResponseBuffer) -> None:
        spec = self.spec
        while True:
            tokens = await response.next()
            self.read += len(tokens)
            if (
                spec.stop_after_tokens is not None
                and self.read >= spec.stop_after_tokens
                and not self.outcomes
            ):
                self.has_stopped = True
                assert self.handle is not None
                self.handle.stop()
                return
            if not tokens:
                return
            if spec.pause_s:
                await asyncio.sleep(spec.pause_s)

    def _disconnect(self) -> None:
        if not self.outcomes and self.handle is not None:
            self.has_disconnected = True
            self.handle.abort()


def draw_client_specs(
    rng: Random, count: int, until: float, token_oracle: TokenOracle, *, long_prompts: bool
) -> tuple[ClientSpec, ...]:
    """`count` clients that arrive before `until`; many prompts have a common prefix."""
    prefixes = [_ids(rng, rng.randrange(1, 120)) for _ in range(6)]
    client_specs = [
        _draw(rng, number, until, prefixes, token_oracle, long_prompts=long_prompts)
        for number in range(count)
    ]
    return tuple(sorted(client_specs, key=lambda spec: spec.at))


def _draw(
    rng: Random,
    number: int,
    until: float,
    prefixes: Sequence[tuple[int, ...]],
    token_oracle: TokenOracle,
    *,
    long_prompts: bool,
) -> ClientSpec:
    prompt = prefixes[rng.randrange(len(prefixes))] + _ids(rng, rng.randrange(1, 40))
    if long_prompts and rng.random() < 0.03:  # sent in several frames
        prompt += _ids(rng, rng.randrange(16_000, 20_000))
    return _draw_behaviour(rng, number, None, prompt, token_oracle, until=until)


def _draw_behaviour(
    rng: Random,
    number: int,
    at: float | None,
    prompt: tuple[int, ...],
    token_oracle: TokenOracle,
    *,
    until: float = 0.0,
) -> ClientSpec:
    limit = rng.choice((1, 2, 8, 24, 24, 60, 150))
    return ClientSpec(
        number=number,
        at=rng.uniform(0.0, until) if at is None else at,
        prompt=prompt,
        stop=_draw_stop(rng, prompt, limit, token_oracle),
        deadline_s=rng.uniform(0.05, 3.0) if rng.random() < 0.08 else DEADLINE_S,
        disconnect_after_s=rng.uniform(0.0, 2.5) if rng.random() < 0.12 else None,
        stop_after_tokens=rng.randrange(1, 40) if rng.random() < 0.12 else None,
        pause_s=rng.uniform(0.1, 1.5) if rng.random() < 0.1 else 0.0,
        migratable=rng.random() >= 0.05,
        logprobs=rng.randrange(2) if rng.random() < 0.1 else None,
        target_draw=rng.random(),
    )


def draw_conversations(
    rng: Random, count: int, until: float, token_oracle: TokenOracle
) -> tuple[ClientSpec, ...]:
    """`count` clients that arrive before `until`: the turns of a few conversations.

    A turn's prompt is the previous prompt, its response, and some more tokens. These clients
    disconnect early more often than others, so that some do in each phase of a handoff; in some
    worlds they arrive in bursts.
    """
    burst_interval_s = rng.choice((0.0, 1.0))
    histories = [_ids(rng, rng.randrange(1, 150)) for _ in range(rng.randrange(2, 9))]
    client_specs = []
    for number, at in enumerate(sorted(rng.uniform(0.0, until) for _ in range(count))):
        if burst_interval_s:
            at = at // burst_interval_s * burst_interval_s + rng.uniform(0.0, 0.05)
        conversation = rng.randrange(len(histories))
        prompt = histories[conversation] + _ids(rng, rng.randrange(1, 50))
        spec = _draw_behaviour(rng, number, at, prompt, token_oracle)
        if rng.random() < 0.15:
            spec = replace(spec, disconnect_after_s=rng.expovariate(3.0))
        client_specs.append(spec)
        response, _ = expected_response(spec, token_oracle)
        histories[conversation] = (prompt + tuple(response))[:_TURN_TOKENS_MAX]
    return tuple(sorted(client_specs, key=lambda spec: spec.at))


def _draw_stop(
    rng: Random, prompt: tuple[int, ...], limit: int, token_oracle: TokenOracle
) -> StopConditions:
    ignore_eos = rng.random() < 0.4
    minimum = rng.randrange(0, limit + 1) if rng.random() < 0.2 else None
    visible: tuple[int, ...] = ()
    hidden: tuple[int, ...] = ()
    if rng.random() < 0.2:
        response = token_oracle.continue_tokens(prompt, limit)
        if response:
            stop = (response[rng.randrange(len(response))],)
            visible, hidden = (stop, ()) if rng.random() < 0.5 else ((), stop)
    return StopConditions(
        max_tokens=limit,
        min_tokens=minimum,
        ignore_eos=ignore_eos,
        stop_token_ids_visible=visible,
        stop_token_ids_hidden=hidden,
    )


def _ids(rng: Random, count: int) -> tuple[int, ...]:
    return tuple(rng.choices(range(10, 500), k=count))
