"""Guesses live between one and two lifetimes."""

from pagoda.cluster.directory.predicted import PredictedBlocks


def believed(predicted: PredictedBlocks, now_s: float) -> dict[str, int]:
    found: dict[str, int] = {}
    for generation in predicted.generations(now_s):
        for key, mask in generation.items():
            found[key.decode()] = found.get(key.decode(), 0) | mask
    return found


def test_lifetimes() -> None:
    predicted = PredictedBlocks(2.0, now_s=0.0)
    predicted.add(0, [b"x", b"y"])
    assert believed(predicted, 1.9) == {"x": 1, "y": 1}
    predicted.add(1, [b"x"])
    assert believed(predicted, 2.0) == {"x": 9, "y": 1}
    predicted.add(2, [b"x"])
    assert believed(predicted, 3.9) == {"x": 73, "y": 1}
    assert believed(predicted, 4.0) == {"x": 64}
    assert believed(predicted, 100.0) == {}


def test_after_a_long_silence_nothing_is_believed() -> None:
    predicted = PredictedBlocks(2.0, now_s=0.0)
    predicted.add(0, [b"x"])
    assert believed(predicted, 4.0) == {}


def test_worker_that_is_gone() -> None:
    predicted = PredictedBlocks(2.0, now_s=0.0)
    predicted.add(0, [b"x"])
    predicted.add(1, [b"x", b"y"])
    predicted.forget(1)
    assert believed(predicted, 0.0) == {"x": 1}
    assert len(predicted) == 1
