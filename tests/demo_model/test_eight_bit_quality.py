from __future__ import annotations

import torch
from tokenizers import Tokenizer

from eight_bit_quality import CACHE, CODES, EXACT, INT4, INT8, WEIGHTS, compare, ways
from train_demo_model import OUT, ROOT

NUM_TOKENS = 256


def test_8_bits_hardly_move_the_demo_model_and_4_bits_not_much() -> None:
    tokenizer = Tokenizer.from_file(str(OUT / "tokenizer.json"))
    tokens = tokenizer.encode((ROOT / "README.md").read_text()).ids
    rows = torch.tensor(tokens[: NUM_TOKENS + 1]).unsqueeze(0)
    with torch.inference_mode():
        found = compare(rows, ways(OUT))
    exact = found[EXACT]
    assert (exact.divergence, exact.logits, exact.same_token) == (0.0, 0.0, 1.0)
    for rounded in (found[CACHE], found[CODES], found[WEIGHTS], found[INT8]):
        assert abs(rounded.loss - exact.loss) < 0.05
        assert 0.0 < rounded.divergence < 0.02
        assert rounded.logits < 0.1
        assert rounded.same_token > 0.85
    assert found[INT8].divergence < found[INT4].divergence < 0.2
    assert abs(found[INT4].loss - exact.loss) < 0.2
