"""Run by test_software_npu.py in a process of its own: small models of five families on the CPU and on the software NPU.

Prints one JSON line per family: the largest differences of logits, gradients, and weights after an update.
"""

from __future__ import annotations

import copy
import json
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from rlflow.backends.ray_runtime.generic_decoder import GenericDecoder
from rlflow.backends.ray_runtime.kernels.adamw import FusedAdamW
from rlflow.backends.ray_runtime.kernels.serve import serve
from tests.npu.software_npu import activate
from tests.npu.test_models import CONFIGS


def difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours.detach().cpu() - theirs.detach().cpu()).abs().max())


def trained(model: Any, ids: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Logits, gradients, and weights after one update."""
    logits = model(input_ids=ids.to(model.device), use_cache=False).logits
    torch.log_softmax(logits, -1)[:, :, 5].mean().backward()
    gradients = {name: weight.grad.detach().clone() for name, weight in model.named_parameters()}
    FusedAdamW(model.parameters(), lr=1e-3, eps=1e-3).step()  # a small eps makes signs of rounding
    return logits, gradients, dict(model.named_parameters())


def decoded(model: Any, ids: torch.Tensor) -> torch.Tensor:
    decoder = GenericDecoder(model)
    with torch.no_grad():
        decoder.prefill(ids.to(model.device), torch.tensor([7, 4], device=model.device), 4)
        decoder.select(torch.tensor([1, 0, 1], device=model.device))
        return decoder.step(torch.tensor([3, 1, 2], device=model.device))


def main() -> None:
    activate()
    torch.set_num_threads(1)
    for name, config in CONFIGS.items():
        torch.manual_seed(0)
        host = AutoModelForCausalLM.from_config(copy.deepcopy(config), attn_implementation="eager").eval()
        with torch.no_grad():
            for weight in host.parameters():
                weight.add_(torch.randn_like(weight) * 0.1)
        device = copy.deepcopy(host).to("npu")
        serve(device)
        if hasattr(host, "set_experts_implementation") and ("moe" in name or "deepseek" in name):
            host.set_experts_implementation("eager")
        ids = torch.randint(0, 64, (2, 7), generator=torch.Generator().manual_seed(1))
        steps = [decoded(model, ids) for model in (device, host)]
        with torch.no_grad():
            half = copy.deepcopy(device).to(torch.bfloat16)
        steps16 = [decoded(half, ids), decoded(copy.deepcopy(host).to(torch.bfloat16), ids)]
        (logits, gradients, weights), (logits0, gradients0, weights0) = (
            trained(model, ids) for model in (device, host)
        )
        found = {
            "family": name,
            "logits": difference(logits, logits0),
            "gradients": max(difference(gradients[n], gradients0[n]) for n in gradients0),
            "weights": max(difference(weights[n], weights0[n]) for n in weights0),
            "decoded": difference(*steps),
            "decoded in bf16": difference(*steps16),
        }
        print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
