"""One AdamW update (Loshchilov & Hutter 2019) of a tensor in one operation, and the optimizer made of it.

    m = b1 m + (1 - b1) g;  v = b2 v + (1 - b2) g^2
    p = p (1 - lr decay) - lr (m / (1 - b1^t)) / (sqrt(v / (1 - b2^t)) + eps)

torch_npu: `npu_apply_adam_w` with `out=`; it takes the powers of the betas before this update, b^(t-1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from rlflow.backends.ray_runtime.kernels.kernel import TORCH, Checker, Kernel, shape


def reference(
    parameter: torch.Tensor,
    grad: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
) -> None:
    """Update `parameter`, `m` and `v` in place, all of one shape; `step` counts from 1."""
    beta1, beta2 = betas
    parameter.mul_(1 - lr * weight_decay)
    m.lerp_(grad, 1 - beta1)
    v.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    denominator = (v.sqrt() / (1 - beta2**step) ** 0.5).add_(epsilon)
    parameter.addcdiv_(m, denominator, value=-lr / (1 - beta1**step))


def npu(
    parameter: torch.Tensor,
    grad: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
) -> None:
    """As `reference`."""
    import torch_npu

    beta1, beta2 = betas
    powers = (beta1 ** (step - 1), beta2 ** (step - 1))
    torch_npu.npu_apply_adam_w(
        *powers, lr, weight_decay, beta1, beta2, epsilon, grad, None, False, False, out=(parameter, m, v)
    )


def check(
    checker: Checker,
    parameter: torch.Tensor,
    grad: torch.Tensor,
    m: torch.Tensor,
    v: torch.Tensor,
    *,
    step: int,
    lr: float,
    betas: tuple[float, float],
    epsilon: float,
    weight_decay: float,
) -> None:
    """One shape and dtype, betas below 1."""
    checker.floating("parameter", parameter)
    checker.same_dtype(parameter=parameter, grad=grad, m=m, v=v)
    for name, tensor in (("grad", grad), ("m", m), ("v", v)):
        checker.that(tensor.shape == parameter.shape, f"{name} {shape(tensor)} for a parameter {shape(parameter)}")
    checker.that(step >= 1, f"step is {step}, and the first is 1")
    checker.that(
        all(0 <= beta < 1 for beta in betas), f"betas are {betas[0]:g} and {betas[1]:g}, not from 0 to below 1"
    )
    checker.limit(1 <= parameter.dim() <= 8, f"the parameter has {parameter.dim()} dimensions, not 1 to 8")


adamw = Kernel("adamw", reference=reference, npu=npu, check=check)


class FusedAdamW(torch.optim.Optimizer):  # type: ignore[misc]
    """AdamW by the kernel. Its state is torch.optim.AdamW's, so checkpoints of either load into the other."""

    def __init__(
        self,
        params: Iterable[torch.Tensor],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    def step(self, closure: Callable[[], Any] | None = None) -> None:
        """One update of every parameter that has a gradient."""
        assert closure is None, "this optimizer calls no closure"
        with torch.no_grad():
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group)

    def _update(self, parameter: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            # The count stays on the host, as a tensor, as torch keeps it: no wait for the device.
            state["step"] = torch.tensor(0.0, device="cpu")
            state["exp_avg"] = torch.zeros_like(parameter)
            state["exp_avg_sq"] = torch.zeros_like(parameter)
        state["step"] += 1
        adamw(
            parameter,
            parameter.grad,
            state["exp_avg"],
            state["exp_avg_sq"],
            step=int(state["step"]),
            lr=group["lr"],
            betas=group["betas"],
            epsilon=group["eps"],
            weight_decay=group["weight_decay"],
        )


def make_adamw(
    parameters: Sequence[torch.Tensor], *, lr: float, betas: tuple[float, float], eps: float, weight_decay: float
) -> torch.optim.Optimizer:
    """AdamW of parameters on one device: by the kernel where the device or the user chooses one that is not torch's,
    else torch's own, which updates all tensors in one call."""
    device = parameters[0].device.type if parameters else "cpu"
    if adamw.choice(device) == TORCH:
        return torch.optim.AdamW(parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay, fused=True)
    return FusedAdamW(parameters, lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
