"""Goals that weigh: they hold back what the controller does by itself; a person may go against gain and cooldown."""

from __future__ import annotations

from controller.goals.case import Case
from eplane.plan import Decision, Ruling


class Gain:
    """The change must save more than it costs within the horizon, and more than the hysteresis."""

    name = "gain"
    hard = False

    def judge(self, case: Case) -> Decision:
        if case.forced:
            return Decision(self.name, Ruling.YES, "not weighed: the present placement breaks a hard goal")
        worth = case.estimate
        return Decision(self.name, Ruling.YES if worth.act else Ruling.NO, worth.sentence)


class Cooldown:
    """Some quiet between two migrations."""

    name = "cooldown"
    hard = False

    def judge(self, case: Case) -> Decision:
        wait = case.settings.cooldown_s
        since = case.spent.since_last_s
        if since is None or since >= wait:
            return Decision(self.name, Ruling.YES, f"{wait:g} s have passed since the last migration")
        return Decision(
            self.name, Ruling.THROTTLE, f"the last migration ended {since:.1f} s ago, {wait:g} s are asked for"
        )


class MovesPerHour:
    """A budget of moved bundles, counted from the store, so a new leader knows it."""

    name = "moves_per_hour"
    hard = False

    def judge(self, case: Case) -> Decision:
        return _budget(self.name, "bundles", case.settings.moves_per_hour, case.spent.moves, case.moves)


class BytesPerHour:
    """A budget of moved bytes."""

    name = "bytes_per_hour"
    hard = False

    def judge(self, case: Case) -> Decision:
        return _budget(self.name, "bytes", case.settings.bytes_per_hour, case.spent.bytes, case.bytes)


SOFT = (Gain(), Cooldown(), MovesPerHour(), BytesPerHour())
# Not even a person may spend more than these; raising them is a setting of its own.
LIMITS = frozenset({"moves_per_hour", "bytes_per_hour"})


def _budget(goal: str, what: str, limit: int | None, spent: int, asked: int) -> Decision:
    if limit is None:
        return Decision(goal, Ruling.YES, f"{what} an hour are not limited")
    if asked > limit:
        return Decision(goal, Ruling.NO, f"the plan moves {asked} {what}, {limit} an hour are allowed")
    if spent + asked > limit:
        sentence = f"{spent} {what} moved in the last hour and {asked} more asked for; {limit} are allowed"
        return Decision(goal, Ruling.THROTTLE, sentence)
    return Decision(goal, Ruling.YES, f"{spent} + {asked} of {limit} {what} an hour")
