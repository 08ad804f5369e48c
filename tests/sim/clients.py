"""The clients of a simulated mesh: what each asks, what it must get, and how it behaves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import Any, cast

from common.kv.hashing import SCHEME_ID, PrefixHasher
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
from frontend_svc.core.request.machine import Outcome, Plan
from frontend_svc.peers.router_client import Query
from frontend_svc.request.gateway import UNREAD_TOKENS_MAX, Ticket
from frontend_svc.request.response import Answer
from tests.sim.fleet import MODEL, SimFrontend
from worker_svc.engines.sim.token_oracle import Truth

DEADLINE_S = 120.0
# Conversations are cut there, so that every engine has room for them.
_TURN_TOKENS_MAX = 600


@dataclass(frozen=True, slots=True)
class Wish:
    """One client: its request and its manners. Times are virtual seconds, from `at` on.

    leaves_s: when it disconnects. stops_after: tokens after which its stop string is complete.
    pause_s: how long it takes to read what came; unread_max: with more tokens unread than these it
    is to be cut, None: never. pick: 0..1, chooses its frontend. lora: the adapter it asks for.
    session: which one it is of, and action what it does to that. strict_priority, jump_s: its place
    in a router's queue.
    """

    number: int
    at: float
    prompt: tuple[int, ...]
    stop: StopConditions
    deadline_s: float = DEADLINE_S
    leaves_s: float | None = None
    stops_after: int | None = None
    pause_s: float = 0.0
    migratable: bool = True
    logprobs: int | None = None
    pick: float = 0.0
    model: str = MODEL
    lora: str = ""
    session: str = ""
    action: SessionAction | None = None
    strict_priority: int = 0
    jump_s: float = 0.0
    unread_max: int | None = None

    @property
    def request_id(self) -> str:
        """Unique in the mesh."""
        return f"r{self.number}"

    @property
    def routing(self) -> RoutingHints | None:
        """What routers are told beside the prompt."""
        if not (self.lora or self.session or self.jump_s):
            return None
        return RoutingHints(
            lora_name=self.lora or None,
            priority_jump=self.jump_s or None,
            session_control=SessionControl(self.session, self.action) if self.session else None,
        )


def expected_answer(wish: Wish, truth: Truth) -> tuple[list[int], FinishReason]:
    """The whole answer that the model gives, and how it ends."""
    stop = wish.stop
    limit = stop.max_tokens or 0
    minimum = stop.min_tokens or 0
    tokens = truth.continue_tokens(
        wish.prompt,
        limit,
        ignore_eos=bool(stop.ignore_eos),
        min_tokens=minimum,
        lora_name=wish.lora,
    )
    if not stop.ignore_eos:
        for place in range(minimum, len(tokens)):
            if tokens[place] in stop.stop_token_ids_visible:
                return tokens[: place + 1], FinishReason.STOP
            if tokens[place] in stop.stop_token_ids_hidden:
                return tokens[:place], FinishReason.STOP
    return tokens, FinishReason.LENGTH if len(tokens) == limit else FinishReason.EOS


class _NoMeter:
    """Stands where a frontend counts."""

    def tokens(self, count: int, now: float) -> None:
        pass


@dataclass(eq=False)
class Client:
    """A client under way. It is the request's Listener, and hands on to a real `Answer`."""

    wish: Wish
    expected: list[int]
    expected_finish: FinishReason
    on_tokens: Callable[[Client, list[int]], None]
    on_finish: Callable[[Client, Outcome], None]
    began_at: float = 0.0
    placed_at: float | None = None
    frontend: SimFrontend | None = None
    ticket: Ticket | None = None
    delivered: list[int] = field(default_factory=list)
    outcomes: list[Outcome] = field(default_factory=list)
    read: int = 0
    ended_at: float | None = None
    # Whether it left, or said stop, before the end came.
    has_left: bool = False
    has_stopped: bool = False
    _answer: Answer | None = None

    @property
    def reads_too_slowly(self) -> bool:
        """Whether more than it may be is unread."""
        most = self.wish.unread_max
        return most is not None and len(self.delivered) - self.read > most

    def tokens(self, token_ids: list[int], logprobs: Sequence[TokenLogprob]) -> None:
        """See Listener."""
        self.on_tokens(self, token_ids)
        assert self._answer is not None
        self._answer.tokens(token_ids, logprobs)

    def finished(self, outcome: Outcome) -> None:
        """See Listener."""
        self.on_finish(self, outcome)
        assert self._answer is not None
        self._answer.finished(outcome)

    async def run(self, frontend: SimFrontend, hasher: PrefixHasher) -> None:
        """Asks, and reads to the end, as the HTTP endpoint does on its behalf."""
        loop = asyncio.get_running_loop()
        wish = self.wish
        self.frontend, self.began_at = frontend, loop.time()
        # Any: a meter has many methods, an Answer uses one.
        most = UNREAD_TOKENS_MAX if wish.unread_max is None else wish.unread_max
        answer = self._answer = Answer(cast(Any, _NoMeter()), loop.time, unread_max=most)
        request = PreprocessedRequest(
            model=wish.model,
            token_ids=TokenIds.of(wish.prompt),
            stop_conditions=wish.stop,
            output_options=OutputOptions(logprobs=wish.logprobs),
            routing=wish.routing,
        )
        plan = Plan(wish.request_id, request, loop.time() + wish.deadline_s, wish.migratable)
        query = Query(
            wish.model,
            0,
            loop.time(),
            hash_scheme=SCHEME_ID,
            block_size=hasher.block_size,
            routing=wish.routing,
            strict_priority=wish.strict_priority,
            hasher=hasher,
        ).grown(request.token_ids, len(request.token_ids))
        self.ticket = answer.ticket = frontend.gateway.open(plan, query, self)
        leaving = None
        if wish.leaves_s is not None:
            leaving = loop.call_later(wish.leaves_s, self._leave)
        try:
            await self._read(answer)
        finally:
            if leaving is not None:
                leaving.cancel()

    async def _read(self, answer: Answer) -> None:
        wish = self.wish
        while True:
            tokens = await answer.next()
            self.read += len(tokens)
            if wish.stops_after is not None and self.read >= wish.stops_after and not self.outcomes:
                self.has_stopped = True
                assert self.ticket is not None
                self.ticket.stop()
                return
            if not tokens:
                return
            if wish.pause_s:
                await asyncio.sleep(wish.pause_s)

    def _leave(self) -> None:
        if not self.outcomes and self.ticket is not None:
            self.has_left = True
            self.ticket.client_gone()


