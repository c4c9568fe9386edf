import torch

from tidewheel_kernels.native.huge_pages import LINE, WAY, empty_in_huge_pages, in_huge_pages

NUM_ADAPTERS, FIRST_CACHE_SETS = 64, 64


def test_memory_of_several_adapters_begins_in_different_sets() -> None:
    kept = [empty_in_huge_pages(1000, torch.bfloat16) for _ in range(NUM_ADAPTERS)]
    lines = [memory.data_ptr() % WAY // LINE for memory in kept]
    assert all(memory.data_ptr() % LINE == 0 for memory in kept)
    assert len({line % FIRST_CACHE_SETS for line in lines}) == NUM_ADAPTERS
    gaps = sorted(after - before for before, after in zip(sorted(lines), sorted(lines)[1:], strict=False))
    assert gaps[0] >= WAY // LINE // NUM_ADAPTERS // 2, "the second cache is used evenly"


def test_memory_has_its_size_and_is_its_own() -> None:
    kept = [empty_in_huge_pages(size, torch.float32).fill_(size) for size in (0, 1, 1000, 1 << 20)]
    assert [len(memory) for memory in kept] == [0, 1, 1000, 1 << 20]
    assert all(bool((memory == len(memory)).all()) for memory in kept)


def test_copies_are_equal() -> None:
    tensors = [torch.arange(size, dtype=torch.float32) for size in (5, 100_000)]
    assert all(torch.equal(in_huge_pages(tensor), tensor) for tensor in tensors)
