"""The seam: every way to place experts is a Policy, and all pass one contract suite."""

from __future__ import annotations

from typing import Protocol

from controller.solver.answer import Answer
from controller.solver.problem import Problem
from eplane.errors import ProblemError


class Policy(Protocol):
    """A placement policy. Pure: the same problem gives the same answer, unless a time budget cuts it short."""

    @property
    def name(self) -> str: ...

    def solve(self, problem: Problem) -> Answer:
        """An answer that meets every hard goal. Raises Infeasible when there is none."""
        ...


def policies() -> dict[str, Policy]:
    """Every policy by name. Compiled kernels load only when one of them solves."""
    from controller.solver.methods.eplane import EPlanePolicy
    from controller.solver.methods.eplb import EplbPolicy
    from controller.solver.methods.flash import FlashPolicy
    from controller.solver.methods.omni import OmniPolicy
    from controller.solver.methods.omni_swap import OmniSwapPolicy
    from controller.solver.methods.static import StaticPolicy
    from controller.solver.methods.swift import SwiftPolicy

    known: tuple[Policy, ...] = (
        StaticPolicy(),
        EplbPolicy(),
        OmniPolicy(),
        OmniSwapPolicy(),
        SwiftPolicy(),
        FlashPolicy(),
        EPlanePolicy(),
    )
    return {policy.name: policy for policy in known}


def policy_named(name: str) -> Policy:
    """Raises ProblemError for a name that is not registered."""
    known = policies()
    if name not in known:
        raise ProblemError("policy", f"is {name!r}, must be one of {', '.join(sorted(known))}")
    return known[name]
