"""Prometheus: a collector that asks a loader for its metrics whenever it is scraped.

from prometheus_client import REGISTRY, start_http_server

REGISTRY.register(LoaderCollector(loader, rank="0"))
start_http_server(9100)
"""

from __future__ import annotations

from collections.abc import Iterator
from weakref import ref

try:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
    from prometheus_client.registry import Collector
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "swift_loader.integrations.prometheus needs its client: pip install prometheus-client",
        name="prometheus_client",
    ) from error

from swift_loader.integrations.figures import FIGURES, Figure, HasMetrics, Kind

__all__ = ["LoaderCollector"]


class LoaderCollector(Collector):
    """Tells a registry the metrics of a loader. Once the loader is gone, it tells nothing."""

    def __init__(self, loader: HasMetrics, **labels: str) -> None:
        """Attach a loader.

        Args:
            loader: Doesn't live longer for it.
            labels: Labels of all metrics, for example `rank="0"`. Loaders in one registry need different ones.
        """
        self._loader = ref(loader)
        self._labels = labels

    def describe(self) -> Iterator[Metric]:
        """Yield nothing: so several collectors may be registered, and none is asked then."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics. The registry calls it, on any thread."""
        loader = self._loader()
        if loader is None:
            return
        metrics = loader.metrics(prefix="")
        for figure in FIGURES:
            yield self._family(figure, metrics)

    def _family(self, figure: Figure, metrics: dict[str, float]) -> Metric:
        make = CounterMetricFamily if figure.kind is Kind.TOTAL else GaugeMetricFamily
        words = (figure.unit.replace("/s", "_per_second"),) if figure.is_rate else (*figure.name, figure.unit)
        name = "_".join(("swift_loader", *words))
        family: Metric = make(name, figure.help, labels=[*self._labels, *figure.labels])
        for key, values in figure.keys.items():
            family.add_metric([*self._labels.values(), *values], metrics[key] * figure.scale)
        return family
