from typing import Any

import pytest
import torch
from torch import nn

from zoo.errors import ArgumentError, InputError
from zoo.layers import checks


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (None, r"net takes a tensor \(N, C, H, W\); got none"),
        ([1.0], r"net takes a tensor \(N, C, H, W\); got a list"),
        (torch.zeros(3, 8, 8), r"net takes \(N, C, H, W\), 4 axes; got \(3, 8, 8\)"),
        (torch.zeros(1, 4, 8, 8), r"built for 3 channels; got 4 in \(1, 4, 8, 8\)"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), r"floating numbers; got torch.uint8"),
        (torch.zeros(1, 3, 8, 8).double(), r"float32 on cpu; got torch.float64 on cpu"),
        (torch.zeros(0, 3, 8, 8), r"at least one element on each axis; got \(0, 3, 8, 8\)"),
    ],
)
def test_images_of_another_kind_are_refused(images: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        checks.check_images("net", [images], nn.Conv2d(3, 1, 1))


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([[1]], r"lm takes a tensor \(N, T\); got a list"),
        (torch.zeros(4).long(), r"lm takes \(N, T\), 2 axes; got \(4,\)"),
        (torch.zeros(1, 4), "token numbers, int64 or int32; got torch.float32"),
        (torch.zeros(1, 4, dtype=torch.bool), r"int32; got torch.bool"),
        (torch.zeros(1, 0).long(), r"at least one element on each axis; got \(1, 0\)"),
        (torch.zeros(1, 9).long(), "has 8 positions; got 9 tokens"),
        (torch.tensor([[0, 50]]), "vocabulary of 50; got token 50"),
        (torch.tensor([[-1, 49]]), "vocabulary of 50; got token -1"),
    ],
)
def test_tokens_of_another_kind_are_refused(tokens: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        checks.check_tokens("lm", tokens, None, "NT", vocabulary=50, longest=8)


@pytest.mark.parametrize("inputs", [(), (torch.ones(1), torch.ones(1))])
def test_a_model_of_one_input_takes_one(inputs: Any) -> None:
    with pytest.raises(InputError, match=f"net takes one tensor; got {len(inputs)} inputs"):
        checks.check_images("net", inputs, nn.Conv2d(3, 1, 1))


def test_arguments_out_of_range_are_refused() -> None:
    with pytest.raises(ArgumentError, match="classes of at least 1; got True"):
        checks.check_arguments("net", classes=True)
    with pytest.raises(ArgumentError, match=r"drop_rate from 0 up to below 1; got 1\.0"):
        checks.check_arguments("net", drop_rate=1.0)
    with pytest.raises(ArgumentError, match="norm batch or instance; got 'layer'"):
        checks.check_choice("net", "norm", "layer", ("batch", "instance"))
