"""Block hashes: what they depend on, and what not."""

from __future__ import annotations

from hashlib import sha256

import numpy as np
import pytest

from support.scheduler.scheduling import make_request
from tidewheel.kvcache.prefix import extend_block_hashes, max_hit_blocks, root_hash
from tidewheel.request import Request


def hashes_of(request: Request, block_size: int = 4) -> list[bytes]:
    extend_block_hashes(request, request.num_tokens // block_size, block_size)
    return request.block_hashes


def test_a_digest_is_sha256_over_parent_and_tokens() -> None:
    tokens = np.arange(8, dtype="<i4")
    first = sha256(root_hash("", "") + tokens[:4].tobytes()).digest()
    second = sha256(first + tokens[4:].tobytes()).digest()
    assert hashes_of(make_request(prompt=11)) == [first, second]
    assert len(second) == 32


def test_a_digest_stands_for_all_tokens_before_it() -> None:
    one = hashes_of(make_request(prompt=[1, 2, 3, 4, 5, 6, 7, 8]))
    other = hashes_of(make_request(prompt=[9, 2, 3, 4, 5, 6, 7, 8]))
    assert one[0] != other[0]
    assert one[1] != other[1]


def test_salts_share_nothing_and_one_salt_shares() -> None:
    digests = {salt: hashes_of(make_request(prompt=8, cache_salt=salt)) for salt in ("", "a", "b", "ab")}
    assert len({digest for values in digests.values() for digest in values}) == 8
    assert digests["a"] == hashes_of(make_request("again", prompt=8, cache_salt="a"))


def test_salt_and_tokens_cannot_be_confused() -> None:
    salted = make_request(prompt=[1, 2], cache_salt="\x01\x00\x00\x00")
    plain = make_request(prompt=[1, 1, 2])
    assert hashes_of(salted, 1)[0] not in hashes_of(plain, 1)


def test_tenants_share_nothing_whatever_their_salts() -> None:
    roots = {root_hash(tenant, salt) for tenant in ("", "a", "ab") for salt in ("", "b", "ab", "bab")}
    assert len(roots) == 12


@pytest.mark.parametrize("num_prompt_tokens", [1, 3, 4, 5, 8, 12])
def test_output_continues_the_prompt(num_prompt_tokens: int) -> None:
    whole = make_request(prompt=list(range(100, 112)))
    split = make_request(prompt=list(range(100, 100 + num_prompt_tokens)))
    split.output_token_ids.extend(range(100 + num_prompt_tokens, 112))
    extend_block_hashes(split, num_prompt_tokens // 4, 4)
    assert hashes_of(split) == hashes_of(whole)


def test_hashes_are_extended_not_made_again() -> None:
    request = make_request(prompt=8)
    first = list(hashes_of(request))
    request.output_token_ids.extend([1, 2, 3, 4])
    assert hashes_of(request)[:2] == first
    assert len(request.block_hashes) == 3
    extend_block_hashes(request, 1, 4)
    assert len(request.block_hashes) == 3


@pytest.mark.parametrize(("num_tokens", "blocks"), [(1, 0), (4, 0), (5, 1), (8, 1), (9, 2)])
def test_one_token_is_always_left_to_compute(num_tokens: int, blocks: int) -> None:
    assert max_hit_blocks(num_tokens, 4) == blocks
