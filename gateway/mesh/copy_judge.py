"""Compares the copies of each expert by their fingerprints, and says which are not to be used.

What was seen alone is trusted. A copy that differs from it is set aside until the gateway's own
checkpoint was read (`gateway.mesh.arbiter`); so are all copies if they differ when they are first
seen. Who then differs from the checkpoint is *wrong* for as long as it lives. If the checkpoint
agrees with nobody, or cannot be read, nothing changes, and the log says so.

Owned by the `membership` thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Set
from dataclasses import replace

from gateway.mesh.arbiter import Answer
from gateway.mesh.mesh_status import ExpertWorkerState, ExpertWorkerStatus
from gateway.mesh.worker_report import KnownWorker, WorkerReport
from gateway.placement.expert_load import WorkerLife, life_of
from gateway.placement.state import ExpertKey

logger = logging.getLogger("gateway.membership")

Copies = Mapping[ExpertKey, int]
"""Resident expert to the fingerprint of its bytes."""

MANY = 8
"""So many wrong experts, and not a right one, are taken for a wrong checkpoint."""
_FIX = "copy the checkpoint to its machine again and restart it"
_NONE: frozenset[ExpertKey] = frozenset()


class CopyJudge:
    """Remembers what was seen of each expert.

    Args:
        ask: Has the gateway's own copy of an expert read; `take` gets the answer.

    Attributes:
        num_wrong: Wrong copies that were found so far.
    """

    def __init__(self, ask: Callable[[ExpertKey], None]) -> None:
        self.num_wrong = 0
        self._ask = ask
        self._held: Mapping[WorkerLife, Copies] = {}
        self._trusted: dict[ExpertKey, int] = {}
        self._disputed: set[ExpertKey] = set()
        self._answers: dict[ExpertKey, int | None] = {}  # None: nobody can tell
        self._wrong: dict[WorkerLife, set[ExpertKey]] = {}

    def hear(self, held: Mapping[WorkerLife, Copies]) -> None:
        """Takes what all expert workers hold now; looks only at what is new."""
        fresh: set[ExpertKey] = set()
        for life, copies in held.items():
            before = self._held.get(life, {})
            if copies is not before and copies != before:
                fresh.update(key for key, _ in copies.items() - before.items())
        self._held = held
        self._forget_earlier_lives()
        for key in sorted(fresh):
            self._compare(key)

    def take(self, answer: Answer) -> None:
        """The gateway's own checkpoint was read."""
        key, fingerprint = answer.key, answer.fingerprint
        self._disputed.discard(key)
        seen = {*self._holders(key).values(), self._trusted.get(key)}
        if fingerprint is None or fingerprint not in seen:
            self._answers[key] = None
            why = (
                f"cannot be read: {answer.problem}"
                if fingerprint is None
                else "is like none of them"
            )
            logger.error(
                "copies of layer %d expert %d differ (%s), and the checkpoint of this gateway %s. "
                "Nobody can tell who is right, so all are used: compare the checkpoints",
                *(*key, self._described(key), why),
            )
            return
        self._answers[key] = self._trusted[key] = fingerprint
        self._convict(key)

    def judged(self, report: WorkerReport) -> WorkerReport:
        """A report without the copies that are not to be used."""
        known = report.known
        if known is None:
            return report
        life = life_of(known.view)
        wrong, unsure = self._wrong.get(life, _NONE), self._unsure(known)
        if not wrong and not unsure:
            return report
        right = known.view.resident - wrong - unsure
        if len(wrong) >= MANY and not right and not unsure:
            return _all_wrong(report.status, wrong)
        return _without(report, known, frozenset(wrong), unsure)

    def _compare(self, key: ExpertKey) -> None:
        values = set(self._holders(key).values())
        if key not in self._trusted and len(values) == 1:
            self._trusted[key] = values.pop()
        elif key in self._answers:
            self._convict(key)
        elif values - {self._trusted.get(key)} and key not in self._disputed:
            self._disputed.add(key)
            self._ask(key)

    def _convict(self, key: ExpertKey) -> None:
        right = self._answers[key]
        if right is None:
            return
        for life, fingerprint in self._holders(key).items():
            wrong = self._wrong.setdefault(life, set())
            if fingerprint == right:
                wrong.discard(key)
            elif key not in wrong:
                wrong.add(key)
                self.num_wrong += 1
                _tell(life[0], key, len(wrong))

    def _holders(self, key: ExpertKey) -> dict[WorkerLife, int]:
        return {life: copies[key] for life, copies in self._held.items() if key in copies}

    def _unsure(self, known: KnownWorker) -> Set[ExpertKey]:
        """Copies that differ from what is trusted, while nobody has said who is right."""
        return {
            key
            for key in self._disputed
            if key in known.copies and known.copies[key] != self._trusted.get(key)
        }

    def _forget_earlier_lives(self) -> None:
        """A worker that was started again may have been given other files."""
        present = {worker_id for worker_id, _ in self._held}
        self._wrong = {
            life: wrong
            for life, wrong in self._wrong.items()
            if wrong and (life in self._held or life[0] not in present)
        }

    def _described(self, key: ExpertKey) -> str:
        holders = sorted(self._holders(key).items())
        parts = [f"{life[0]} has {fingerprint:016x}" for life, fingerprint in holders]
        if (trusted := self._trusted.get(key)) is not None:
            parts.append(f"before it was {trusted:016x}")
        return ", ".join(parts)


def _tell(worker_id: str, key: ExpertKey, num_wrong: int) -> None:
    """One line for each wrong copy, but not for thousands of one expert worker."""
    if num_wrong <= MANY:
        logger.error(
            "expert worker %s has layer %d expert %d with other bytes than this gateway's "
            "checkpoint: it is not asked for this expert. %s%s",
            *(worker_id, *key, _FIX.capitalize()),
            ". There may be more: only so many are told" if num_wrong == MANY else "",
        )


def _without(
    report: WorkerReport,
    known: KnownWorker,
    wrong: frozenset[ExpertKey],
    unsure: Set[ExpertKey],
) -> WorkerReport:
    view, entry, status = known.view, report.entry, report.status
    aside = (wrong | unsure) & view.resident
    if wrong:
        message = f"{_named(wrong)} with other bytes than this gateway's checkpoint: {_FIX}"
        status = replace(status, message="; ".join(filter(None, (status.message, message))))
    if entry is not None:
        resident = {
            layer: tuple(expert for expert in experts if (layer, expert) not in aside)
            for layer, experts in entry.resident.items()
        }
        entry = replace(entry, resident=resident)
    view = replace(
        view,
        resident=view.resident - aside,
        retiring=view.retiring | aside,
        failed=view.failed | wrong,
        wrong=wrong,
    )
    return WorkerReport(status, entry, replace(known, view=view))


def _all_wrong(status: ExpertWorkerStatus, wrong: Set[ExpertKey]) -> WorkerReport:
    message = f"all it has are {_named(wrong)}, with other bytes than this gateway's checkpoint: "
    state = ExpertWorkerState.INCOMPATIBLE
    return WorkerReport(replace(status, state=state, message=message + _FIX))


def _named(keys: Set[ExpertKey]) -> str:
    layer, expert = min(keys)
    more = f" and {len(keys) - 1} more" if len(keys) > 1 else ""
    return f"layer {layer} expert {expert}{more}"
