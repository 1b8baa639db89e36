"""Never fit and gate on the same trace: a forecast judged by what it was fitted on proves nothing."""

from collections.abc import Sequence

from measure.runs import Run
from tracefile.records.errors import InputError


def refuse_fitted_on_compared(runs: Sequence[Run]) -> list[str]:
    """InputError if a predicted run's model was fitted on a compared trace or on the one that it predicts.

    Returns notes on what could not be ruled out: a forecast that does not say what it was fitted on, and a run that
    is a replay of a trace the model was fitted on (another measurement, but the same load).
    """
    notes: list[str] = []
    for predicted in (run for run in runs if run.meta.source == "sim"):
        fitted = _fit_digests(predicted)
        if fitted is None:
            notes.append(f"{predicted.label} does not say what its model was fitted on (no fit_digests in its meta).")
            continue
        for run in runs:
            notes += _check(predicted, fitted, run)
    return notes


def _check(predicted: Run, fitted: set[str], run: Run) -> list[str]:
    source = run.meta.workload.source_digest if run.meta.workload else None
    if run is predicted and source in fitted:
        raise InputError(
            f"{predicted.file}: {predicted.label}'s model was fitted on the trace that it predicts "
            f"({_short(source)}); expected a model fitted on other traces"
        )
    if run.meta.source != "sim" and run.digest in fitted:
        raise InputError(
            f"{predicted.file}: {predicted.label}'s model was fitted on {run.label} ({_short(run.digest)}), which "
            "would judge it here; expected a model fitted on other traces"
        )
    if run.meta.source != "sim" and source in fitted:
        return [f"{run.label} replays a trace that {predicted.label}'s model was fitted on: not a load unseen."]
    return []


def _fit_digests(predicted: Run) -> set[str] | None:
    digests = predicted.meta.extra.get("fit_digests")
    if digests is None:
        return None
    if not isinstance(digests, list) or not all(isinstance(digest, str) for digest in digests):
        raise InputError(f"{predicted.file}:1: meta.fit_digests: {digests!r:.60}; expected a list of hex trace digests")
    return set(digests)


def _short(digest: str | None) -> str:
    return f"digest {(digest or '')[:12]}…"
