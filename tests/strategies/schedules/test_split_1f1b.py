from strategies.schedules.split_1f1b import split_1f1b


def texts(pp, num_microbatches, warmup, lag):
    rows = split_1f1b(pp, num_microbatches, warmup=lambda rank: warmup, lag=lambda rank: lag)
    return [" ".join(map(str, row)) for row in rows]


def test_weight_gradients_follow_their_lag_behind():
    assert texts(1, 4, 1, 1) == ["0F0 0F1 0I0 0F2 0I1 0W0 0F3 0I2 0W1 0I3 0W2 0W3"]


def test_without_a_lag_each_follows_at_once():
    assert texts(1, 2, 0, 0) == ["0F0 0I0 0W0 0F1 0I1 0W1"]


def test_a_warm_up_and_a_lag_longer_than_the_step_leave_three_blocks():
    assert texts(2, 2, 5, 5) == ["0F0 0F1 0I0 0I1 0W0 0W1", "1F0 1F1 1I0 1I1 1W0 1W1"]
