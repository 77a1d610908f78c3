"""The cost model: its preferences, and its limits."""

from __future__ import annotations

from itertools import accumulate

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerpush.transport.packing.cost_model import Costs, Plan, TransferSize

seconds = st.floats(1e-9, 1e-3)
transfers = st.builds(
    lambda size, gathered, more: TransferSize(size, gathered + more, gathered),
    st.integers(1, 1 << 30),
    st.integers(1, 10000),
    st.integers(0, 10000),
)
knots = st.lists(st.tuples(st.integers(1, 500), seconds), min_size=1, max_size=4).map(
    lambda steps: tuple(zip(*(tuple(accumulate(side)) for side in zip(*steps, strict=True)), strict=True))
)
models = st.builds(Costs, knots, *[seconds] * 4)


@given(models, transfers)
def test_the_chosen_plan_is_close_to_the_best(costs: Costs, transfer: TransferSize) -> None:
    chosen = costs.choose(transfer)
    assert costs.estimate(chosen, transfer) <= costs.estimate(Plan.DIRECT, transfer)
    assert costs.estimate(chosen, transfer) * 0.89 <= min(costs.estimate(plan, transfer) for plan in Plan)


@pytest.mark.parametrize(
    ("transfer", "plan"),
    [
        (TransferSize(8 << 20, 4096, 4096), Plan.DIRECT),  # 2 KiB pieces, scattered on both sides
        (TransferSize(8 << 20, 4096, 1), Plan.GATHERED),  # scattered on P only
        (TransferSize(8 << 20, 32, 32), Plan.DIRECT),  # 256 KiB pieces
        (TransferSize(8 << 20, 1, 1), Plan.DIRECT),
    ],
)
def test_the_plan_depends_on_the_numbers_of_descriptors(transfer: TransferSize, plan: Plan) -> None:
    costs = Costs(scattered=((1000, 6e-3),), wire_s=1 / 5e9, gather_s=1 / 8e9)
    assert costs.choose(transfer) is plan


@given(models, transfers)
def test_a_copy_that_never_pays_is_never_chosen(costs: Costs, transfer: TransferSize) -> None:
    if costs.never_pays(transfer.direct_runs, transfer.bytes):
        assert costs.choose(transfer) is Plan.DIRECT


def test_a_copy_pays_above_a_number_of_descriptors() -> None:
    costs = Costs(((1, 1.0),), wire_s=0.0, gather_s=0.5, copy_s=10.0, write_s=0.0)
    for descriptors in range(1, 40):
        scattered = TransferSize(4, descriptors, gathered_runs=1)
        assert costs.never_pays(descriptors, 4) == (costs.choose(scattered) is Plan.DIRECT)
    assert costs.never_pays(14, 4)
    assert not costs.never_pays(15, 4)
    assert costs.never_pays(15, 8)


def test_the_estimate_of_each_plan_follows_the_formula() -> None:
    costs = Costs(((8, 16.0),), wire_s=3.0, gather_s=5.0, copy_s=13.0, write_s=17.0)
    transfer = TransferSize(bytes=10, direct_runs=4, gathered_runs=2)
    assert costs.estimate(Plan.DIRECT, transfer) == 17 + 4 * 2 + 10 * 3
    assert costs.estimate(Plan.GATHERED, transfer) == 17 + 2 * 2 + 10 * 3 + 13 + 10 * 5


@pytest.mark.parametrize(
    ("descriptors", "seconds"), [(0, 0.0), (32, 0.5), (64, 1.0), (288, 3.0), (512, 5.0), (1024, 6.0), (2048, 8.0)]
)
def test_descriptor_costs_are_interpolated_and_extrapolated(descriptors: int, seconds: float) -> None:
    assert Costs(scattered=((64, 1.0), (512, 5.0), (1024, 6.0))).scattered_s(descriptors) == pytest.approx(seconds)
