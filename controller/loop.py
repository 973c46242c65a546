"""The controller on one page: what one group's leader does, again and again.

    observe   what the store says and what the ranks counted; a new world is adopted, never pushed at
    judge     may anything be done, and is there enough to judge by?
    decide    shares first (no bytes move); then a placement near the present one, if every goal agrees, and confirmed
              on traffic that came after it was found
    plan      waves that are safe one by one, stored; dry unless the mode is auto
    drive     the driver takes the migration through its waves, here and after a restart alike

Each cycle ends in one sentence. If the controller stops, the ranks serve on with the placement they have.
"""

from __future__ import annotations

from controller.decide import Found, Said, too_little
from controller.facts import Facts
from controller.lead import Lead
from controller.verdict import Verdict, VerdictKind
from eplane.records import Mode


class Loop:
    """The decisions of one term. `cycle` is called by a timer; `Lead.drive` runs beside it."""

    def __init__(self, lead: Lead) -> None:
        self._lead = lead

    async def cycle(self) -> Verdict:
        kind, sentence = await self._lead.guarded(self._cycle)
        return self._lead.speak(kind, sentence)

    async def _cycle(self) -> Said:
        facts = self._lead.observe()
        idle = self._judge(facts)
        if facts is None or idle is not None:
            return idle or (VerdictKind.NO_WORLD, "no world has been adopted yet")
        await self._lead.share(facts)
        await self._lead.measure(facts)
        found = await self._decide(facts)
        if not isinstance(found, Found):
            return found
        plan = await self._lead.plan(facts, found)
        if self._lead.state.mode() is not Mode.AUTO:
            return VerdictKind.PROPOSED, f"plan {plan.id} is proposed: {found.estimate.sentence}"
        migration = await self._lead.execute(plan.id)
        return VerdictKind.STARTED, f"migration {migration} begins, {found.told}"

    def _judge(self, facts: Facts | None) -> Said | None:
        """Why nothing is to be decided now, if so."""
        lead = self._lead
        if lead.state.mode() is Mode.OFF:
            return VerdictKind.OFF, "the group's mode is off"
        busy = lead.migrating()
        if busy is not None:
            return busy
        if facts is None or lead.trouble:
            return (
                VerdictKind.NO_WORLD if facts is None else VerdictKind.DISAGREE
            ), lead.trouble or "no rank has reported yet"
        absent = lead.state.absent()
        if absent:
            return (
                VerdictKind.ABSENT,
                f"no agent that sees the adopted world on {', '.join(absent)}: nothing is started",
            )
        pause = lead.state.pause()
        if pause is not None:
            return VerdictKind.PAUSED, f"paused by {pause.actor}: {pause.reason}"
        waiting = too_little(facts)
        if waiting is not None:
            return waiting
        if lead.state.mode() is Mode.OBSERVE:
            return VerdictKind.OBSERVING, f"measured balancedness {facts.balancedness:.3f}; the mode is observe"
        return None

    async def _decide(self, facts: Facts) -> Found | Said:
        """A change that every goal agrees to and that later traffic confirmed; else the sentence why there is none."""
        standing = await self._lead.standing(facts)
        if standing is not None:
            return VerdictKind.PROPOSED, f"measured balancedness {facts.balancedness:.3f}; {standing}"
        return await self._lead.decider.decide(facts)
