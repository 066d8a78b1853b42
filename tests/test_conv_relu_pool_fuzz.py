"""conv_relu_pool2d against the stock ops, on calls drawn from seeds.

More of them, or one again: `python tests/conv_pool_cases.py --help`.
"""

from __future__ import annotations

import pytest

from conv_pool_cases import Errors, run

CASES = 400


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.filterwarnings("ignore:TF32 acceleration on top of oneDNN")
def test_results_are_eagers(backend, request):
    first = 0
    if request.config.getoption("--random-examples") is not None:
        first = int(request.config.option.hypothesis_seed)
    errors = Errors()
    for seed in range(first, first + CASES):
        run(seed, backend.device, errors)
    errors.check_ratios()
