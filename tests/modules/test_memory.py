"""Bytes kept for backward, per token and per parameter."""

import itertools
import math
import re
from pathlib import Path

import pytest
import torch

import te_lite as te
from te_lite.quantize.custom import Role
from te_lite.quantize.per_tensor import FORMATS, Current
from te_lite.recipe import CustomRecipe
from te_lite.testing.distributed import device_params
from te_lite.testing.memory import bytes_kept, kept_tensors
from te_lite.testing.numerics import assert_bitwise_equal
from tests import reference
from tests.harness import FP8, RECIPES, build, leaf, under
from tests.reference import LINEAR, LN_LINEAR, LN_MLP, Spec

K, N, FFN = 256, 512, 768
WEIGHTS = {LINEAR: N * K, LN_LINEAR: N * K, LN_MLP: 2 * FFN * K}
SMALL = 8192  # scales, norm parameters and biases, however many tokens

# Bytes per token that are allowed: (bf16, fp8). "stat" is mean and rstd in fp32.
PER_TOKEN = {
    (LINEAR, ""): (2 * K, K),
    (LN_LINEAR, ""): (2 * K + 2 * K + 8, 2 * K + K + 8),
    (LN_MLP, "gelu"): (4 * K + 8 + 4 * FFN, 3 * K + 8 + 3 * FFN),
    (LN_MLP, "swiglu"): (4 * K + 8 + 6 * FFN, 3 * K + 8 + 5 * FFN),
}


def kept(kind, activation, recipe, m, cached=False, frozen=False, again=None):
    spec = Spec(kind, activation=activation or "gelu")
    module = build(spec, K, N, FFN, **({"recompute_activation": again} if kind == LN_MLP else {}))
    if frozen:
        for name, p in module.named_parameters():
            p.requires_grad_("layer_norm" in name)
    x = leaf(reference.make_tokens(m, K, dtype=torch.bfloat16))
    with under(recipe):
        out = module(x, is_first_microbatch=True) if cached else module(x)
    return bytes_kept(out)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize(
    "kind, activation, again", [(*key, again) for key in PER_TOKEN for again in (False, None)[: 1 + (key[0] == LN_MLP)]]
)
def test_bytes_per_token_and_per_parameter(kind, activation, again, recipe):
    """Linear in the tokens with the stated slope; the rest is at most 2 bytes a weight (bf16 keeps the
    weight). Where fp8 saves as many bytes of inputs that are the module's own, weights stay transposed with their
    scales, the first one first; not those with a scale a row.
    """
    few, many = (kept(kind, activation, recipe, m, again=again) for m in (32, 160))
    slope = (many - few) / 128
    rest = few - 32 * slope
    computed = again is None and recipe in ("delayed", "current")  # activation(h), again, so that nothing is kept of it
    weights = WEIGHTS[kind] * (1.5 if activation == "swiglu" else 1)
    unquantized = recipe in ("bf16", "rowwise_with_gw_hp")  # the latter's weight gradients read bf16
    kept_fp8 = K + FFN if kind == LN_MLP else K
    in_blocks = recipe in ("mxfp8", "blockwise")
    scales = kept_fp8 / 32 if in_blocks else 0  # a byte for 32 values, four for 128
    assert slope <= PER_TOKEN[kind, activation][not unquantized] + scales - FFN * computed
    a_scale_a_column = 4 * kept_fp8 if recipe == "rowwise" else 0
    assert rest <= 2 * weights + SMALL + a_scale_a_column
    first = {LINEAR: N * K, LN_LINEAR: N * K, LN_MLP: FFN * K * (2 if activation == "swiglu" else 1)}[kind]
    second = FFN * K if kind == LN_MLP else 0
    room = {LINEAR: K, LN_LINEAR: K, LN_MLP: K + FFN * (not computed)}[kind]  # a token
    scale = {"mxfp8": 1 / 32, "blockwise": 4 / 128**2}.get(recipe, 0)  # a byte of the weight
    for stays in (first, first + second):
        m = math.ceil(stays * (1 + scale) / (room - scales))
        m += -m % (128 if in_blocks else 16)
        transposed = kept(kind, activation, recipe, m, again=again) - rest - m * slope
        assert abs(transposed - stays * (1 + scale) * (recipe in ("delayed", "current") or in_blocks)) <= SMALL


@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise", "mxfp8"])
def test_a_second_weight_may_fit_where_the_first_does_not(recipe):
    """What 256 tokens save, 1,024 bytes each or 992 with scales, pays for fc2's 196,608 and not for fc1's 393,216."""
    few, less, more = (kept(LN_MLP, "swiglu", recipe, m, again=False) for m in (32, 160, 256))
    slope = (less - few) / 128
    scales = K * FFN / 32 if recipe == "mxfp8" else 0
    assert abs(more - (few + 224 * slope) - K * FFN - scales) <= SMALL


