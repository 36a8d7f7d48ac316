"""Spans in the SDK of OpenTelemetry."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
import torch

import shardwise as sw

pytest.importorskip("opentelemetry.sdk", reason="pip install '.[test]'")

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode, Tracer

from shardwise.integrations.opentelemetry import OpenTelemetryHook, trace
from shardwise.testing.hook_suite import HookSuite


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    return InMemorySpanExporter()


@pytest.fixture
def tracer(exporter: InMemorySpanExporter) -> Tracer:
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return provider.get_tracer("shardwise")


def state() -> dict[str, torch.Tensor]:
    return {"w": torch.arange(1000.0)}


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_run(tmp_path: Path, exporter: InMemorySpanExporter, tracer: Tracer) -> None:
    begin = time.time_ns()
    hooks = [partial(OpenTelemetryHook, tracer=tracer)]
    with sw.Checkpointer(tmp_path, memory=None, hooks=hooks) as checkpointer:
        checkpointer.save(7, state())
        checkpointer.restore(state())
    found = by_name(exporter)
    stages = ["describe", "plan", "write", "publish"]
    phases = ["asking", "reading", "open", "match", "plan", "read", "restore", "rebuilding"]
    assert set(found) == {
        *("shardwise.save", "shardwise.restore"),
        *(f"shardwise.save.{stage}" for stage in stages),
        *(f"shardwise.restore.{phase}" for phase in phases),
    }
    save, write = found["shardwise.save"], found["shardwise.save.write"]
    assert save.attributes is not None
    assert save.attributes["shardwise.step"] == 7
    assert (save.attributes["shardwise.rank"], save.attributes["shardwise.world_size"]) == (0, 1)
    assert save.attributes["file.path"] == str(tmp_path / "step-00000007")
    (file,) = (tmp_path / "step-00000007").glob("r*.safetensors")
    assert write.attributes is not None
    assert (write.attributes["file.name"], write.attributes["file.size"]) == (
        file.name,
        file.stat().st_size,
    )
    for name, span in found.items():
        parent = found[".".join(name.split(".")[:2])]
        times = parent.start_time, span.start_time, span.end_time, parent.end_time
        assert begin <= times[0] <= times[1] <= times[2] <= times[3] <= time.time_ns()  # type: ignore[operator]
        if span is not parent:
            assert span.parent is not None
            assert span.parent.span_id == parent.context.span_id
    assert found["shardwise.restore"].attributes["shardwise.source"] == "storage"  # type: ignore[index]


def test_a_failed_save(tmp_path: Path, exporter: InMemorySpanExporter, tracer: Tracer) -> None:
    hooks = [partial(OpenTelemetryHook, tracer=tracer)]
    with sw.Checkpointer(tmp_path, memory=None, hooks=hooks, save_at_end=False) as checkpointer:
        checkpointer.save(7, state())
        exporter.clear()
        with pytest.raises(sw.CheckpointExistsError):
            checkpointer.save(7, state())
    (span,) = exporter.get_finished_spans()
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes is not None
    assert span.attributes["error.type"] == "shardwise.kernel.errors.CheckpointExistsError"
    assert span.events[0].name == "exception"


def test_a_save_and_a_load_alone(
    tmp_path: Path, exporter: InMemorySpanExporter, tracer: Tracer
) -> None:
    trace(sw.save(tmp_path / "it", state(), step=3), tracer)
    trace(sw.load(tmp_path / "it", state()), tracer)
    found = by_name(exporter)
    assert {"shardwise.save.write", "shardwise.load.read"} < set(found)
    assert found["shardwise.load.read"].attributes["shardwise.bytes"] > 4000  # type: ignore[index,operator]


class TestOpenTelemetryHook(HookSuite):
    @pytest.fixture
    def make_hook(self, tracer: Tracer) -> partial[OpenTelemetryHook]:
        return partial(OpenTelemetryHook, tracer=tracer)


def test_without_a_provider_nothing_happens(tmp_path: Path) -> None:
    trace(sw.save(tmp_path / "it", state()))
    hooks = [OpenTelemetryHook]
    root = tmp_path / "run"
    with sw.Checkpointer(root, memory=None, hooks=hooks, save_at_end=False) as checkpointer:
        checkpointer.save(1, state())
        with pytest.raises(sw.CheckpointExistsError):
            checkpointer.save(1, state())
