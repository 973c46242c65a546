"""Everything a decision is made from, taken at one moment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from controller.detect import steady_tail
from controller.limits import Spent
from controller.observe import Seen, WindowBook, balancedness, mean_balancedness
from controller.settings import GroupSettings
from controller.state import GroupState
from eplane.load import FloatLoad
from eplane.placement import Placement
from eplane.records import EpochPointer
from eplane.routing import TokenSample, merge
from eplane.topology import World

# Routed tuples that a decision is made from.
MOST_TUPLES = 1024
# A rate of steps is taken over no less than this: reports are some tenths of a second off.
LEAST_TIMED_S = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """`history`: the complete windows that are kept, oldest first. `seen`: the newest of them that are of one kind.

    What the present placement is worth is judged on `seen`; what comes next is forecast from all of `history`, whose
    older traffic often comes back. `told`: routed tuples [L][n][K] that stand for all traffic, in place of samples.
    `speeds [R]`: relative ones of the ranks in a simulated world; None: all alike.
    """

    settings: GroupSettings
    world: World
    pointer: EpochPointer
    placement: Placement
    history: tuple[Seen, ...]
    seen: tuple[Seen, ...]
    spent: Spent
    told: Any = None
    speeds: FloatLoad | None = None

    @property
    def window(self) -> tuple[Seen, ...]:
        return self.seen[-self.settings.window :]

    @property
    def load(self) -> FloatLoad:
        """`[L, E]` tokens of the load window."""
        shape = (self.placement.layers, self.placement.experts)
        return np.sum([s.window.total for s in self.window], axis=0) if self.seen else np.zeros(shape)

    @property
    def balancedness(self) -> float:
        """Of the load window, as it truly fell on the ranks; 1 without any."""
        if not self.seen:
            return 1.0
        found = mean_balancedness(balancedness(np.sum([s.rank_load for s in self.window], axis=0), self.speeds))
        return 1.0 if found is None else found

    @property
    def last_step(self) -> int:
        return self.seen[-1].window.last_step if self.seen else 0

    @property
    def steps(self) -> int:
        return sum(s.window.last_step - s.window.first_step for s in self.window)

    @property
    def steps_a_second(self) -> float | None:
        """Steps that the group makes in a second, over all windows that are kept; None until that can be told.

        Counts come some windows at a time, and a new leader hears the last ones at once. So time is taken from the first
        moment at which any came to the last, and steps from where those of the first moment ended.
        """
        came = [(s.at, s.window.last_step) for s in self.history if s.at is not None]
        first, last = min((at for at, _ in came), default=0.0), max((at for at, _ in came), default=0.0)
        steps = max((step for _, step in came), default=0) - max((step for at, step in came if at == first), default=0)
        return steps / (last - first) if last - first >= LEAST_TIMED_S and steps > 0 else None

    @property
    def step_tokens(self) -> float | None:
        """Routed tokens that a step and layer had on average."""
        load, steps = self.load, self.steps
        return float(load.sum() / load.shape[0] / steps) if steps and load.any() else None

    @property
    def sample(self) -> TokenSample | None:
        """Routed tuples of the load window, each window in proportion to its tokens.

        None unless every rank samples: what some ranks say is not how the tokens of all go together.
        """
        if not self.world.capabilities.routing_sample:
            return None
        return merge([s.sample for s in self.window if s.sample is not None], MOST_TUPLES, (self.last_step,))

    @property
    def routings(self) -> Any:
        """[L, n, K] the sample as the solver takes it, or None."""
        if self.told is not None:
            return self.told
        sample = self.sample
        return None if sample is None else sample.tuples.transpose(1, 0, 2).astype(np.int32)

    def enough(self) -> bool:
        """Whether the busiest layer had the tokens that a judgement needs."""
        return bool(self.seen) and float(self.load.sum(axis=1).max()) >= max(1, self.settings.min_window_tokens)

    def since(self, step: int) -> Facts:
        """Only what was counted from `step` on."""
        return replace(self, seen=tuple(s for s in self.seen if s.window.first_step >= step))


def facts_of(
    settings: GroupSettings,
    world: World,
    pointer: EpochPointer,
    placement: Placement,
    history: Sequence[Seen],
    spent: Spent,
    told: Any = None,
    speeds: FloatLoad | None = None,
) -> Facts:
    """The facts of these windows, oldest first."""
    tail = steady_tail([s.window.total for s in history]) if history else 0
    newest = tuple(history[len(history) - tail :])
    return Facts(settings, world, pointer, placement, tuple(history), newest, spent, told, speeds)


def gather(state: GroupState, book: WindowBook, now: float) -> Facts | None:
    """The facts, or None while no world was adopted."""
    world, pointer = state.world(), state.epoch()
    if world is None or pointer is None:
        return None
    settings = state.settings()
    book.keep(settings.history)
    seen = book.newest(settings.history)
    return facts_of(settings, world.world, pointer, state.placement(), seen, state.spent(now))