@pytest.mark.parametrize("m", [1, 7, 64, 1024])
@pytest.mark.parametrize("recipe", FP8)
@pytest.mark.parametrize("kind, activation", PER_TOKEN)
def test_fp8_never_keeps_more_than_bf16(kind, activation, recipe, m):
    """Up to the padding of a token count to 16 and a few scales."""
    padding = 16 * (K + N + 3 * FFN) if m % 16 else 0
    assert kept(kind, activation, recipe, m) <= kept(kind, activation, "bf16", m) + padding + 64


def bf16_weights(role: Role) -> Current | None:
    """Current scaling of all but the weights."""
    return None if role.operand == "w" else Current(FORMATS[torch.float8_e4m3fn])


@pytest.mark.parametrize("setting", ["weight", "fc1_weight", "fc2_weight", "returned", "amp", "bf16 weights", "padded"])
@pytest.mark.parametrize("recipe", ["delayed", "current", "blockwise", "mxfp8"])
@pytest.mark.parametrize("kind", [LN_LINEAR, LN_MLP])
def test_nor_does_it_where_transposed_weights_may_stay(kind, recipe, setting):
    """With many tokens: a frozen weight, whose input is not kept; norm(x) returned, so that it is the caller's too;
    parameters in fp32; a recipe that keeps weights in bf16; tokens that are padded."""
    amp = setting in ("amp", "bf16 weights")
    just = N if kind == LN_LINEAR else 2 * FFN * K // (K + FFN)  # tokens that pay for the first weight
    m = {"bf16 weights": just, "padded": just + 1}.get(setting, 1024)
    quantized = CustomRecipe(bf16_weights) if setting == "bf16 weights" else recipe
    found = []
    for name in ("bf16", quantized):
        options = {"return_layernorm_output": True} if setting == "returned" else {}
        module = build(
            Spec(kind, activation="swiglu"), K, N, FFN, dtype=torch.float32 if amp else torch.bfloat16, **options
        )
        for parameter, value in module.named_parameters():
            value.requires_grad_(parameter != setting)
        x = leaf(reference.make_tokens(m, K, dtype=torch.bfloat16))
        with under(name) if name == "bf16" or isinstance(name, str) else te.autocast(recipe=name):
            with torch.amp.autocast("cpu", torch.bfloat16, enabled=amp):
                out = module(x)
        found.append(bytes_kept(out[0] if setting == "returned" else out))
    assert found[1] <= found[0] + 64
    if setting == "returned" and kind == LN_LINEAR:  # nothing is saved of it, so nothing stays for that
        scales = K / 32 if recipe in ("blockwise", "mxfp8") else 0
        assert found[1] <= m * (3 * K + scales + 8) + 2 * N * K + SMALL


def table(title):
    """{first cell: {recipe: cell}} of the first table under a title of the page on a step."""
    text = (Path(te.__file__).parents[1] / "docs/reference/step.md").read_text().partition(f"{title}\n")[2]
    head, _, *rows = ([cell.strip() for cell in line.strip("| ").split("|")] for line in lines_of_table(text))
    each = {first: zip(head[1:], cells, strict=True) for first, *cells in rows}
    return {first: {name: cell for names, cell in pairs for name in names.split(", ")} for first, pairs in each.items()}


def lines_of_table(text):
    return itertools.takewhile(lambda line: line.startswith("|"), text[text.index("\n|") + 1 :].splitlines())


TABLE = table("## What is kept")


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("row", TABLE)
def test_the_documented_bytes_a_token(row, recipe):
    """On the meta device; tokens whose savings pay for no weight."""
    kind, activation, again = (*row.split(", "), "", "")[:3]
    options = {"recompute_activation": bool(again)} if kind == LN_MLP else {}
    module = build(Spec(kind, activation=activation or "gelu"), 512, 1024, 1536, device="meta", **options)
    found = []
    for m in (128, 256):
        x = torch.empty(m, 512, dtype=torch.bfloat16, device="meta", requires_grad=True)
        with under(recipe):
            found.append(bytes_kept(module(x)))
    formula = re.sub(r"(?<=\d) (?=[KF])", " * ", TABLE[row][recipe])
    assert found[1] - found[0] == 128 * eval(formula, {"K": 512, "F": 1536})
    bias_and_norm = 2 * (3 * 512 + 2 * 1536 + 1024)
    rows = 4 * (512 + 1536) if recipe == "rowwise" else 0
    weights = sum(p.numel() for name, p in module.named_parameters() if p.dim() == 2)
    assert 2 * found[0] - found[1] <= 2 * weights + bias_and_norm + rows + 64


