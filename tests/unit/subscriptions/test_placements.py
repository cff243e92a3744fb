"""Where many records were placed, told as a sequence."""

from semel.subscriptions.delivery import Placed, Placements


def test_placements_are_a_sequence_in_the_order_of_the_records() -> None:
    placed = Placements("t", [(0, range(5, 7)), (1, [9])])
    expected = [Placed("t", 0, 5), Placed("t", 0, 6), Placed("t", 1, 9)]
    assert list(placed) == expected
    assert (len(placed), placed[-1], placed[:2]) == (3, expected[2], expected[:2])
    assert repr(placed) == repr(expected)
