"""Every error EPlane raises on purpose, in one tree. Each line says what the caller may do.

EPlaneError
├── ProblemError    a placement problem cannot be read: correct the named field (exit 2)
├── AnswerError     a placement policy broke a hard goal: nothing was changed; use another policy (exit 1)
├── PlacementError  a placement or its shares are not valid: correct the table (exit 2)
├── TopologyError   a world or a model shape is impossible: correct the numbers (exit 2)
├── StoreError      the store said no; the kinds below say what to do
│   ├── StoreUnavailable    no answer in time: try again later, serving goes on (exit 5)
│   │   └── OutcomeUnknown  a write may or may not be applied, now or later: read before writing again (exit 5)
│   ├── StoreClosed         used after close: a mistake in the caller's order of shutdown
│   ├── StoreDenied         wrong user, password, certificate or role: correct the settings (exit 2)
│   ├── StoreFull           the store's disk quota is used up: compact, defragment, disarm the alarm (exit 5)
│   ├── StoreRefused        the store rejected the request for the reason it gives: a mistake in the caller
│   │   └── EndpointError      an address of the store is none: correct it (exit 2)
│   ├── InvalidTransaction  not a transaction any store takes: correct the call
│   │   ├── TooManyOperations  split it
│   │   └── ValueTooLarge      store the value in parts
│   ├── LeaseLost           the lease is gone and its keys with it: give up what it stood for
│   └── Compacted           the revision is gone: list again and go on from there
│       └── HistoryLost     the store is younger than what was read from it (wiped, restored): list again
├── BadInput        an argument, a file or an environment value cannot be used: correct what the sentence names (exit 2)
├── CorpusMissing   no text of a domain on this machine to train or measure on: install a package it names (exit 2)
├── TrainingRefused a training run cannot start or go on: its sentence says why (exit 2)
├── BindRefused     an address beyond loopback without TLS and tokens: give both, or bind to loopback (exit 2)
├── StackError      a process of the one-machine stack did not come up: read the log it names (exit 5)
├── ApiProblem      the API answered a problem: `code` says which of the closed set (exit by code)
├── Superseded      a newer agent has taken the node over: end, and do not start this one again (exit 76)
├── WaitEnded       what was waited for goes on, the time given for it is over: look again later (exit 5)
├── NotFound        a group, plan, migration or epoch is not known: name one that is (exit 2)
├── Invalid         a field of a request can not be used: correct the named field (exit 2)
├── Conflict        the state is not what the request assumed: look again, then decide (exit 4)
├── RefusedByGoal   a goal says no: the sentence names it and its reason (exit 3)
├── NotLeader       another controller leads the group: send the change to its `url` (exit 5)
├── CellError       a cell was asked for what its state does not allow: a mistake in the caller's order
│   └── NoFreeCell          fewer free cells than asked for: wait for retired cells or plan a smaller wave
├── BundleMismatch  bytes are not the bundle they should be: fetch it again, from another source
├── TableError      a table would name a cell that is not ready for its expert: nothing was changed
├── TransferError   a bundle could not be fetched from this source: try the next one
│   └── GenerationEnded     paired transfers are over for this transfer group: make a new one
├── WorldEnded      the ranks of a group do not serve the same placement: end the process, loudly
├── LinkError       the engine link
│   ├── MessageError        not a message of the link: correct the named field
│   ├── LinkRefused         the engine said no: `code` says which of the closed set
│   └── LinkLost            the connection is gone or no answer came: connect again and ask for the status
├── CheckpointError a checkpoint cannot be served: correct what the sentence names (exit 2)
├── QueueFull       as many requests wait as may wait: try again later
├── CounterError    a counters file cannot be read: wait for the engine to make it
├── FieldError      one field of outside data is wrong; the kinds below say whose
│   ├── RecordError         a stored or received record cannot be read or is too large: do not act on it
│   ├── LoadReportError     a report of load is refused: drop it and count it
│   ├── PlanError           a plan contradicts itself: solve again
│   ├── NameRefused         a group, node or id is no name: correct it (exit 2)
│   └── SettingsError       a setting is wrong: correct the named setting (exit 2)
├── IllegalTransition  the event does not fit the state of the wave or migration: read the state again (exit 4)
├── InvariantBroken    a rule that keeps serving right would be broken: nothing was changed; a mistake in EPlane
├── PlanImpossible  no order of waves leads to the target with the room there is: give room, or solve again (exit 3)
├── SolverFailed    the solver's process gave no answer: nothing was changed, the next cycle starts a new one
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


class EndpointError(StoreRefused):
    """An address of the store is none, or contradicts the TLS files. Correct the address."""

    exit_code = 2


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


class CorpusMissing(BadInput):
    """A domain has no text on this machine. Install one of the packages that the sentence names."""


class TrainingRefused(BadInput):
    """A training run cannot start, resume or go on. The sentence says why."""


class CellError(EPlaneError):
    """A cell was asked for what its state does not allow. A mistake in the caller's order of calls."""


