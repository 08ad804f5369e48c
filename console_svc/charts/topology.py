"""The mesh as a picture: boxes of services, cards of members, and what flows between them (pure).

The layout is computed here, one unit a pixel, so a member keeps its place while others come and go
behind it. Members are drawn one by one while they are few; then each group of equal workers, and
each service, is one card.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from console_svc.charts.style import (
    LINE,
    MARKS,
    MUTED,
    PANEL,
    STRONG_LINE,
    SURFACE,
    TEXT,
    TRACK,
    Option,
    hidden_axis,
    member_tone,
    picture,
    role_color,
    text_style,
    tone_color,
)
from console_svc.charts.units import NONE, number, percent, plural
from console_svc.state.members import Member

MEMBERS_MAX = 30
"""Cards of members; with more, a card stands for a group."""
GROUPS_MAX = 40
"""Cards of groups by domain; with more, a group has all domains."""

CARD_W, CARD_H, GAP, PAD, TITLE_H = 156, 52, 8, 12, 26
BOX_W = CARD_W + 2 * PAD
_LANE = 64
_LEFT, _MIDDLE = 0, BOX_W + _LANE
_RIGHT = _MIDDLE + BOX_W + _LANE
_PAIR_GAP = 72
WIDTH = _RIGHT + 2 * BOX_W + _PAIR_GAP + 2 * PAD
_BAR_W = CARD_W - 24
_ROLES = ("prefill", "decode", "aggregated")
_NAME_CHARS = 19
# By the direction of an arrow: from its middle to its end.
_BACK = {0: [0, 4], 180: [0, -4], -90: [-4, 0], 90: [4, 0]}


@dataclass(frozen=True, slots=True)
class Card:
    """A member, or a group of equal ones. members: names of those that it stands for."""

    title: str
    role: str
    """The service, or the role of a worker."""

    members: tuple[Member, ...]

    @property
    def tone(self) -> str:
        """Tone of the worst member."""
        tones = {member_tone(member) for member in self.members}
        return next((t for t in ("bad", "warn", "unknown") if t in tones), "ok")

    @property
    def kv_use(self) -> float | None:
        """Mean share of KV in use; None: no member reports it."""
        shares = [m.kv_use for m in self.members if m.kv_use is not None]
        return sum(shares) / len(shares) if shares else None

    @property
    def link(self) -> str:
        """Name of the only member; "" for a group."""
        return self.members[0].name if len(self.members) == 1 else ""

    def load(self) -> str:
        """Returns the load in a few words; for a member without one, its version."""
        running = _sum(m.running for m in self.members)
        if running is None:
            return self.members[0].version if self.link else ""
        waiting = _sum(m.waiting for m in self.members) or 0
        return f"{number(running)} running" + (f", {number(waiting)} waiting" if waiting else "")

    def describe(self) -> str:
        """Returns the text of the tooltip."""
        bad = [m for m in self.members if member_tone(m) != "ok"]
        lines = [self.title, self.load(), f"KV in use: {percent(self.kv_use)}"]
        lines += [f"{m.name}: {state_of(m)}" for m in bad[:8]]
        return "\n".join(filter(None, lines))


@dataclass(slots=True)
class _Box:
    """A frame with cards. x, y: of its upper left corner."""

    title: str
    cards: Sequence[Card]
    x: float = 0
    y: float = 0

    @property
    def height(self) -> float:
        return (
            TITLE_H + PAD + len(self.cards) * (CARD_H + GAP) - GAP + (GAP if not self.cards else 0)
        )

    @property
    def middle(self) -> float:
        return self.y + self.height / 2


@dataclass(frozen=True, slots=True)
class Topology:
    """width, height: of the picture in pixels. cards: in the order of drawing, for clicks."""

    option: Option
    width: int
    height: int
    is_grouped: bool
    cards: tuple[Card, ...]


@dataclass(slots=True)
class _Canvas:
    """The parts of the picture so far."""

    frames: list[Option] = field(default_factory=list)
    cards: list[Option] = field(default_factory=list)
    flows: list[Option] = field(default_factory=list)
    heads: list[Option] = field(default_factory=list)
    captions: list[Option] = field(default_factory=list)
    drawn: list[Card] = field(default_factory=list)

    def frame(self, x: float, y: float, width: float, height: float, title: str, fill: str) -> None:
        """Adds a box; its title stands in its upper left corner."""
        self.frames += _bordered(x + width / 2, y + height / 2, width, height, LINE, 1, fill)
        label = {"position": [PAD, 8], "formatter": title, **text_style(MUTED, 11)}
        self.frames[-1]["label"] = {"show": True, "align": "left", **label}

    def box(self, box: _Box, fill: str = PANEL) -> None:
        self.frame(box.x, box.y, BOX_W, box.height, box.title, fill)
        for at, card in enumerate(box.cards):
            y = box.y + TITLE_H + at * (CARD_H + GAP) + CARD_H / 2
            x = box.x + BOX_W / 2
            color = STRONG_LINE if card.tone == "ok" else tone_color(card.tone)
            self.frames += _bordered(x, y, CARD_W, CARD_H, color, _border(card), SURFACE)[:1]
            self.cards.append(_card(card, x, y))
            self.drawn.append(card)

    def flow(
        self,
        *points: tuple[float, float],
        caption: str = "",
        at: tuple[float, float] = (0, 0),
    ) -> None:
        """Adds an arrow through the points; its caption is centred at `at`."""
        self.flows.append({"coords": [list(point) for point in points]})
        (x1, y1), (x2, y2) = points[-2:]
        turn = 0 if y2 < y1 else 180 if y2 > y1 else -90 if x2 > x1 else 90
        self.heads.append({"value": [x2, y2], "symbolRotate": turn, "symbolOffset": _BACK[turn]})
        if caption:
            label = {"show": True, "formatter": caption, **text_style(MUTED, 10)}
            self.captions.append({"value": list(at), "label": label})


def topology(members: Sequence[Member]) -> Topology:
    """Returns the picture of the members."""
    services = {
        service: [m for m in members if m.service == service]
        for service in ("frontend", "router", "indexer", "worker")
    }
    is_grouped = len(members) > MEMBERS_MAX
    domains = _domains(services["worker"], is_grouped)
    canvas = _Canvas()
    right = _draw_domains(canvas, domains)
    frontends = _service_box("Frontends", services["frontend"], _LEFT, is_grouped)
    routers = _service_box("Routers", services["router"], _MIDDLE, is_grouped)
    indexers = _service_box("Indexers", services["indexer"], _MIDDLE, is_grouped)
    indexers.y = routers.height + _LANE
    for box in (frontends, routers, indexers):
        canvas.box(box)
    _draw_flows(canvas, frontends, routers, indexers, right)
    height = max(frontends.height, indexers.y + indexers.height, *(f.bottom for f in right), 0) + 2
    option = _option(canvas, height, describe(members))
    return Topology(option, WIDTH, int(height), is_grouped, tuple(canvas.drawn))


def describe(members: Sequence[Member]) -> str:
    """Returns the picture in one sentence."""
    counts = [
        plural(sum(m.service == service for m in members), service)
        for service in ("frontend", "router", "indexer", "worker")
    ]
    bad = sum(member_tone(m) != "ok" for m in members)
    return f"Topology: {', '.join(counts)}; {bad} with a problem. The table below has each member."


def state_of(member: Member) -> str:
    """Returns the health of a member in words."""
    health = member.health.replace("_", " ")
    if member.failure:
        return f"{health}: {member.failure}"
    if member.is_healthy and member.is_routable is False:
        return "serving, not routable yet"
    return health


@dataclass(frozen=True, slots=True)
class _Frame:
    """Where the workers of a domain were drawn."""

    top: float
    bottom: float

    @property
    def middle(self) -> float:
        return (self.top + self.bottom) / 2


def _service_box(title: str, members: Sequence[Member], x: float, is_grouped: bool) -> _Box:
    if is_grouped and len(members) > 4:
        cards = [
            Card(f"{number(len(members))} {title.lower()}", title.lower()[:-1], tuple(members))
        ]
    else:
        cards = [Card(m.name, m.service, (m,)) for m in members]
    return _Box(title if cards else f"{title}: none", cards, x=x)


def _domains(workers: Sequence[Member], is_grouped: bool) -> dict[str, list[Card]]:
    """Returns the cards of the workers by the title of their domain."""
    by_domain = _cards_by_domain(workers, is_grouped, with_domain=True)
    if is_grouped and sum(map(len, by_domain.values())) > GROUPS_MAX:
        return _cards_by_domain(workers, is_grouped, with_domain=False)
    return by_domain


def _cards_by_domain(
    workers: Sequence[Member], is_grouped: bool, *, with_domain: bool
) -> dict[str, list[Card]]:
    groups: dict[tuple[str, str], list[Member]] = {}
    for worker in workers:
        domain = (worker.domain or worker.transfer_group) if with_domain else ""
        title = " · ".join(filter(None, (worker.model or "no model", domain)))
        groups.setdefault((title, worker.role), []).append(worker)
    cards: dict[str, list[Card]] = {}
    for (title, role), members in sorted(groups.items()):
        if is_grouped:
            name = f"{number(len(members))} {role}"
            cards.setdefault(title, []).append(Card(name, role, tuple(members)))
        else:
            cards.setdefault(title, []).extend(Card(m.name, role, (m,)) for m in members)
    return cards


def _draw_domains(canvas: _Canvas, domains: dict[str, list[Card]]) -> list[_Frame]:
    """Draws the workers: prefill left of decode, then those that do both."""
    frames, y = [], 0.0
    width = WIDTH - _RIGHT
    for title, cards in domains.items():
        prefill, decode, both = ([c for c in cards if c.role == role] for role in _ROLES)
        others = [c for c in cards if c.role not in _ROLES]
        rows = [(prefill, "Prefill", decode, "Decode")] if prefill or decode else []
        if both or others:
            both = both + others
            half = -(-len(both) // 2)
            rows.append((both[:half], "Workers", both[half:], ""))
        top, y = y, y + TITLE_H
        for left, left_title, right, right_title in rows:
            y = _draw_pair(canvas, y, left, left_title, right, right_title) + PAD
        inner, canvas.frames = canvas.frames, []
        canvas.frame(_RIGHT, top, width, y - top, title, SURFACE)
        canvas.frames += inner
        frames.append(_Frame(top, y))
        y += 2 * GAP
    return frames


def _draw_pair(
    canvas: _Canvas,
    y: float,
    left: Sequence[Card],
    left_title: str,
    right: Sequence[Card],
    right_title: str,
) -> float:
    """Draws two boxes side by side. Returns the lower end."""
    first = _Box(left_title, left, x=_RIGHT + PAD, y=y)
    second = _Box(right_title, right, x=_RIGHT + PAD + BOX_W + _PAIR_GAP, y=y)
    drawn = [box for box in (first, second) if box.cards]
    for box in drawn:
        canvas.box(box)
    if right_title and len(drawn) == 2:
        x, middle = first.x + BOX_W, min(first.middle, second.middle)
        canvas.flow(
            (x, middle), (second.x, middle), caption="KV", at=(x + _PAIR_GAP / 2, middle - 9)
        )
    return max(box.y + box.height for box in drawn)


def _draw_flows(
    canvas: _Canvas, frontends: _Box, routers: _Box, indexers: _Box, workers: Sequence[_Frame]
) -> None:
    """Draws what services send each other."""
    lane = _LEFT + BOX_W
    if frontends.cards and routers.cards:
        y = min(frontends.middle, routers.middle)
        canvas.flow((lane, y), (_MIDDLE, y), caption="placement", at=(lane + _LANE / 2, y - 9))
    if indexers.cards and routers.cards:
        x, y = _MIDDLE + BOX_W / 2, routers.height + 14
        canvas.flow((x, indexers.y), (x, routers.height), caption="index", at=(x + 22, y))
    trunk = _RIGHT - _LANE / 2
    if frontends.cards and workers:
        y = routers.height + _LANE / 2
        start = min(frontends.height - GAP, y) if frontends.height < y else y
        bend = lane + _LANE / 2
        caption_at = (_MIDDLE + 28, y - 9)
        for at, frame in enumerate(workers):
            path = [(lane, start), (bend, start), (bend, y), (trunk, y)]
            end = min(max(frame.top + TITLE_H, y), frame.bottom - TITLE_H)
            path += [(trunk, end), (_RIGHT, end)]
            canvas.flow(*path, caption="" if at else "tokens", at=caption_at)
    if indexers.cards and workers:
        y, bus = indexers.middle, _RIGHT - 8
        for at, frame in enumerate(workers):
            end = min(max(frame.top + TITLE_H, y), frame.bottom - 10)
            path = [(_RIGHT, end), (bus, end), (bus, y), (_MIDDLE + BOX_W, y)]
            caption_at = (_MIDDLE + BOX_W + 28, y - 9)
            canvas.flow(*path, caption="" if at else "KV events", at=caption_at)


def _card(card: Card, x: float, y: float) -> Option:
    """Returns a card as a node: mark and name, load, a bar of the KV in use."""
    tone = card.tone
    title = card.title if len(card.title) <= _NAME_CHARS else f"{card.title[: _NAME_CHARS - 1]}…"
    lines = [f"{{mark|{MARKS[tone]}}} {{name|{title}}}"]
    if tone != "ok" and card.link:
        lines.append(f"{{state|{state_of(card.members[0])[:26]}}}")
    else:
        lines.append(f"{{load|{card.load() or ' '}}}")
    rich = {
        "mark": {**text_style(tone_color(tone), 11), "lineHeight": 17},
        "name": {**text_style(TEXT, 12), "fontWeight": 500, "lineHeight": 17},
        "load": {**text_style(MUTED, 11), "lineHeight": 17},
        "state": {**text_style(tone_color(tone), 11), "lineHeight": 17},
    }
    if card.kv_use is not None:
        used = round(_BAR_W * min(1.0, card.kv_use))
        bar = {"height": 3, "lineHeight": 7}
        rich["used"] = {**bar, "backgroundColor": role_color(card.role), "width": used}
        rich["free"] = {**bar, "backgroundColor": TRACK, "width": _BAR_W - used}
        lines.append(("{used|}" if used else "") + ("{free|}" if used < _BAR_W else ""))
    label = {"show": True, "position": "inside", "align": "left", "offset": [-_BAR_W / 2, 0]}
    return {
        "name": card.describe(),
        "value": [x, y],
        "symbolSize": [CARD_W - 2 * _border(card), CARD_H - 2 * _border(card)],
        "itemStyle": {"color": SURFACE},
        "label": {**label, "formatter": "\n".join(lines), "rich": rich},
    }


def _border(card: Card) -> int:
    return 1 if card.tone == "ok" else 2


def _bordered(
    x: float, y: float, width: float, height: float, color: str, border: int, fill: str
) -> list[Option]:
    """Returns two rectangles: ECharts scales the border of a symbol with its sides."""
    return [
        {"value": [x, y], "symbolSize": [w, h], "itemStyle": {"color": painted}}
        for w, h, painted in (
            (width, height, color),
            (width - 2 * border, height - 2 * border, fill),
        )
    ]


def _option(canvas: _Canvas, height: float, description: str) -> Option:
    plane = {"coordinateSystem": "cartesian2d", "emphasis": {"disabled": True}}
    dot = {"symbolSize": 1, "itemStyle": {"color": "transparent"}, "silent": True}
    return picture(
        description,
        grid={"left": 0, "right": 0, "top": 0, "bottom": 0},
        xAxis=hidden_axis(0, WIDTH),
        yAxis=hidden_axis(0, height, inverse=True),
        series=[
            {
                **plane,
                "type": "scatter",
                "symbol": "rect",
                "silent": True,
                "data": canvas.frames,
                "z": 1,
            },
            {
                **plane,
                "type": "lines",
                "polyline": True,
                "silent": True,
                "lineStyle": {"color": STRONG_LINE, "width": 1.25, "opacity": 1},
                "data": canvas.flows,
                "z": 2,
            },
            {
                **plane,
                "type": "graph",
                "layout": "none",
                "symbol": "rect",
                "data": canvas.cards,
                "z": 3,
            },
            {**plane, **dot, "type": "scatter", "data": canvas.captions, "z": 4},
            {
                **plane,
                "type": "scatter",
                "symbol": "triangle",
                "symbolSize": [8, 8],
                "silent": True,
                "itemStyle": {"color": STRONG_LINE},
                "data": canvas.heads,
                "z": 5,
            },
        ],
    )


def _sum(values: Iterable[int | None]) -> int | None:
    """Returns the sum of the known values; None: none is known."""
    known = [value for value in values if value is not None]
    return sum(known) if known else None


__all__ = ["NONE", "Card", "Topology", "describe", "state_of", "topology"]
