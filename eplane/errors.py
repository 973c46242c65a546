"""Every error EPlane raises on purpose, in one tree. Each line says what the caller may do.

EPlaneError
├── ProblemError    a placement problem cannot be read: correct the named field (exit 2)
├── AnswerError     a placement policy broke a hard goal: nothing was changed; use another policy (exit 1)
├── PlacementError  a placement or its shares are not valid: correct the table (exit 2)
├── TopologyError   a world or a model shape is impossible: correct the numbers (exit 2)
├── StoreError      the store said no; the kinds below say what to do
│   ├── StoreUnavailable    no answer in time: try again later, serving goes on (exit 5)
│   │   ├── BadInput        an argument, a file or an environment value cannot be used: correct what the sentence names (exit 2)
├── BindRefused     an address beyond loopback without TLS and tokens: give both, or bind to loopback (exit 2)
├── StackError      a process of the one-machine stack did not come up: read the log it names (exit 5)
├── ApiProblem      the API answered a problem: `code` says which of the closed set (exit by code)
└── OutcomeUnknown  a write may or may not be applied, now or later: read before writing again (exit 5)
│   ├── StoreClosed         used after close: a mistake in the caller's order of shutdown
│   ├── StoreDenied         wrong user, password, certificate or role: correct the settings (exit 2)
│   ├── StoreFull           the store's disk quota is used up: compact, defragment, disarm the alarm (exit 5)
│   ├── StoreRefused        the store rejected the request for the reason it gives: a mistake in the caller
│   ├── InvalidTransaction  not a transaction any store takes: correct the call
│   │   ├── TooManyOperations  split it
│   │   └── ValueTooLarge      store the value in parts
│   ├── LeaseLost           the lease is gone and its keys with it: give up what it stood for
│   └── Compacted           the revision is gone: list again and go on from there
│       └── HistoryLost     the store is younger than what was read from it (wiped, restored): list again
└── Infeasible      no placement meets the hard goals: relax the named goal (exit 3)
"""

from __future__ import annotations


class EPlaneError(Exception):
    """Base of every error raised on purpose. `exit_code` is what a command ends with."""

    exit_code = 1


class ProblemError(EPlaneError):
    """A placement problem cannot be read. Correct the field named in the sentence."""

    exit_code = 2

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field


class Infeasible(EPlaneError):
    """No placement meets the hard goals. `goal` names the one that cannot be met."""

    exit_code = 3

    def __init__(self, goal: str, reason: str) -> None:
        super().__init__(f"goal {goal} cannot be met: {reason}")
        self.goal = goal


class AnswerError(EPlaneError):
    """A placement policy gave an answer that breaks a hard goal. Nothing was changed; use another policy."""


class PlacementError(EPlaneError):
    """A placement, or the shares of one, are not valid. Correct the table that the sentence describes."""

    exit_code = 2


class TopologyError(EPlaneError):
    """A world or a model shape is impossible. Correct the numbers named in the sentence."""

    exit_code = 2


class StoreError(EPlaneError):
    """The store did not do what was asked."""


class StoreUnavailable(StoreError):
    """No answer in time. Try again later."""

    exit_code = 5


class OutcomeUnknown(StoreUnavailable):
    """A write was sent and no answer came; it may be applied, even later. Read before writing again."""


class StoreClosed(StoreError):
    """The store was used after it was closed."""


class StoreDenied(StoreError):
    """User, password, certificate or role do not allow this. Correct the settings."""

    exit_code = 2


class StoreFull(StoreError):
    """The store's quota is used up: writes fail until it is compacted, defragmented and the alarm disarmed."""

    exit_code = 5


class StoreRefused(StoreError):
    """The store rejected the request as malformed."""


class InvalidTransaction(StoreError):
    """Not a transaction that any store takes. Correct the call."""


class TooManyOperations(InvalidTransaction):
    """More operations or compares than one transaction may have. Split it."""


class ValueTooLarge(InvalidTransaction):
    """A value or a transaction over the size limit. Store it in parts."""


class LeaseLost(StoreError):
    """The lease is gone, and its keys with it. Give up what it stood for."""


class Compacted(StoreError):
    """The revision is no longer kept. List again and go on from the list's revision."""

    def __init__(self, message: str, compact_revision: int) -> None:
        super().__init__(message)
        self.compact_revision = compact_revision


class HistoryLost(Compacted):
    """The store is younger than what was read from it: it was wiped or restored. List again; nothing read before holds."""


class BadInput(EPlaneError):
    """An argument, a file or an environment value cannot be used. Correct what the sentence names."""

    exit_code = 2


class BindRefused(EPlaneError):
    """The API would be reachable beyond this machine without TLS and tokens. Give both, or bind to loopback."""

    exit_code = 2


class StackError(EPlaneError):
    """A process of the one-machine stack did not come up or does not stay up. Read the log the sentence names."""

    exit_code = 5


class ApiProblem(EPlaneError):
    """The API answered a problem, or could not be reached. `code` is one of the closed set in api/problems.py."""

    def __init__(self, code: str, sentence: str, status: int, exit_code: int) -> None:
        super().__init__(sentence)
        self.code = code
        self.status = status
        self.exit_code = exit_code