def draw_wishes(
    rng: Random, count: int, until: float, truth: Truth, *, long_prompts: bool
) -> tuple[Wish, ...]:
    """`count` clients that come before `until`; many prompts begin alike."""
    openings = [_ids(rng, rng.randrange(1, 120)) for _ in range(6)]
    wishes = [
        _draw(rng, number, until, openings, truth, long_prompts=long_prompts)
        for number in range(count)
    ]
    return tuple(sorted(wishes, key=lambda wish: wish.at))


def _draw(
    rng: Random,
    number: int,
    until: float,
    openings: Sequence[tuple[int, ...]],
    truth: Truth,
    *,
    long_prompts: bool,
) -> Wish:
    prompt = openings[rng.randrange(len(openings))] + _ids(rng, rng.randrange(1, 40))
    if long_prompts and rng.random() < 0.03:  # travels in parts
        prompt += _ids(rng, rng.randrange(16_000, 20_000))
    return _draw_manners(rng, number, None, prompt, truth, until=until)


def _draw_manners(
    rng: Random,
    number: int,
    at: float | None,
    prompt: tuple[int, ...],
    truth: Truth,
    *,
    until: float = 0.0,
) -> Wish:
    limit = rng.choice((1, 2, 8, 24, 24, 60, 150))
    return Wish(
        number=number,
        at=rng.uniform(0.0, until) if at is None else at,
        prompt=prompt,
        stop=_draw_stop(rng, prompt, limit, truth),
        deadline_s=rng.uniform(0.05, 3.0) if rng.random() < 0.08 else DEADLINE_S,
        leaves_s=rng.uniform(0.0, 2.5) if rng.random() < 0.12 else None,
        stops_after=rng.randrange(1, 40) if rng.random() < 0.12 else None,
        pause_s=rng.uniform(0.1, 1.5) if rng.random() < 0.1 else 0.0,
        migratable=rng.random() >= 0.05,
        logprobs=rng.randrange(2) if rng.random() < 0.1 else None,
        pick=rng.random(),
    )


def draw_conversations(rng: Random, count: int, until: float, truth: Truth) -> tuple[Wish, ...]:
    """`count` clients that come before `until`: the turns of a few conversations.

    A turn's prompt is the one before it, its answer, and some words more. Clients leave early
    oftener than others, so that some do in each phase of a handoff; some worlds have them come in
    bursts.
    """
    burst_s = rng.choice((0.0, 1.0))
    said = [_ids(rng, rng.randrange(1, 150)) for _ in range(rng.randrange(2, 9))]
    wishes = []
    for number, at in enumerate(sorted(rng.uniform(0.0, until) for _ in range(count))):
        if burst_s:
            at = at // burst_s * burst_s + rng.uniform(0.0, 0.05)
        which = rng.randrange(len(said))
        prompt = said[which] + _ids(rng, rng.randrange(1, 50))
        wish = _draw_manners(rng, number, at, prompt, truth)
        if rng.random() < 0.15:
            wish = replace(wish, leaves_s=rng.expovariate(3.0))
        wishes.append(wish)
        answer, _ = expected_answer(wish, truth)
        said[which] = (prompt + tuple(answer))[:_TURN_TOKENS_MAX]
    return tuple(sorted(wishes, key=lambda wish: wish.at))


def _draw_stop(rng: Random, prompt: tuple[int, ...], limit: int, truth: Truth) -> StopConditions:
    ignore_eos = rng.random() < 0.4
    minimum = rng.randrange(0, limit + 1) if rng.random() < 0.2 else None
    visible: tuple[int, ...] = ()
    hidden: tuple[int, ...] = ()
    if rng.random() < 0.2:
        answer = truth.continue_tokens(prompt, limit)
        if answer:
            stop = (answer[rng.randrange(len(answer))],)
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
