"""OpenTelemetry: observable instruments that ask a loader for its metrics at each collection.

observe(loader, attributes={"rank": 0})
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from weakref import ref

try:
    from opentelemetry.metrics import CallbackOptions, Meter, Observation, get_meter
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "swift_loader.integrations.opentelemetry needs its API: pip install opentelemetry-api", name="opentelemetry"
    ) from error

from swift_loader.integrations.figures import FIGURES, Figure, HasMetrics, Kind

__all__ = ["observe"]

_UNITS = {"seconds": "s", "ratio": "1"}


def observe(loader: HasMetrics, meter: Meter | None = None, attributes: Mapping[str, str | int] | None = None) -> None:
    """Let a meter observe a loader. Once the loader is gone, it observes nothing.

    Args:
        loader: Doesn't live longer for it.
        meter: Call it once per meter. Default: the global provider's meter `"swift_loader"`.
        attributes: Attributes of all observations, for example the rank.
    """
    meter = get_meter("swift_loader") if meter is None else meter
    for figure in FIGURES:
        make = meter.create_observable_counter if figure.kind is Kind.TOTAL else meter.create_observable_gauge
        counted = [] if figure.is_rate or figure.unit in _UNITS else [figure.unit]
        name = ".".join(("swift_loader", *figure.name, *counted))
        callback = partial(_observations, ref(loader), figure, dict(attributes or {}))
        make(name, callbacks=[callback], unit=_UNITS.get(figure.unit, f"{{{figure.unit}}}"), description=figure.help)


def _observations(
    loader: ref[HasMetrics], figure: Figure, attributes: dict[str, str | int], options: CallbackOptions
) -> Iterable[Observation]:
    """Return what an instrument observes now. Runs on the thread that collects."""
    del options
    present = loader()
    if present is None:
        return []
    metrics = present.metrics(prefix="")
    return [
        Observation(metrics[key] * figure.scale, {**attributes, **dict(zip(figure.labels, values, strict=True))})
        for key, values in figure.keys.items()
    ]
