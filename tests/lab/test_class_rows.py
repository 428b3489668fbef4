"""The class token's rows in a file: 8 bits are near enough."""

import torch

from atbook.lab.class_rows import ClassRows, from_8_bits, in_8_bits, read_class_rows, write_class_rows


def rows_of(number: int, seed: int) -> torch.Tensor:
    torch.manual_seed(seed)
    return (3 * torch.randn(number, 2, 3, 5)).softmax(-1)


def test_8_bits_keep_shares_and_sums():
    rows = torch.cat([rows_of(50, 0), torch.eye(5)[None, None, :3].expand(1, 2, 3, 5)])
    again = from_8_bits(in_8_bits(rows))
    assert in_8_bits(rows).dtype == torch.uint8
    assert (again - rows).abs().max() < 0.006
    torch.testing.assert_close(again.sum(-1), torch.ones(51, 2, 3))
    assert torch.equal(again[-1], rows[-1]), "0 and 1 are kept as they are"


def test_a_file_is_read_as_it_was_written(tmp_path):
    written = ClassRows(
        rows_of(4, 1),
        torch.tensor([0, 3, 2, 9]),
        rows_of(3, 2),
        torch.tensor([1, 0, 5]),
        torch.randint(256, (2, 3, 8, 8), dtype=torch.uint8),
        torch.tensor([2, 0]),
        {"scratch": rows_of(2, 3), "distill": rows_of(2, 4)},
    )
    path = tmp_path / "deep" / "rows.safetensors"
    write_class_rows(path, written, "a test")
    read = read_class_rows(path)
    for name in ("train_labels", "test_labels", "photographs", "shown"):
        assert torch.equal(getattr(read, name), getattr(written, name)), name
    assert (read.train - written.train).abs().max() < 0.006
    assert list(read.students) == ["scratch", "distill"]
    assert (read.students["distill"] - written.students["distill"]).abs().max() < 0.006
