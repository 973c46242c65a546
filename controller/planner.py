"""From a present placement to a target in waves, each of them safe by itself.

A wave switches all its changes at one step, so it must be whole: after it every expert still has a replica and no rank
holds an expert twice. What limits a wave is room: the bundles a rank receives lie beside the live ones until the switch,
so they must fit the rank's free cells less a reserve.

The smallest whole piece is a *chain*. Adding expert `a` on rank `r` needs a slot there, so something is dropped; if what
is dropped is the last replica of expert `b`, then `b` must be added where the target wants it, which needs a slot there,
and so on. A chain ends at an empty slot, at a drop that is not the last replica, or where it meets itself; in the last
case the part from that meeting on is a cycle that stands alone. So a chain that passes each rank at most once always
exists while anything is left to do, and one free cell a rank is enough to reach any target.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from eplane.errors import PlanImpossible
from eplane.placement import EMPTY, IntTable, Placement
from eplane.plan import Load, WavePlan
from eplane.topology import World


@dataclass(frozen=True, slots=True)
class Room:
    """What the waves of a plan may use.

    spare_min: cells that stay free on every rank in every epoch; max_moves: bundles of a wave over all ranks (a cycle
    that can not be cut may exceed it, alone in its wave).
    """

    spare_min: int = 0
    max_moves: int = 10**9


@dataclass(frozen=True, slots=True)
class Add:
    """Rank `rank` gets `expert` of a layer, in place of `drop` (EMPTY: in an empty slot)."""

    rank: int
    expert: int
    drop: int


def keep_slots(base: Placement, target: Placement) -> Placement:
    """`target` with the slots inside each rank put in the order that changes least: what stays on a rank keeps its slot."""
    table = target.by_rank().copy()
    mine, theirs = base.by_rank(), target.by_rank()
    for layer, rank in zip(*np.nonzero((mine != theirs).any(axis=2)), strict=True):
        want = set(theirs[layer, rank].tolist()) - {EMPTY}
        row = [expert if expert in want else EMPTY for expert in mine[layer, rank].tolist()]
        fresh = [expert for expert in theirs[layer, rank].tolist() if expert != EMPTY and expert not in row]
        gaps = [place for place, expert in enumerate(row) if expert == EMPTY]
        for place, expert in zip(gaps, fresh, strict=False):
            row[place] = expert
        table[layer, rank] = row
    return Placement(table.reshape(base.p2l.shape), base.ranks, base.experts)


def incoming(base: Placement, target: Placement) -> IntTable:
    """`[R]` bundles that each rank must receive to go from `base` to `target` in one wave."""
    counts = np.zeros(base.ranks, dtype=np.int32)
    for _, _, rank in base.moves(target):
        counts[rank] += 1
    return counts


def held_cells(placement: Placement) -> IntTable:
    """`[R]` cells that the live bundles of each rank take, over all layers."""
    return np.asarray((placement.by_rank() >= 0).sum(axis=(0, 2)), dtype=np.int32)


def plan_waves(base: Placement, target: Placement, world: World, room: Room | None = None) -> tuple[WavePlan, ...]:
    """The waves from `base` to `target`, in order; empty when they are equal. Raises PlanImpossible without room."""
    room = room or Room()
    if base.digest == target.digest:
        return ()
    if base.p2l.shape != target.p2l.shape or base.ranks != world.ranks or base.slots != world.slots:
        raise PlanImpossible("the target is a table of another world: its layers, ranks or slots differ")
    waves: list[WavePlan] = []
    present = base
    # Free cells of each rank before the wave before this one: what both have to share while they overlap.
    shared: IntTable | None = None
    while present.moves(target):
        free = world.cells - held_cells(present) - room.spare_min
        table = _Wave(present, target, free, room.max_moves).fill()
        following = Placement(table, base.ranks, base.experts)
        if not following.moves(target):
            following = target
        if following.digest == present.digest:
            raise PlanImpossible(_no_room(present, target, world, room))
        waves.append(_wave_plan(waves, present, following, world, shared))
        shared = world.cells - held_cells(present) - room.spare_min
        present = following
    if present.digest != target.digest:
        waves.append(_wave_plan(waves, present, target, world, shared))
    return tuple(waves)


def _no_room(present: Placement, target: Placement, world: World, room: Room) -> str:
    free = world.cells - held_cells(present) - room.spare_min
    short = sorted({rank for _, _, rank in present.moves(target) if free[rank] < 1})
    return (
        f"ranks {short} have no cell to receive a bundle into ({world.spare_cells} spare cells, {room.spare_min} kept free): "
        "start the engine with more spare cells, or lower spare_min"
    )


def _wave_plan(
    before: Sequence[WavePlan], base: Placement, target: Placement, world: World, shared: IntTable | None
) -> WavePlan:
    loads = choose_sources(base, target, world.node_of_rank)
    wave = WavePlan(
        number=len(before) + 1,
        changes=base.delta(target),
        loads=loads,
        base_digest=base.digest,
        target_digest=target.digest,
        bytes=len(loads) * world.shape.bundle_bytes,
    )
    overlaps = shared is not None and wave.fits_beside(before[-1], base.slots, shared.tolist())
    return replace(wave, overlaps=overlaps)


def choose_sources(base: Placement, target: Placement, node_of_rank: Sequence[str]) -> tuple[Load, ...]:
    """Who serves each bundle: a replica of `base` on the receiver's node if there is one, else the rank that serves least.

    Every expert has a replica in `base`, and it stays live until the switch, so there always is one.
    """
    serves = [0] * base.ranks
    loads: list[Load] = []
    by_rank = target.by_rank()
    for layer, expert, rank in base.moves(target):
        holders = {base.rank_of(slot) for slot in base.replicas(layer, expert)}
        near = [r for r in holders if node_of_rank[r] == node_of_rank[rank]]
        source = min(near or holders, key=lambda r: (serves[r], r))
        serves[source] += 1
        place = int(np.flatnonzero(by_rank[layer, rank] == expert)[0])
        loads.append(Load(layer=layer, slot=rank * base.slots + place, expert=expert, source_rank=source))
    return tuple(sorted(loads, key=lambda load: (load.layer, load.slot)))


def transfer_seconds(wave: WavePlan, slots: int, bundle_bytes: int, bytes_per_s: float) -> float:
    """Seconds that staging takes at `bytes_per_s` a rank: the rank that receives or serves most sets the time."""
    if not wave.loads:
        return 0.0
    receives: dict[int, int] = {}
    serves: dict[int, int] = {}
    for load in wave.loads:
        receives[load.slot // slots] = receives.get(load.slot // slots, 0) + 1
        serves[load.source_rank] = serves.get(load.source_rank, 0) + 1
    return max(*receives.values(), *serves.values()) * bundle_bytes / bytes_per_s


@dataclass(slots=True)
class _Wave:
    """Fills one wave with chains while the room lasts. `free [R]`: cells a rank may still receive into."""

    present: Placement
    target: Placement
    free: IntTable
    max_moves: int
    _moved: int = field(default=0, init=False)

    def fill(self) -> IntTable:
        """The table after the wave."""
        table = self.present.by_rank().copy()
        for layer in range(self.present.layers):
            row = _Layer(table[layer], self.target.by_rank()[layer], self.present.experts)
            row.drop_what_only_goes()
            for rank, expert in row.adds():
                if row.has(rank, expert):
                    continue
                chain = row.chain(rank, expert, self.free)
                if chain is None:
                    continue
                if self._moved and self._moved + len(chain) > self.max_moves:
                    continue
                for add in chain:
                    row.apply(add)
                    self.free[add.rank] -= 1
                self._moved += len(chain)
        return table.reshape(self.present.p2l.shape)


class _Layer:
    """One layer on its way: `row [R, K]` is changed in place towards `goal [R, K]`."""

    def __init__(self, row: IntTable, goal: IntTable, experts: int) -> None:
        self.row = row
        self.goal = goal
        self.held = [set(r.tolist()) - {EMPTY} for r in row]
        self.wanted = [set(r.tolist()) - {EMPTY} for r in goal]
        self.replicas = np.bincount(row[row >= 0], minlength=experts)
        # Ranks that shall hold an expert and do not yet, for each expert that has such ranks.
        self.missing: dict[int, list[int]] = {}
        for rank, expert in self.adds():
            self.missing.setdefault(expert, []).append(rank)

    def adds(self) -> list[tuple[int, int]]:
        return [
            (rank, expert) for rank in range(len(self.held)) for expert in sorted(self.wanted[rank] - self.held[rank])
        ]

    def has(self, rank: int, expert: int) -> bool:
        return expert in self.held[rank]

    def drop_what_only_goes(self) -> None:
        """Empty slots the target wants empty, as far as no last replica goes: it costs nothing and makes room."""
        for rank, held in enumerate(self.held):
            going = sorted(held - self.wanted[rank], key=lambda e: -self.replicas[e])
            surplus = len(going) - len(self.wanted[rank] - held)
            for expert in going[: max(0, surplus)]:
                if self.replicas[expert] > 1:
                    self._clear(rank, expert)

    def chain(self, rank: int, expert: int, free: IntTable) -> list[Add] | None:
        """The adds that make adding `expert` on `rank` whole, or a cycle met on the way; None if there is no room."""
        path: list[Add] = []
        seen = np.zeros(len(self.held), dtype=bool)
        return path if self._extend(path, rank, expert, free, seen) else None

    def _extend(self, path: list[Add], rank: int, expert: int, free: IntTable, seen: np.ndarray) -> bool:
        """Depth first over ranks, without recursion: each frame tries the experts that its rank could drop."""
        frames = [self._frame(rank, expert)]
        if free[rank] < 1:
            return False
        seen[rank] = True
        while frames:
            frame = frames[-1]
            if frame.choices is None:
                path.extend(f.add for f in frames)
                return True
            step = next(frame.choices_left, None)
            if step is None:
                frames.pop()
                continue
            drop, onto = step
            frame.add = replace(frame.add, drop=drop)
            at = next((i for i, f in enumerate(frames) if f.add.rank == onto), None)
            if at is not None:
                closing = frames[at].add
                path.append(Add(onto, drop, closing.drop))
                path.extend(f.add for f in frames[at + 1 :])
                return True
            if not seen[onto] and free[onto] >= 1:
                seen[onto] = True
                frames.append(self._frame(onto, drop))
        return False

    def _frame(self, rank: int, expert: int) -> _Frame:
        """How `expert` can get a slot on `rank`: at once, or by one of the last replicas that must go on elsewhere."""
        if len(self.held[rank]) < self.row.shape[1]:
            return _Frame(Add(rank, expert, EMPTY), None)
        going = sorted(self.held[rank] - self.wanted[rank])
        place = int(np.flatnonzero(self.goal[rank] == expert)[0])
        there = int(self.row[rank, place])
        going.sort(key=lambda e: e != there)
        spare = [e for e in going if self.replicas[e] > 1]
        if spare:
            return _Frame(Add(rank, expert, spare[0]), None)
        onward = [(e, onto) for e in going for onto in self.missing.get(e, ()) if e not in self.held[onto]]
        return _Frame(Add(rank, expert, EMPTY), onward)

    def apply(self, add: Add) -> None:
        if add.drop == EMPTY:
            place = int(np.flatnonzero(self.row[add.rank] == EMPTY)[0])
        else:
            place = self._clear(add.rank, add.drop)
        wanted_at = int(np.flatnonzero(self.goal[add.rank] == add.expert)[0])
        if self.row[add.rank, wanted_at] == EMPTY:
            place = wanted_at
        self.row[add.rank, place] = add.expert
        self.held[add.rank].add(add.expert)
        self.replicas[add.expert] += 1

    def _clear(self, rank: int, expert: int) -> int:
        place = int(np.flatnonzero(self.row[rank] == expert)[0])
        self.row[rank, place] = EMPTY
        self.held[rank].discard(expert)
        self.replicas[expert] -= 1
        return place


class _Frame:
    """One add of a chain in the making. `choices` None: it is whole already."""

    def __init__(self, add: Add, choices: list[tuple[int, int]] | None) -> None:
        self.add = add
        self.choices = choices
        self.choices_left = iter(choices or ())
