"""What is seen of a script that tells nothing."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: train)")


def test_an_optimizer_that_counts_tells_where_a_script_resumed() -> None:
    from dougong.run.worker import _own_count

    model = torch.nn.Linear(2, 1)
    before = torch.optim.AdamW(model.parameters())
    for _ in range(3):
        model(torch.ones(2)).sum().backward()
        before.step()
    again = torch.optim.AdamW(model.parameters())
    again.load_state_dict(before.state_dict())
    again.step()
    assert _own_count(again) == 4


def test_an_optimizer_that_does_not_count_says_nothing() -> None:
    from dougong.run.worker import _own_count

    model = torch.nn.Linear(2, 1)
    for momentum in (0.0, 0.9):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        assert _own_count(optimizer) == 0
