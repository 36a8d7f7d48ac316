"""Spans of OpenTelemetry for saves and restores.

A span such as `shardwise.save` has a child for each stage, such as `shardwise.save.write`. The
program chooses where spans go, with the SDK of OpenTelemetry; this module needs only its API.
"""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace as otel
from opentelemetry.trace import Status, StatusCode, Tracer
from opentelemetry.util.types import AttributeValue

from shardwise.kernel.engine.load import LoadReport
from shardwise.kernel.engine.save import SaveReport
from shardwise.kernel.events import Event
from shardwise.ports.hooks import RestoreReport, Run, RunHook

Attributes = Mapping[str, AttributeValue]


class OpenTelemetryHook(RunHook):
    """Makes a span for each save and restore of a `Checkpointer`, in each rank.

    Example:

        sw.Checkpointer(root, hooks=[OpenTelemetryHook])

    A span of a save ends when `save` returns. What agents do later is not part of it.

    Args:
        run: the run.
        tracer: makes the spans. Default: that of the global provider.
    """

    def __init__(self, run: Run, tracer: Tracer | None = None) -> None:
        self._tracer = tracer
        self._attributes = {"shardwise.rank": run.rank, "shardwise.world_size": run.world_size}
        self._root = str(run.root)

    def staged(self, report: SaveReport, *, durable: bool) -> None:
        """Make the spans of a save, or of a snapshot that stays in memory."""
        name = "shardwise.save" if durable else "shardwise.snapshot"
        _make_spans(name, report, self._attributes | _attributes_of(report), self._tracer)

    def restored(self, report: RestoreReport) -> None:
        """Make the spans of a restore."""
        attributes = self._attributes | _attributes_of(report.load)
        attributes["shardwise.source"] = report.source
        _make_spans("shardwise.restore", report, attributes, self._tracer)

    def failed(self, error: Exception) -> None:
        """Make a span with the error of a failed save."""
        tracer = self._tracer or otel.get_tracer("shardwise")
        attributes = self._attributes | {"file.path": self._root, "error.type": _type_of(error)}
        with tracer.start_as_current_span("shardwise.save", attributes=attributes) as span:
            span.record_exception(error)
            span.set_status(Status(StatusCode.ERROR, str(error)))


def trace(report: SaveReport | LoadReport, tracer: Tracer | None = None) -> None:
    """Make the spans of a save or load without a `Checkpointer`.

    Example:

        trace(sw.save(path, state))

    Args:
        report: the report.
        tracer: makes the spans. Default: that of the global provider.
    """
    name = "shardwise.save" if isinstance(report, SaveReport) else "shardwise.load"
    _make_spans(name, report, _attributes_of(report), tracer)


def _attributes_of(report: SaveReport | LoadReport) -> dict[str, AttributeValue]:
    moved = report.bytes_written if isinstance(report, SaveReport) else report.bytes_read
    attributes: dict[str, AttributeValue] = {"file.path": report.path, "shardwise.bytes": moved}
    return attributes if report.step is None else {**attributes, "shardwise.step": report.step}


def _make_spans(
    name: str,
    report: SaveReport | LoadReport | RestoreReport,
    attributes: Attributes,
    tracer: Tracer | None,
) -> None:
    tracer = tracer or otel.get_tracer("shardwise")
    record = report.record
    start = record.began if record.agreed is None else record.agreed

    def nanoseconds(seconds: float) -> int:
        """Return a time of `perf_counter` in nanoseconds since 1970."""
        return round((record.clock + seconds - start) * 1e9)

    operation = tracer.start_span(name, start_time=nanoseconds(record.began), attributes=attributes)
    parent = otel.set_span_in_context(operation)
    for event in record.events:
        span = tracer.start_span(
            f"{name}.{event.stage}",
            parent,
            start_time=nanoseconds(event.start),
            attributes=_attributes_of_stage(event),
        )
        span.end(nanoseconds(event.start + event.seconds))
    operation.end(nanoseconds(record.ended))


def _attributes_of_stage(event: Event) -> dict[str, AttributeValue]:
    found: dict[str, AttributeValue] = {
        "shardwise.seconds_waited": event.waited,
        "shardwise.retries": event.retries,
    }
    if event.bytes:
        found["shardwise.bytes"] = event.bytes
    if event.file:
        found |= {"file.name": event.file, "file.size": event.bytes}
    return found


def _type_of(error: Exception) -> str:
    kind = type(error)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )
