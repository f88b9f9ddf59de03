# SPDX-License-Identifier: Apache-2.0
"""What /metrics reports, in the text format of Prometheus."""

from collections.abc import Callable

import prometheus_client

SECONDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)  # borders of the histograms


class Metrics:
    """Counters of one server.

    Attributes:
      requests: answered, by path and status.
      prompt_tokens, completion_tokens: of answered requests.
      first_token: seconds from a request's arrival to the first part of its answer.
      duration: seconds from a request's arrival to the end of its answer.
    """

    def __init__(self, gauges: dict[str, tuple[str, Callable[[], float]]]):
        """Register all metrics; `gauges` are {name: (meaning, function)}."""
        self._registry = prometheus_client.CollectorRegistry()
        self.requests = self._counter("torus_requests", "answered requests", ("path", "status"))
        self.prompt_tokens = self._counter("torus_prompt_tokens", "tokens of prompts")
        self.completion_tokens = self._counter("torus_completion_tokens", "tokens of answers")
        self.first_token = self._seconds("torus_first_token_seconds", "time to the first part of an answer")
        self.duration = self._seconds("torus_answer_seconds", "time to the end of an answer")
        for name, (meaning, value) in gauges.items():
            prometheus_client.Gauge(name, meaning, registry=self._registry).set_function(value)

    def text(self) -> bytes:
        """Return all metrics."""
        return prometheus_client.generate_latest(self._registry)

    def _counter(self, name: str, meaning: str, labels: tuple[str, ...] = ()) -> prometheus_client.Counter:
        return prometheus_client.Counter(name, meaning, labels, registry=self._registry)

    def _seconds(self, name: str, meaning: str) -> prometheus_client.Histogram:
        return prometheus_client.Histogram(name, meaning, buckets=SECONDS, registry=self._registry)
