"""95 % intervals against published and hand-computed values."""

import pytest

from realhf.api.evaluation import mean_interval, wilson_interval


def test_wilson_interval_against_published_values():
    # Newcombe 1998, table I: 81 of 263 and 15 of 148.
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(15, 148) == pytest.approx((0.0624, 0.1605), abs=1e-4)
    assert wilson_interval(0, 0) == (0.0, 1.0)


def test_mean_interval_is_the_mean_and_its_standard_error():
    # standard error of 1, 2, 3, 4: sqrt(5 / 3) / 2
    assert mean_interval([1.0, 2.0, 3.0, 4.0]) == pytest.approx((2.5, 2.5 - 1.959964 * 0.645497, 3.765152), abs=1e-5)
    assert mean_interval([7.0]) == (7.0, 7.0, 7.0)
    assert mean_interval([]) is None
