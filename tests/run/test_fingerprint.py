from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed (extra: train)")

from dougong.run.fingerprint import bit_sum, fingerprint, flip_bit  # noqa: E402

DTYPES = [
    torch.float32,
    torch.float64,
    torch.bfloat16,
    torch.float16,
    torch.int8,
    torch.int64,
    torch.complex64,
    torch.bool,
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 3, 8, 1001])
def test_any_flipped_bit_changes_the_fingerprint(dtype, size: int) -> None:
    tensor = torch.arange(size).to(dtype)
    before = fingerprint([tensor])
    raw = tensor.view(torch.uint8)
    for place in {0, raw.numel() // 2, raw.numel() - 1}:
        for bit in range(8 if dtype is not torch.bool else 1):
            raw[place] ^= 1 << bit
            assert fingerprint([tensor]) != before, (place, bit)
            raw[place] ^= 1 << bit
    assert fingerprint([tensor]) == before


def test_the_order_of_the_tensors_counts() -> None:
    one, two = torch.ones(4), torch.zeros(4)
    assert fingerprint([one, two]) != fingerprint([two, one])


def test_not_a_number_has_a_fingerprint_too() -> None:
    assert fingerprint([torch.full((4,), float("nan"))]) != fingerprint([torch.zeros(4)])


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (2, 2, 2)])
def test_every_shape_and_a_view_out_of_line_has_a_sum(shape: tuple[int, ...]) -> None:
    tensor = torch.ones(shape)
    assert bit_sum(tensor).shape == ()
    moved = torch.ones(tensor.numel() + 1)[1:].view(shape)
    assert bit_sum(moved) == bit_sum(moved.clone())


def test_a_transposed_tensor_has_its_values_fingerprint() -> None:
    tensor = torch.arange(12.0).view(3, 4)
    assert fingerprint([tensor.t()]) == fingerprint([tensor.t().contiguous()])


def test_a_flip_changes_one_parameter_by_little() -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    flip_bit({"model": model})
    differences = [(new - old).abs().max().item() for new, old in zip(model.parameters(), before, strict=True)]
    assert 0 < max(differences) < 1e-3
    assert sorted(differences)[0] == 0
