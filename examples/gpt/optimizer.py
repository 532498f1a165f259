"""AdamW over fp32 master weights, gradient clipping over all shards, and the learning rate's schedule."""

import math

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .mesh import Mesh
from .model import is_sharded
from .moe import is_expert


def learning_rate(step: int, *, peak: float, warmup: int, steps: int) -> float:
    """Linear from 0 over `warmup` steps, then half a cosine down to a tenth of the peak at `steps`."""
    if step < warmup:
        return peak * (step + 1) / warmup
    done = min(1.0, (step - warmup) / max(1, steps - warmup))
    return peak * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))


class MasterAdamW:
    """One step:

        g      = mean over data parallel ranks of p.grad (or p.main_grad), in fp32
        g     *= min(1, clip / norm(g))                 norm over all parameters of all ranks of a replica
        master = adamw(master, g);  p = master rounded to p's type

    An expert's gradient comes from the tokens of all ranks, wherever it lies: only the ranks that hold the same expert
    add theirs up. A bf16 weight alone would lose every update smaller than 1/256 of itself; the master keeps it.
    """

    def __init__(self, model: nn.Module, mesh: Mesh, *, weight_decay: float = 0.1, clip: float = 1.0) -> None:
        self.mesh, self.clip = mesh, clip
        self.names = [name for name, p in model.named_parameters() if p.numel()]
        self.parameters = [p for p in model.parameters() if p.numel()]
        self.masters = [p.detach().to(torch.float32, copy=True) for p in self.parameters]
        # norm weights (1-D) are not decayed
        matrices = [m for m in self.masters if m.ndim > 1]
        vectors = [m for m in self.masters if m.ndim <= 1]
        groups = [
            {"params": matrices, "weight_decay": weight_decay},
            {"params": vectors, "weight_decay": 0.0},
        ]
        self.adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=(0.9, 0.95), eps=1e-8)

    def zero_grad(self) -> None:
        for p in self.parameters:
            p.grad = None
            if hasattr(p, "main_grad"):
                p.main_grad.zero_()

    def gradient(self, p: Tensor, name: str) -> Tensor:
        gradient = getattr(p, "main_grad", None)
        gradient = p.grad if gradient is None else gradient
        if gradient is None:
            raise RuntimeError(f"{name} has no gradient after backward: every parameter takes part in it. Freeze none.")
        return gradient.detach().float()

    def clip_coefficient(self, gradients: list[Tensor]) -> Tensor:
        """min(1, clip / norm) without leaving the device. Squares of shards are summed over the tensor parallel
        ranks, those of experts over the expert parallel ones; a replicated parameter counts once."""
        squares = torch.zeros(3, device=self.mesh.device)
        for p, g in zip(self.parameters, gradients, strict=True):
            squares[2 if is_expert(p) else int(is_sharded(p))] += g.square().sum()
        for kind, group in ((1, self.mesh.tp_group), (2, self.mesh.ep_group)):
            if group is not None:
                dist.all_reduce(squares[kind : kind + 1], group=group)
        return (self.clip / (squares.sum().sqrt() + 1e-6)).clamp(max=1.0)

    @torch.no_grad()
    def gradients(self) -> list[Tensor]:
        """Of each parameter in fp32, the mean over the data parallel ranks' batches. Collective."""
        own = [self.gradient(p, name) for p, name in zip(self.parameters, self.names, strict=True)]
        for experts, group in ((False, self.mesh.dp_group), (True, self.mesh.expert_group)):
            which = [i for i, p in enumerate(self.parameters) if is_expert(p) == experts]
            if self.mesh.dp_size == 1 or not which:
                continue
            flat = torch.cat([own[i].reshape(-1) for i in which])
            if group is not None:
                dist.all_reduce(flat, group=group)
            flat /= self.mesh.dp_size
            for i, mean in zip(which, flat.split([own[i].numel() for i in which]), strict=True):
                own[i] = mean.view_as(own[i])
        return own

    @torch.no_grad()
    def step(self, lr: float) -> None:
        gradients = self.gradients()
        coefficient = self.clip_coefficient(gradients)
        for master, g in zip(self.masters, gradients, strict=True):
            master.grad = g * coefficient
        for group in self.adamw.param_groups:
            group["lr"] = lr
        self.adamw.step()
        for p, master in zip(self.parameters, self.masters, strict=True):
            p.copy_(master)
            master.grad = None

    def state_dict(self) -> dict[str, object]:
        """Plain tensors and numbers: the masters by parameter name, and AdamW's own state."""
        return {"masters": dict(zip(self.names, self.masters, strict=True)), "adamw": self.adamw.state_dict()}

    @torch.no_grad()
    def load_state_dict(self, state: dict) -> None:
        for name, master in zip(self.names, self.masters, strict=True):
            master.copy_(state["masters"][name])
        self.adamw.load_state_dict(state["adamw"])
