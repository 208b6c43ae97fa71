"""The mapping of `npu_fusion_attention` on npu tensors, and its signature beside the real operator's."""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest
import torch
from test_npu_fusion_attention import CASES, Call, Case, tokens

from diyfa.integrations.npu_fusion_attention import npu_fusion_attention, npu_fusion_attention_v2

SHIM = os.environ.get("DIYFA_HOST_SHIM") == "1"


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_mapping_on_npu_tensors(npu: torch.device, case: Case) -> None:
    """Forward and gradients through `.to`, in float32 against float64."""
    from npu_interpreter import WITHOUT_KEYS, HostArithmetic, on_the_host

    def there_and_back(*tensors: Any, **options: Any) -> Any:
        moved = [x.to(npu) if isinstance(x, torch.Tensor) else x for x in tensors]
        options = {name: x.to(npu) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
        result = npu_fusion_attention_v2(*moved, **options)
        assert result.attention_out.device.type == "npu" == result.softmax_max.device.type
        return type(result)(*(x.cpu() if isinstance(x, torch.Tensor) else x for x in result))

    call = Call(case, torch.float32)
    expected = call.truth(torch.float64)
    if SHIM:
        # Masks become biases by PyTorch's operators, which the shim has not got.
        with HostArithmetic(), on_the_host(*WITHOUT_KEYS):
            actual = call.run(there_and_back, **tokens(case, npu_fusion_attention_v2))
    else:
        actual = call.run(there_and_back, **tokens(case, npu_fusion_attention_v2))
    for name, x in actual.items():
        torch.testing.assert_close(x, expected[name], rtol=2e-5, atol=2e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.parametrize("function", [npu_fusion_attention, npu_fusion_attention_v2], ids=lambda f: f.__name__)
def test_signature_is_the_operators(npu: torch.device, function: Any) -> None:
    """Names, order, kind and defaults, as the installed torch_npu registers them."""
    schema = getattr(torch.ops.npu, function.__name__).default._schema
    parameters = dict(inspect.signature(function).parameters)
    assert parameters.pop("backend").default is None
    assert list(parameters) == [argument.name for argument in schema.arguments]
    for argument in schema.arguments:
        ours = parameters[argument.name]
        assert (ours.kind is inspect.Parameter.KEYWORD_ONLY) == argument.kwarg_only, argument.name
        default = argument.default_value if argument.has_default_value() else inspect.Parameter.empty
        assert ours.default == default, argument.name
    assert len(schema.returns) == 7
