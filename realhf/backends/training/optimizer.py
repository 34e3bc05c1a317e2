"""Implements AdamW with a learning-rate schedule that follows the policy version, and fp32 master weights."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from realhf.api.config import LRSchedule, OptimizerConfig
from realhf.backends.execution.resting_moments import HostMemory, Memory, RestingMoments


def learning_rate(config: OptimizerConfig, version: int, total_steps: int) -> float:
    """Return the rate of the train step that turns ``version`` into ``version + 1``.

    The rate warms up linearly over ``warmup_steps_proportion`` of ``total_steps`` (the first step is not zero). Then it
    is constant, or decays linearly or as a cosine so that it would reach zero at ``total_steps``.
    """
    warmup = math.ceil(config.warmup_steps_proportion * total_steps)
    if version < warmup:
        return config.lr * (version + 1) / warmup
    progress = min(1.0, (version - warmup) / max(1, total_steps - warmup))
    if config.lr_scheduler_type is LRSchedule.linear:
        return config.lr * (1 - progress)
    if config.lr_scheduler_type is LRSchedule.cosine:
        return config.lr * 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr


class PolicyOptimizer:
    """Steps the parameters of ``module``. Parameters kept in a narrower type get fp32 master copies, since
    small updates would vanish in bf16. Biases and norms (one dimension) have no weight decay. With ``config.offload``
    moments are in ``memory`` (None: pinned memory of the host) but for the piece that is being stepped; raises
    ValueError where that is no other memory."""

    def __init__(
        self, module: nn.Module, config: OptimizerConfig, total_steps: int, *, memory: Memory | None = None
    ) -> None:
        if config.lr < 0 or total_steps < 1:
            raise ValueError(f"optimizer: lr {config.lr} must be >= 0 and total steps {total_steps} >= 1")
        self._config, self._total = config, total_steps
        self._parameters = [p for p in module.parameters() if p.requires_grad]
        self._masters = [p if p.dtype == torch.float32 else _master(p) for p in self._parameters]
        self._adamw = torch.optim.AdamW(
            [
                {"params": [p for p in self._masters if p.ndim > 1], "weight_decay": config.weight_decay},
                {"params": [p for p in self._masters if p.ndim <= 1], "weight_decay": 0.0},
            ],
            lr=config.lr,
            betas=(config.beta1, config.beta2),
            eps=config.eps,
            fused=True,
        )
        self._resting: RestingMoments | None = None
        if config.offload and self._masters:
            self._resting = RestingMoments(self._adamw, memory or HostMemory(self._masters[0].device))

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the module that are trained."""
        return self._parameters

    @property
    def masters(self) -> list[nn.Parameter]:
        """What gradients add up in, fp32: the parameters, or their master copies."""
        return self._masters

    @property
    def offloads(self) -> bool:
        """Whether moments rest elsewhere between steps."""
        return self._resting is not None

    def zero_grad(self) -> None:
        """Drop all gradients."""
        for p in (*self._parameters, *self._masters):
            p.grad = None

    @torch.no_grad()
    def accumulate(self) -> None:
        """Add the gradients of one micro-batch to those of the master copies, which take the digits that a narrower sum
        would lose. Parameters that have none add up by themselves."""
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter and parameter.grad is not None:
                master.grad = parameter.grad.float() if master.grad is None else master.grad.add_(parameter.grad)
                parameter.grad = None

    def gradient_norm(self) -> float:
        """Return the global L2 norm of the gradients, before clipping; fp32. 0 without any gradient."""
        grads = [p.grad for p in self._masters if p.grad is not None]
        norm = nn.utils.get_total_norm(grads) if grads else torch.zeros(())
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    @torch.no_grad()
    def step(self, version: int, norm: float) -> float:
        """Clip by ``norm`` (the gradient norm, finite) and update the parameters; return the learning rate used."""
        rate = learning_rate(self._config, version, self._total)
        limit = self._config.gradient_clipping
        scale = min(1.0, limit / (norm + 1e-6)) if limit > 0 else 1.0
        for master in self._masters:
            if master.grad is not None and scale < 1.0:
                master.grad.mul_(scale)
        for group in self._adamw.param_groups:
            group["lr"] = rate
        (self._resting or self._adamw).step()
        self._publish()
        return rate

    def _publish(self) -> None:
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter:
                parameter.copy_(master)
                master.grad = None

    def tensors(self, names: Mapping[nn.Parameter, str]) -> dict[str, Tensor]:
        """Return the optimizer's tensors, themselves: ``exp_avg/NAME`` and the like, and ``master/NAME`` where there
        are master weights. ``names`` names the parameters."""
        found: dict[str, Tensor] = {}
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if master is not parameter:
                found[f"master/{names[parameter]}"] = master.detach()
            for kind, value in self._adamw.state.get(master, {}).items():
                found[f"{kind}/{names[parameter]}"] = value
        return found

    def begin_moments(self, of: Collection[nn.Parameter]) -> None:
        """Have moments, 0 at first, for these parameters and no others: ``tensors`` then has a place for saved ones."""
        self._adamw.state.clear()
        for parameter, master in zip(self._parameters, self._masters, strict=True):
            if parameter in of and self._resting is not None:
                self._resting.begin(master)
            elif parameter in of:
                self._adamw.state[master] = {
                    "step": torch.zeros((), device=master.device),
                    "exp_avg": torch.zeros_like(master, requires_grad=False),
                    "exp_avg_sq": torch.zeros_like(master, requires_grad=False),
                }

    @torch.no_grad()
    def publish(self) -> None:
        """Write the master weights to the model."""
        self._publish()

    def state_dict(self) -> dict[str, Any]:
        """Return the moments, and the master weights where they differ from the model's."""
        masters = [m if m is not p else None for p, m in zip(self._parameters, self._masters, strict=True)]
        return {"adamw": self._adamw.state_dict(), "masters": masters}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what ``state_dict`` returned and write the master weights to the model. Raises ValueError on another
        number of parameters, or moments of another shape."""
        (self._resting or self._adamw).load_state_dict(state["adamw"])
        for master, moments in self._adamw.state.items():
            if (shape := tuple(moments["exp_avg"].shape)) != tuple(master.shape):
                raise ValueError(f"optimizer state has moments of shape {shape}, the parameter {tuple(master.shape)}")
        for held, saved in zip(self._masters, _matching(state["masters"], self._masters), strict=True):
            if saved is not None:
                held.copy_(saved)
        self._publish()


def _master(parameter: nn.Parameter) -> nn.Parameter:
    return nn.Parameter(parameter.detach().float().clone())


def _matching(saved: Iterable[Any], held: list[nn.Parameter]) -> list[Any]:
    items = list(saved)
    if len(items) != len(held):
        raise ValueError(f"optimizer state has {len(items)} parameters, the model {len(held)}")
    return items
