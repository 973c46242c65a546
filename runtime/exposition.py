"""The launcher's /metrics, in Prometheus' text format. Labels: rank and outcome only, so their number is bounded."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from runtime.front import Front, WorldState
from runtime.wire import BOUNDS_MS

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Collector(Collector):
    def __init__(self, front: Front) -> None:
        self._front = front

    def collect(self) -> Iterator[Metric]:
        front = self._front
        yield GaugeMetricFamily(
            "eplane_runtime_ready", "1 while the world serves.", float(front.state is WorldState.READY)
        )
        yield GaugeMetricFamily("eplane_runtime_requests_open", "Requests under way.", front.open_requests)
        requests = CounterMetricFamily("eplane_runtime_requests", "Requests by outcome.", labels=["outcome"])
        for outcome in ("ok", "cancelled", "refused", "failed"):
            requests.add_metric([outcome], getattr(front.totals, outcome))
        yield requests
        yield CounterMetricFamily("eplane_runtime_tokens_returned", "Tokens given to clients.", front.totals.tokens)
        yield from self._ranks()

    def _ranks(self) -> Iterator[Metric]:
        counters: dict[str, CounterMetricFamily] = {
            "steps": CounterMetricFamily("eplane_runtime_steps", "Steps with tokens.", labels=["rank"]),
            "ticks": CounterMetricFamily("eplane_runtime_ticks", "Steps without tokens.", labels=["rank"]),
            "switches": CounterMetricFamily("eplane_runtime_switches", "Placements taken live.", labels=["rank"]),
            "prefill": CounterMetricFamily("eplane_runtime_prefill_tokens", "Prompt tokens run.", labels=["rank"]),
            "decode": CounterMetricFamily("eplane_runtime_decode_tokens", "Answer tokens run.", labels=["rank"]),
        }
        gauges = {
            "waiting": GaugeMetricFamily("eplane_runtime_requests_waiting", "Requests not begun.", labels=["rank"]),
            "running": GaugeMetricFamily("eplane_runtime_requests_running", "Requests begun.", labels=["rank"]),
            "pages_free": GaugeMetricFamily("eplane_runtime_kv_pages_free", "Free cache pages.", labels=["rank"]),
        }
        seconds = HistogramMetricFamily("eplane_runtime_step_seconds", "Time of a step with tokens.", labels=["rank"])
        for number, rank in self._front.ranks.items():
            if not rank.stats:
                continue
            for name, counter in counters.items():
                counter.add_metric([str(number)], rank.stats[name])
            for name, gauge in gauges.items():
                gauge.add_metric([str(number)], rank.stats[name])
            buckets, total = [], 0
            for bound, count in zip((*BOUNDS_MS, None), rank.stats["counts"], strict=True):
                total += count
                buckets.append(("+Inf" if bound is None else str(bound / 1000.0), total))
            seconds.add_metric([str(number)], buckets, rank.stats["sum_ms"] / 1000.0)
        yield from (*counters.values(), *gauges.values(), seconds)


def exposition(front: Front) -> bytes:
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(front))
    return generate_latest(registry)
