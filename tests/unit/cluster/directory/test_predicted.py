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


def test_slots_are_not_reused_while_guesses_of_them_live() -> None:
    predicted = PredictedBlocks(2.0, now_s=0.0)
    predicted.add(1, [b"x"])
    predicted.retire(1)
    for now_s, retired in ((1.9, {1}), (2.0, {1}), (3.9, {1}), (4.0, set())):
        assert (1 in predicted.retired_slots, bool(believed(predicted, now_s))) == (True, now_s < 4.0)
        believed(predicted, now_s)
        assert predicted.retired_slots == retired
