"""Counters, gauges and histograms as plain numbers, and their Prometheus text.

Each instrument has one writer, who pays for no lock; whoever exposes it may be another thread. The instruments of
`prometheus_client` lock for every value; a worker measures every token, so its histograms take many values at once.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.registry import CollectorRegistry

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
PREFIX = "pagoda_"

Labels = tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Definition:
    """What a metric is: its name in full, its type, what it means and what tells its series apart."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds, rising, of a histogram; one without bound follows them."""


class Value:
    """A counter or a gauge: one number for each combination of label values."""

    def __init__(self, definition: Definition) -> None:
        self.definition = definition
        self._values: dict[Labels, float] = {}

    def add(self, amount: float = 1.0, *, labels: Labels = ()) -> None:
        self._values[labels] = self._values.get(labels, 0.0) + amount

    def set(self, value: float, *, labels: Labels = ()) -> None:
        """For gauges, and for counters whose total somebody else keeps."""
        self._values[labels] = value

    def family(self, common: Mapping[str, str]) -> Metric:
        names = [*common, *self.definition.labels]
        of_kind = CounterMetricFamily if self.definition.kind == "counter" else GaugeMetricFamily
        family = of_kind(self.definition.name, self.definition.help, labels=names)
        for labels, value in list(self._values.items()):
            family.add_metric([*common.values(), *labels], value)
        return family


class Histogram:
    """How often values fell into each bucket."""

    def __init__(self, definition: Definition, labels: Labels = ()) -> None:
        self.definition = definition
        self._labels = labels
        self._counts = [0] * (len(definition.buckets) + 1)
        self._sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self._counts[bisect_left(self.definition.buckets, value)] += times
        self._sum += value * times

    def family(self, common: Mapping[str, str]) -> Metric:
        family = HistogramMetricFamily(
            self.definition.name, self.definition.help, labels=[*common, *self.definition.labels]
        )
        counts, total = self._counts.copy(), 0
        buckets = []
        for bound, count in zip((*map(str, map(float, self.definition.buckets)), "+Inf"), counts, strict=True):
            total += count
            buckets.append((bound, total))
        family.add_metric([*common.values(), *self._labels], buckets, self._sum)
        return family


class Instruments:
    """The instruments of one process, and the labels that all their series have."""

    def __init__(self, common_labels: Mapping[str, str]) -> None:
        self._common = dict(common_labels)
        self._instruments: list[Value | Histogram] = []
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def value(self, definition: Definition, *, known: Sequence[Labels] = ()) -> Value:
        """A counter or gauge. The `known` combinations of label values show as 0 until something happens."""
        value = Value(definition)
        for labels in known if definition.labels else [()]:
            value.set(0.0, labels=labels)
        self._instruments.append(value)
        return value

    def histogram(self, definition: Definition) -> Histogram:
        histogram = Histogram(definition)
        self._instruments.append(histogram)
        return histogram

    def histograms(self, definition: Definition, known: Iterable[str]) -> dict[str, Histogram]:
        """One histogram for each value of the one label."""
        histograms = {value: Histogram(definition, (value,)) for value in known}
        self._instruments += histograms.values()
        return histograms

    def collect(self) -> Iterator[Metric]:
        """All series, as `prometheus_client` wants them."""
        families: dict[str, Metric] = {}
        for instrument in self._instruments:
            family = instrument.family(self._common)
            families.setdefault(family.name, family)
            if families[family.name] is not family:
                families[family.name].samples += family.samples
        return iter(families.values())

    def exposition(self) -> str:
        """All series in Prometheus' text format."""
        return generate_latest(self._registry).decode()


def merge_expositions(expositions: Sequence[str]) -> str:
    """Several processes' expositions as one: each metric once, with all its series.

    They must come from `Instruments.exposition`: each metric's HELP, TYPE and series in one piece. Where two versions
    of the software explain a metric differently, the first one counts.
    """
    heads: dict[str, list[str]] = {}
    series: dict[str, list[str]] = {}
    for exposition in expositions:
        name, is_first = "", False
        for line in exposition.splitlines():
            if line.startswith("# HELP "):
                name = line.split(" ", 3)[2]
                is_first = name not in heads
                heads.setdefault(name, [])
                series.setdefault(name, [])
            if line.startswith("#"):
                if is_first:
                    heads[name].append(line)
            elif line:
                series[name].append(line)
    return "".join(f"{line}\n" for name, head in heads.items() for line in (*head, *series[name]))
