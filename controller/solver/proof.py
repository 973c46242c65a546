"""A proved lower bound for layers with two places a rank: no placement keeps every rank below it.

Say no rank is above T, and take any y < T / 2. A copy larger than T - y is alone on its rank or beside a copy of at most y.
So, for every y, (copies) + (copies above T - y) - (copies of at most y) <= (places). With y = 0 this says that copies are
no more than places. Whoever chooses the copies wants to keep all these rows low at once; whoever doubts T weighs the rows.
That is a matrix game. If the doubter can weigh the rows so that every choice of copies comes to more than the places, T
can not be reached. The game is solved by double oracle: a small game over some rows and some choices, then the best reply of
each side to the other's mix joins it (McMahan, Gordon, Blum 2003). A weighing that proves T counts every choice, not only
those of the small game.
"""

from __future__ import annotations

import numpy as np

from controller.solver.problem import Floats, Ints

OPTIONS = 10
"""Numbers of copies of an expert looked at one by one, from the least that fits; more are taken as if they were of no size."""
ROUNDS = 120
HALVINGS = 9
CLOSE = 1e-3
MARGIN = 1e-7
"""Part of the places by which a weighing must exceed them to be a proof: far above rounding."""


def least_pairs(load: Floats, most: Ints, places: int, least: float, known: float) -> float:
    """A proved lower bound of the slowest pair's load, at least `least`, looked for up to `known`.

    load [E] of a layer; most [E] copies an expert may have; places: two for every rank in use.
    """
    low, high = least, known
    if least <= 0:
        return least
    for _ in range(HALVINGS):
        if high <= low * (1 + CLOSE):
            break
        peak = 0.5 * (low + high)
        if _unreachable(load, most, places, peak):
            low = peak
        else:
            high = peak
    return low


class _Rows:
    """Rows of one limit T: for each expert and number of copies, where it stands among the levels y."""

    def __init__(self, load: Floats, most: Ints, peak: float) -> None:
        fewest = np.maximum(np.ceil(load / peak * (1 - 1e-12)), 1).astype(np.int64)
        self.copies = fewest[:, None] + np.arange(OPTIONS)
        size = load[:, None] / self.copies
        self.allowed = self.copies <= most[:, None]
        self.fits = bool(self.allowed[:, 0].all())
        half = size[self.allowed & (size < 0.5 * peak)]
        rest = peak - size[self.allowed & (size >= 0.5 * peak)]
        levels = np.unique(np.concatenate([[0.0], half, rest[rest > 0]]))
        self.levels = levels[levels < 0.5 * peak]
        # Above T - y from `high` on, at most y from `low` on; rounding is on the side of the placement.
        self.high = np.searchsorted(self.levels, peak - size + 1e-9 * peak)
        self.low = np.searchsorted(self.levels, size - 1e-9 * peak)
        # More copies than were listed take at least this many places, as if each had no size.
        self.beyond = self.copies[:, -1] + 1

    def reply(self, weight: Floats) -> tuple[float, Ints]:
        """The choice of copies (option of each expert) that comes to the least, and what it comes to."""
        after = np.append(np.cumsum(weight[::-1])[::-1], 0.0)
        cost = np.where(self.allowed, self.copies * (1.0 + after[self.high] - after[self.low]), np.inf)
        cost = np.concatenate([cost, (self.beyond * weight[0])[:, None]], axis=1)
        best = cost.argmin(axis=1)
        return float(cost[np.arange(len(cost)), best].sum()), best

    def row(self, choice: Ints) -> Floats:
        """What the choice puts on each level."""
        at = np.arange(len(choice))
        listed = choice < OPTIONS
        copies = np.where(listed, self.copies[at, np.minimum(choice, OPTIONS - 1)], 0)
        high = self.high[at, np.minimum(choice, OPTIONS - 1)]
        low = self.low[at, np.minimum(choice, OPTIONS - 1)]
        size = len(self.levels) + 1
        change = np.bincount(high, weights=copies, minlength=size) - np.bincount(low, weights=copies, minlength=size)
        out = copies.sum() + np.cumsum(change)[:-1]
        out[0] += self.beyond[~listed].sum()
        return np.asarray(out)


def _unreachable(load: Floats, most: Ints, places: int, peak: float) -> bool:
    """Whether a weighing of the rows was found that every choice of copies breaks."""
    rows = _Rows(load, most, peak)
    if not rows.fits:
        return True
    count = len(rows.levels)
    weight = np.zeros(count)
    weight[0] = 1.0
    used = [0]
    played: list[Floats] = []
    for _round in range(ROUNDS):
        value, choice = rows.reply(weight)
        if value > places * (1 + MARGIN):
            return True
        played.append(rows.row(choice))
        game = np.stack(played)
        mix, best = _solve_game(game[:, used])
        against = mix @ game
        level = int(against.argmax())
        if against[level] <= places * (1 + MARGIN):
            return False
        if level not in used:
            used.append(level)
            mix, best = _solve_game(game[:, used])
        weight = np.zeros(count)
        weight[used] = best
    return False


def _solve_game(game: Floats) -> tuple[Floats, Floats]:
    """Best mixes of a matrix game `[n, m]`: the row player wants the least, the column player the most. By the simplex method."""
    n, m = game.shape
    shift = 1.0 - float(game.min())
    a = game + shift
    # max sum(y), y a <= 1, y >= 0: y / sum(y) is the mix of the rows, the prices of the columns that of the columns.
    table = np.zeros((m + 1, n + m + 1))
    table[:m, :n], table[:m, n : n + m], table[:m, -1] = a.T, np.eye(m), 1.0
    table[m, :n] = -1.0
    basis = np.arange(n, n + m)
    for _ in range(20 * (n + m)):
        enter = int(table[m, :-1].argmin())
        if table[m, enter] >= -1e-11:
            break
        column = table[:m, enter]
        ratio = np.where(column > 1e-11, table[:m, -1] / np.where(column > 1e-11, column, 1.0), np.inf)
        leave = int(ratio.argmin())
        table[leave] /= table[leave, enter]
        rest = np.arange(m + 1) != leave
        table[rest] -= np.outer(table[rest, enter], table[leave])
        basis[leave] = enter
    y = np.zeros(n + m)
    y[basis] = table[:m, -1]
    x = np.maximum(table[m, n : n + m], 0.0)
    y = np.maximum(y[:n], 0.0)
    return y / max(y.sum(), 1e-300), x / max(x.sum(), 1e-300)