MIB = table("with RMSNorm, swiglu and the default of `recompute_activation`:")
MOST = {"4096, 14336, recomputed": 600, "8192, 7168": 420}


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("features", MIB)
def test_the_documented_mib(features, recipe):
    """By the default rule, or recomputed where a row says so."""
    k, ffn, *said = features.split(", ")
    k, ffn, spec = int(k), int(ffn), Spec(LN_MLP, "RMSNorm", activation="swiglu", bias=False)
    module = build(spec, k, ffn=ffn, device="meta", recompute_activation=True if said else None)
    x = torch.empty(8192, k, dtype=torch.bfloat16, device="meta", requires_grad=True)
    with under(recipe):
        found = kept_tensors(module(x))
    own = {t.untyped_storage()._cdata for t in (x, *module.parameters())}
    bytes = sum(t.untyped_storage().nbytes() for t in found if t.untyped_storage()._cdata not in own)
    mib = {name: int(cell) for name, cell in MIB[features].items()}
    assert round(bytes / 2**20) == mib[recipe] <= min(mib["bf16"], MOST.get(features, math.inf))


@pytest.mark.parametrize("recipe", RECIPES)
def test_frozen_weights_keep_no_input(recipe):
    """Without a weight gradient the input of the GEMM is not kept."""
    slope = (kept(LINEAR, "", recipe, 320, frozen=True) - kept(LINEAR, "", recipe, 64, frozen=True)) / 256
    assert slope == 0


@pytest.mark.parametrize("recipe", RECIPES)
def test_nothing_is_kept_without_gradients(recipe):
    module = build(Spec(LN_MLP), K, N, FFN)
    with torch.no_grad(), under(recipe):
        out = module(reference.make_tokens(64, K, dtype=torch.bfloat16))
    assert out.grad_fn is None and bytes_kept(out) == 0


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", [LINEAR, LN_LINEAR, LN_MLP])
def test_backward_frees_what_was_kept(kind, recipe):
    module = build(Spec(kind), K, N, FFN)
    x = leaf(reference.make_tokens(64, K, dtype=torch.bfloat16))
    with under(recipe):
        out = module(x)
    held = [t.untyped_storage()._weak_ref() for t in kept_tensors(out) if not isinstance(t, torch.nn.Parameter)]
    assert held
    out.sum().backward()
    del out
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    alive = [ref for ref in held if not torch.UntypedStorage._expired(ref)]
    for ref in held:
        torch.UntypedStorage._free_weak_ref(ref)
    assert len(alive) <= len(parameters) + 1  # the parameters and x


def test_the_helper_counts_what_torch_keeps():
    """torch's own linear keeps x and the weight; a view counts in full, shared storage once."""
    x = torch.randn(32, 16, requires_grad=True)
    w = torch.randn(8, 16, requires_grad=True)
    assert bytes_kept(torch.nn.functional.linear(x, w)) == 4 * (32 * 16 + 8 * 16)
    assert bytes_kept((x[:2] * w[:2]).sum()) == 4 * (32 * 16 + 8 * 16)
    assert bytes_kept(x * x) == 4 * 32 * 16


@pytest.mark.parametrize("device", device_params())
@pytest.mark.parametrize("recipe", ["bf16", "current", "blockwise"])
@pytest.mark.parametrize("kind", [te.Linear, te.LayerNormLinear])
def test_a_weight_joined_by_a_copy_is_not_kept(kind, recipe, device):
    """Its parts are, and the gradients have the bits of parts that lie side by side."""
    module = kind(K, N, parameters_split=("q", "k"), params_dtype=torch.bfloat16, device=device)
    x, dy = reference.make_tokens(48, K, dtype=torch.bfloat16).to(device), torch.randn(48, N, device=device)
    found = []
    for beside in (True, False):
        if not beside:
            module.k_weight.data = module.k_weight.data.clone()
        for _ in range(3):  # on a GPU the third one is a recording
            module.zero_grad(set_to_none=True)
            given = leaf(x, device)
            with under(recipe):
                out = module(given)
            shapes = {tuple(t.shape) for t in kept_tensors(out) if t.dtype == torch.bfloat16}
            assert ((N, K) in shapes) == beside and (beside or (N // 2, K) in shapes)
            out.backward(dy.to(out.dtype))
        found.append([given.grad, *(p.grad for p in module.parameters())])
    for one, other in zip(*found, strict=True):
        assert_bitwise_equal("gradient", one, other)