class NoFreeCell(CellError):
    """Fewer cells are free than asked for. Wait until retired cells are free, or plan a smaller wave."""


class BundleMismatch(EPlaneError):
    """Bytes are not the bundle they should be. Fetch it again, from another source."""


class TableError(EPlaneError):
    """A table would name a cell that is not ready for its expert. Nothing was changed."""


class TransferError(EPlaneError):
    """A bundle could not be fetched from this source. Try the next one."""


class GenerationEnded(TransferError):
    """A paired transfer timed out or broke: its group cannot be used again. Make a new generation."""


class WorldEnded(EPlaneError):
    """The ranks of a group do not serve the same placement. End the process with exit code 70."""

    exit_code = 70


class LinkError(EPlaneError):
    """The engine link did not do what was asked."""


class LinkRefused(LinkError):
    """The engine refused a call. `code` is one of the closed set in runtime/link/messages.py."""

    def __init__(self, code: str, sentence: str) -> None:
        super().__init__(sentence)
        self.code = code


class LinkLost(LinkError):
    """The connection is gone, or no answer came in time. Connect again and ask for the status."""


class CounterError(EPlaneError):
    """A counters file is missing or not readable. Wait until the engine has made it."""


class Superseded(EPlaneError):
    """A newer agent has taken the node over. End; started again, this one would only take the node back."""

    exit_code = 76


class WaitEnded(EPlaneError):
    """What was waited for goes on, and the time given for it is over. Look again later."""

    exit_code = 5


class NotFound(EPlaneError):
    """A group, plan, migration, epoch or node is not known. Name one that is."""

    exit_code = 2


class Invalid(EPlaneError):
    """A field of a request can not be used. Correct the named field."""

    exit_code = 2

    def __init__(self, field: str, sentence: str) -> None:
        super().__init__(f"{field}: {sentence}")
        self.field = field


class Conflict(EPlaneError):
    """The state is not what the request assumed (stale plan, other epoch, a migration active). Look again."""

    exit_code = 4


class RefusedByGoal(EPlaneError):
    """A goal says no. The sentence names it and its reason."""

    exit_code = 3


class NotLeader(EPlaneError):
    """This controller does not lead the group. Send the change to `url`; None: nobody leads now, try again."""

    exit_code = 5

    def __init__(self, url: str | None = None) -> None:
        super().__init__(f"the leader is at {url}" if url else "no controller leads the group now")
        self.url = url


class FieldError(EPlaneError):
    """One field of outside data is wrong. `field` is its path, `reason` the rest of the sentence."""

    def __init__(self, field: str, reason: str) -> None:
        super().__init__(f"{field}: {reason}")
        self.field = field
        self.reason = reason


class MessageError(LinkError, FieldError):
    """Not a message of the engine link. Correct the field that the sentence names."""


class RecordError(FieldError):
    """A stored or received record cannot be read, or would be too large to store. Do not act on it."""


class LoadReportError(FieldError):
    """A report of load is refused. Drop it and count it; the load known before still holds."""


class PlanError(FieldError):
    """A plan contradicts itself or its base. Solve again from the present placement."""


class PlanImpossible(EPlaneError):
    """No order of waves leads to the target with the room there is. Give the room its sentence asks for, or solve again."""

    exit_code = 3


class SolverFailed(EPlaneError):
    """The solver's process gave no answer (late, ended, or wrong). Nothing was changed; the next cycle starts a new one."""


class NameRefused(FieldError):
    """A group, node or id cannot be part of a key. Choose another name."""

    exit_code = 2


class SettingsError(FieldError):
    """A setting is unknown, of the wrong kind, out of range, or contradicts another. Correct the named setting."""

    exit_code = 2


class IllegalTransition(EPlaneError):
    """The event does not fit the state of the wave or migration. Read the stored state again before going on."""

    exit_code = 4


class InvariantBroken(EPlaneError):
    """A rule that keeps serving right would be broken. The step was refused; this is a mistake in EPlane itself."""

    def __init__(self, rule: str, sentence: str) -> None:
        super().__init__(f"{rule}: {sentence}")
        self.rule = rule


class CheckpointError(EPlaneError):
    """A checkpoint cannot be served. The sentence names the file and the tensor, or what the model lacks."""

    exit_code = 2


class QueueFull(EPlaneError):
    """As many requests wait as may wait. Try again later."""
