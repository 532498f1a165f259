"""The mixture-of-experts demo: its layer against a loop over tokens, ep 2 against ep 1, whole runs."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

import te_lite as te
from examples.gpt import mesh, moe, options
from te_lite.testing.distributed import launch
from te_lite.testing.numerics import assert_close_to_oracle, measure
from tests.examples.demo import REPOSITORY, TIMEOUT, outputs, read_log, run
from tests.examples.ranks_moe import FP32, RECIPES, STEPS, TINY, gradients, losses

ALONE = mesh.Mesh("python", 0, 1, 0, 1, 0, 1, None, None, torch.device("cpu"))
SCRIPT = REPOSITORY / "examples" / "train_moe.py"
ULP = 2.0**-21  # spacing of fp32 losses within [4, 8)
FACTOR = 2.0
REORDERINGS = 3
HIDDEN, FFN, EXPERTS, TOP_K, BALANCE = 32, 48, 4, 2, 0.5


def layer(device: str = "cpu", recipe: str = "bf16", dtype: torch.dtype = torch.float32) -> moe.MixtureOfExperts:
    config = moe.MoEConfig(EXPERTS, TOP_K, BALANCE, te.recipe.from_name(recipe))
    torch.manual_seed(5)
    here = dataclasses.replace(ALONE, device=torch.device(device))
    made = moe.MixtureOfExperts(HIDDEN, FFN, config, here, dtype, False)
    with torch.no_grad():
        for name, p in made.named_parameters():
            p.copy_(1.0 + torch.rand(p.shape) if "norm" in name else torch.randn(p.shape) / p.shape[-1] ** 0.5)
    return made


def token_by_token(w: dict[str, Tensor], x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
    """(y, the load-balancing loss) by weights w, each token through its experts alone."""
    tokens = F.rms_norm(x.flatten(0, -2), (HIDDEN,), w["norm.weight"], 1e-5)
    p = (tokens @ w["router"].t()).softmax(-1)
    rows, chosen = [], torch.zeros(EXPERTS)
    for t, token in enumerate(tokens):
        best = sorted(range(EXPERTS), key=lambda e: -float(p[t, e].detach()))[:TOP_K]
        total, y = sum(p[t, e] for e in best), torch.zeros_like(token)
        for e in best:
            chosen[e] += 1
            gate, up = (w[f"fc1.weight{e}"] @ token).chunk(2)
            y = y + p[t, e] / total * (w[f"fc2.weight{e}"] @ (gate * gate.sigmoid() * up))
        rows.append(y)
    shares = chosen.to(x.dtype) / (TOP_K * len(tokens))
    return residual + torch.stack(rows).view_as(x), EXPERTS * (shares * p.mean(0)).sum()


@pytest.mark.parametrize("crowded", [False, True])
def test_layer_is_every_tokens_own_choice(crowded: bool) -> None:
    """In fp32 against fp64 token by token, with the gradient of the load-balancing loss; nothing is dropped where all
    tokens choose the same experts."""
    made = layer()
    x, residual, dy = torch.randn(3, 7, 5, HIDDEN).unbind()
    if crowded:
        with torch.no_grad():
            made.norm.weight.fill_(1.0)
            x.abs_()
            made.router.copy_(torch.tensor([3.0, 1.0, -1.0, -3.0])[:, None].expand(-1, HIDDEN))
    results = []
    for dtype in (torch.float64, torch.float32):
        inputs = [t.to(dtype, copy=True).requires_grad_() for t in (x, residual)]
        w = {name: p.detach().to(dtype, copy=True).requires_grad_() for name, p in made.named_parameters()}
        y, balance = token_by_token(w, *inputs)
        ((y * dy.to(dtype)).sum() + BALANCE * balance).backward()
        results.append([y, *(t.grad for t in inputs), *(t.grad for t in w.values())])
    inputs = [t.clone().requires_grad_() for t in (x, residual)]
    y = made(*inputs)
    (y * dy).sum().backward()
    got = [y, *(t.grad for t in inputs), *(p.grad for p in made.parameters())]
    names = ["y", "dx", "dresidual", *(name for name, _ in made.named_parameters())]
    for name, out, truth, honest in zip(names, got, *results, strict=True):
        idle = crowded and name in ("fc1.weight2", "fc1.weight3", "fc2.weight2", "fc2.weight3")
        truth, honest = (torch.zeros_like(out) if idle and t is None else t for t in (truth, honest))
        assert_close_to_oracle(name, out, truth, honest)
        assert bool(out.any()) != idle, name
    assert made.chosen.sum() == 35 * TOP_K and moe.busiest(made)[0] == made.chosen.max() / made.chosen.mean()
    assert not crowded or made.chosen.tolist() == [35, 35, 0, 0]


def test_balance_is_1_where_all_is_even_and_the_number_of_experts_where_one_has_all() -> None:
    even = torch.full((6, EXPERTS), 1 / EXPERTS)
    assert moe.imbalance(even, torch.full((EXPERTS,), 3)) == 1.0
    assert moe.imbalance(torch.eye(EXPERTS)[:1].expand(6, -1), torch.tensor([6, 0, 0, 0])) == EXPERTS


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_step_waits_for_nothing(recipe: str) -> None:
    """On one rank the host reads no number of tokens: router, dispatch, experts, loss and their backward."""
    made = layer("cuda", recipe, torch.bfloat16)
    x, residual, dy = torch.randn(3, 8, 32, HIDDEN, device="cuda", dtype=torch.bfloat16).unbind()
    leaf = x.clone().requires_grad_()
    for careful in (False, False, True):
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error" if careful else "default")
        try:
            made(leaf, residual).backward(dy)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert bool(leaf.grad.isfinite().all()) and made.chosen.sum() == 3 * 256 * TOP_K


@torch.no_grad()
def reorder(model: torch.nn.Module, seed: int) -> None:
    """Permutes heads and the features of each expert: the same function, its sums taken in another order."""
    generator = torch.Generator().manual_seed(seed)
    for block in model.blocks:
        heads = torch.randperm(model.config.heads, generator=generator)
        qkv = rearrange(block.qkv.weight, "(heads qkv_d) hidden -> heads qkv_d hidden", heads=model.config.heads)
        qkv.copy_(qkv[heads])
        proj = rearrange(block.proj.weight, "hidden (heads d) -> hidden heads d", heads=model.config.heads)
        proj.copy_(proj[:, heads])
        for first, second in zip(block.mlp.fc1.parameters(), block.mlp.fc2.parameters(), strict=True):
            ffn = torch.randperm(model.config.ffn, generator=generator)
            gate_up = rearrange(first, "(gate_up ffn) hidden -> gate_up ffn hidden", gate_up=2)
            gate_up.copy_(gate_up[:, ffn])
            second.copy_(second[:, ffn])


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> dict:
    """What ranks_moe.py found on two ranks with half of the experts each."""
    out = tmp_path_factory.mktemp("moe") / "ranks.pt"
    launch(Path(__file__).with_name("ranks_moe.py"), str(out), ranks=2, timeout=TIMEOUT)
    return torch.load(out)


def test_ep_sizes_agree_step_by_step(ranks: dict) -> None:
    """In fp32, as test_agreement.py does for tp: at most twice what other orders of the same sums do."""
    alone = losses(FP32, ALONE)
    noise, bounds = [0.0], []
    others = [losses(FP32, ALONE, lambda model, seed=seed: reorder(model, seed)) for seed in range(REORDERINGS)]
    for step in range(STEPS):
        noise.append(max(noise[-1], *(abs(other[step] - alone[step]) for other in others)))
        bounds.append(FACTOR * noise[-1] + 2 * ULP)

    def excess(found: list[float]) -> float:
        return max(abs(a - b) / bound for a, b, bound in zip(found, alone, bounds, strict=True))

    assert noise[-1] > 0, "equal losses mean that nothing was reordered"
    assert excess(ranks["losses"]) <= 1, (ranks["losses"], alone, bounds)
    assert excess(ranks["mixed losses"]) > 10  # expert gradients reduced like all others


def test_ep_sizes_have_the_same_gradients(ranks: dict) -> None:
    """In fp32: as far apart as fp32 sums are, and not with experts reduced like the rest, or the rest not at all."""
    alone = gradients(FP32, ALONE)
    assert ranks["gradients"].keys() == alone.keys()
    # sums of some thousand products in another order, and four layers of them
    bound = 4 * 8 * 2.0**-24

    def wrong(found: dict[str, Tensor]) -> set[str]:
        return {name for name, t in alone.items() if not (found[name] - t).norm() <= bound * t.norm()}

    assert not wrong(ranks["gradients"])
    experts = {name for name in alone if "mlp.fc" in name}
    assert wrong(ranks["mixed gradients"]) == experts and len(experts) == 2 * 2 * 4
    assert wrong(ranks["alone gradients"]) >= alone.keys() - experts - {"loss"}


@pytest.mark.parametrize("recipe", RECIPES)
def test_ep_sizes_agree_under_every_recipe(recipe: str, ranks: dict) -> None:
    """Errors against fp32 with the same weights: at most twice those of one rank. Scales are of all tokens of an
    expert, wherever they come from."""
    argv = (*TINY, "--recipe", recipe)

    def rounded(model: torch.nn.Module) -> None:
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(p.bfloat16())

    truth, reference = gradients((*TINY, "--params-dtype", "fp32"), ALONE, rounded), gradients(argv, ALONE)
    noticed = set()
    for name, got in ranks[recipe].items():
        assert_close_to_oracle(f"{recipe} {name}", got, truth[name], reference[name])
        if not measure(name, got / 2, truth[name], reference[name]).ok:  # a mean over ranks where a sum belongs
            noticed.add("mlp.fc" in name)
    assert noticed == {False, True}, "the bounds are too wide"


def train(folder: Path, *args: str, ranks: int = 1) -> tuple[dict, str]:
    printed = launch(SCRIPT, *TINY, *outputs(folder), *args, ranks=ranks, timeout=TIMEOUT)
    return read_log(folder), printed


def test_learns_on_two_ranks_and_resumes_bitwise(tmp_path: Path) -> None:
    common = ("--ep", "2", "--recipe", "delayed", "--steps", "24", "--lr", "6e-3")
    saves = ("--checkpoint-dir", str(tmp_path / "kept"), "--save-every", "12")
    log, printed = train(tmp_path, *common, *saves, "--fuse-wgrad", "--recompute", "full", ranks=2)
    summary = log["summary"]
    assert log["losses"][0] > 1.5 * summary["unigram_entropy"] > 1.2 * summary["held_out_loss"]
    assert summary["ep"] == 2 and len(summary["busiest_expert"]) == 2
    assert all(1.0 <= share <= 4 / 2 for share in summary["busiest_expert"])
    assert "experts          4, ep 2" in printed and (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "kept" / "latest.json").write_text('{"step": 12}')
    again, _ = train(tmp_path, *common, *saves, "--fuse-wgrad", "--recompute", "full", "--resume", ranks=2)
    assert again["losses"] == log["losses"] and again["held_out"] == log["held_out"]
    held = sorted(path.name for path in (tmp_path / "kept" / "step_00000012").iterdir())
    assert held == ["ep_0_of_2.pt", "ep_1_of_2.pt"]


@pytest.mark.multigpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_gpus_train_as_one_does(recipe: str, tmp_path: Path) -> None:
    """Sums are rounded elsewhere, so losses differ as between recipes."""
    args = ("--device", "cuda", "--recipe", recipe, "--steps", "24", "--lr", "6e-3")
    both = [train(tmp_path, *args, "--ep", str(ranks), ranks=ranks)[0] for ranks in (1, 2)]
    for log in both:
        assert log["summary"]["held_out_loss"] < 1.25 * log["summary"]["unigram_entropy"]
    for one, two in zip(*(log["losses"] for log in both), strict=True):
        assert abs(two / one - 1) < 0.03


def test_refuses_what_cannot_work(tmp_path: Path) -> None:
    for argv, ranks, expected in (
        ("--tp 2", 2, ("--tp 2", "--ep 2")),
        ("--experts 3 --ep 2", 2, ("--experts 3", "--ep 2")),
        ("--top-k 9", 1, ("--top-k 9", "--experts 8")),
        ("--ep 2", 3, ("--ep 2", "3 rank")),
        ("--balance -1", 1, ("--balance -1", "at least 0")),
    ):
        with pytest.raises(mesh.RefusedError) as error:
            options.check(options.build_moe_parser().parse_args(argv.split()), ranks)
        assert all(text in str(error.value) for text in expected), error.value
    done = run([sys.executable, str(SCRIPT), *TINY, *outputs(tmp_path), "--ep", "2"])
    assert done.returncode == 2 and "train_moe.py: error: --ep 2 does not divide" in done.stderr
