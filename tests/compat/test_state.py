"""State dicts of torch's and Transformer Engine's modules, to and fro, always strictly."""

import io
import pickle
from collections import OrderedDict

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import te_lite as te
from te_lite.testing.numerics import assert_bitwise_equal
from tests.compat.noticed import Runs
from tests.harness import RECIPES, has_scales, step, through_a_file, under

BF16 = torch.bfloat16
MAKE = {
    "Linear": lambda **o: te.Linear(64, 96, **o),
    "split": lambda **o: te.Linear(64, 96, parameters_split=("q", "k"), **o),
    "LayerNormLinear": lambda **o: te.LayerNormLinear(64, 96, bias=False, **o),
    "LayerNormMLP": lambda **o: te.LayerNormMLP(64, 96, normalization="RMSNorm", **o),
    "LayerNorm": lambda **o: te.LayerNorm(64, **o),
    "RMSNorm": lambda **o: te.RMSNorm(64, **o),
}


def make(kind, **options):
    return MAKE[kind](params_dtype=BF16, device="cpu", **options)


def tokens(seed, features=64):
    return torch.randn(32, features, generator=torch.Generator().manual_seed(seed)).to(BF16)


def trained(kind, recipe="delayed"):
    module = make(kind)
    if kind not in ("LayerNorm", "RMSNorm"):
        for i in range(2):
            step(module, tokens(i), tokens(i + 9, 64 if kind == "LayerNormMLP" else 96), recipe)
    return module


def torch_model():
    """Of torch's layers, with random numbers everywhere."""
    layers = nn.LayerNorm(64), nn.Linear(64, 96), nn.RMSNorm(96, eps=1e-5), nn.Linear(96, 64, bias=False)
    model = nn.Sequential(OrderedDict(zip("abcd", layers, strict=True))).to(BF16)
    with torch.no_grad():
        for param in model.parameters():
            param.normal_()
    return model


def te_model(**options):
    options = {"params_dtype": BF16, "device": "cpu", **options}
    layers = (
        te.LayerNorm(64, **options), te.Linear(64, 96, **options), te.RMSNorm(96, **options),
        te.Linear(96, 64, bias=False, **options),
    )  # fmt: skip
    return nn.Sequential(OrderedDict(zip("abcd", layers, strict=True)))


@pytest.mark.parametrize("assign", [False, True])
def test_torchs_state_dict_loads_strictly(assign):
    source, target = torch_model(), te_model()
    result = target.load_state_dict(source.state_dict(), assign=assign)
    assert not result.missing_keys and not result.unexpected_keys
    for name, param in target.named_parameters():
        assert_bitwise_equal(name, param.detach(), source.get_parameter(name).detach())
    x = tokens(3)
    torch.testing.assert_close(target(x), source(x), rtol=2e-2, atol=2e-1)


@pytest.mark.parametrize("kind", MAKE)
def test_what_is_truly_missing_is_still_said(kind):
    module = make(kind)
    state = module.state_dict()
    first = next(iter(state))
    del state[first], state["_extra_state"]
    result = module.load_state_dict(state | {"more": torch.ones(1)}, strict=False)
    assert result.missing_keys == [first] and result.unexpected_keys == ["more"]
    with pytest.raises(RuntimeError, match=first):
        module.load_state_dict(state)

    class Other(nn.Linear):
        def get_extra_state(self):
            return torch.ones(1)

        def set_extra_state(self, state):
            pass

    state = nn.Sequential(make(kind), nn.Linear(2, 2)).state_dict()
    result = nn.Sequential(make(kind), Other(2, 2)).load_state_dict(state, strict=False)
    assert result.missing_keys == ["1._extra_state"]


def as_bytes(data):
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def saved_none():
    file = io.BytesIO()
    torch.save(None, file)
    return file


# What Transformer Engine's versions write where there are no scales.
NO_STATE = {
    "empty uint8": lambda: torch.empty(0, dtype=torch.uint8),
    "None": lambda: None,
    "no bytes": lambda: b"",
    "empty BytesIO": io.BytesIO,
    "BytesIO of None": saved_none,
    "bytes of None": lambda: saved_none().getvalue(),
    "uint8 of None": lambda: as_bytes(pickle.dumps(None)),
    "uint8 of an empty dict": lambda: as_bytes(pickle.dumps({})),
    "older pickle of an empty dict": lambda: as_bytes(pickle.dumps({}, 2)),
    "meta": lambda: torch.ones(30, device="meta"),
}


@pytest.mark.parametrize("form", NO_STATE)
@pytest.mark.parametrize("kind", MAKE)
def test_no_extra_state_in_any_form_loads_strictly(kind, form):
    source, target = make(kind), trained(kind)
    state = source.state_dict() | {"_extra_state": NO_STATE[form]()}
    result = target.load_state_dict(state)
    assert not result.missing_keys and not result.unexpected_keys
    assert not has_scales(target.get_extra_state())
    for name, param in source.named_parameters():
        assert_bitwise_equal(name, target.get_parameter(name).detach(), param.detach())


@pytest.mark.parametrize("kind", ["Linear", "LayerNormMLP"])
def test_an_absent_extra_state_leaves_the_scales_alone(kind):
    module = trained(kind)
    before, state = module.get_extra_state(), make(kind).state_dict()
    del state["_extra_state"]
    module.load_state_dict(state)
    assert has_scales(before)
    assert_bitwise_equal("state", module.get_extra_state(), before)


FOREIGN = {
    "a recipe's numbers": lambda: as_bytes(pickle.dumps({"recipe": 1, "scale_fwd": [1.0]})),
    "code": lambda: as_bytes(pickle.dumps(Runs())),
    "code in bytes": lambda: pickle.dumps(Runs()),
    "no pickle": lambda: torch.arange(40, dtype=torch.uint8),
    "half a file": lambda: io.BytesIO(saved_none().getvalue()[:100]),
    "an object": lambda: {"recipe": "delayed"},
}


@pytest.mark.parametrize("form", FOREIGN)
@pytest.mark.parametrize("kind", ["Linear", "LayerNorm"])
def test_other_extra_states_are_refused_and_never_run(kind, form):
    module = make(kind)
    with pytest.raises(TypeError, match="extra state is .*drop the"):
        module.load_state_dict(module.state_dict() | {"_extra_state": FOREIGN[form]()})
    assert not Runs.ran


def test_a_norm_refuses_scales():
    state = te.LayerNorm(64, device="cpu").state_dict() | {"_extra_state": trained("Linear").get_extra_state()}
    with pytest.raises(ValueError, match="LayerNorm, which has none"):
        te.LayerNorm(64, device="cpu").load_state_dict(state)


def test_older_files_load_strictly():
    """Norms without the key; a first number of exactly 1, which the next file no longer has."""
    norm, linear = te.RMSNorm(64, device="cpu"), trained("Linear")
    norm.load_state_dict({"weight": torch.randn(64)})
    state = linear.state_dict()
    state["_extra_state"][0] = 1.0
    again = make("Linear")
    again.load_state_dict(state)
    assert_bitwise_equal("state", again.get_extra_state(), linear.get_extra_state())


def test_torchs_distributed_checkpoints(tmp_path):
    """They ask for every key; older files have none for norms."""
    source, target = te_model(), te_model()
    dcp.save(source.state_dict(), checkpoint_id=tmp_path / "new", no_dist=True)
    older = source.state_dict()
    del older["a._extra_state"], older["c._extra_state"]
    dcp.save(older, checkpoint_id=tmp_path / "older", no_dist=True)
    with pytest.raises(BaseException, match="a._extra_state"):
        dcp.load(target.state_dict(), checkpoint_id=tmp_path / "older", no_dist=True)
    partial = dcp.DefaultLoadPlanner(allow_partial_load=True)
    for folder, planner in (("new", None), ("older", partial)):
        with torch.no_grad():
            for param in target.parameters():
                param.normal_()
        state = target.state_dict()
        dcp.load(state, checkpoint_id=tmp_path / folder, no_dist=True, planner=planner)
        target.load_state_dict(state)
        for name, param in source.named_parameters():
            assert_bitwise_equal(name, target.get_parameter(name).detach(), param.detach())


class StandIn(nn.Module):
    """Loads as Transformer Engine's modules do: no state where the tensor is empty, else its bytes are unpickled, which
    must give None or a dict with a recipe. `seen`: what came of it."""

    def __init__(self, like):
        super().__init__()
        for name, param in like.named_parameters():
            self.register_parameter(name, nn.Parameter(torch.empty_like(param)))

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        self.seen = pickle.loads(state.detach().cpu().numpy().tobytes()) if state.numel() else None
        if self.seen is not None:
            self.seen["recipe"]


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("kind", MAKE)
def test_transformer_engine_loads_our_state_dict_strictly(kind, recipe):
    """With delayed scaling's state too, of which it sees nothing."""
    module = trained(kind, recipe)
    state = through_a_file(module.state_dict())
    copied = make(kind)
    copied.load_state_dict(state)
    for one in (state, through_a_file(copied.state_dict())):
        target = StandIn(module)
        target.load_state_dict(one)
        assert target.seen is None
    linear = kind not in ("LayerNorm", "RMSNorm")
    assert has_scales(state["_extra_state"]) == (linear and recipe == "delayed")
    if state["_extra_state"].numel():
        state["_extra_state"][0] = 1.0
        with pytest.raises(pickle.UnpicklingError):
            StandIn(module).load_state_dict(state)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", MAKE)
def test_transformer_engine_itself(kind):
    theirs = pytest.importorskip("transformer_engine.pytorch")
    ours = trained(kind)
    name = "Linear" if kind == "split" else kind
    sizes = (64,) if "Norm" in kind and "Lin" not in kind and "MLP" not in kind else (64, 96)
    options = {"split": {"parameters_split": ("q", "k")}, "LayerNormLinear": {"bias": False}}.get(kind, {})
    options |= {"normalization": "RMSNorm"} if kind == "LayerNormMLP" else {}
    other = getattr(theirs, name)(*sizes, params_dtype=BF16, **options)
    other.load_state_dict(ours.state_dict())
    make(kind).load_state_dict(other.state_dict())
    for name, param in ours.named_parameters():
        assert_bitwise_equal(name, other.get_parameter(name).detach().cpu(), param.detach())


def test_plain_state_dict_loads_strictly_into_torchs_model():
    source, target = te_model(), torch_model()
    for i in range(2):
        source.zero_grad()
        with under("delayed"):
            y = source(tokens(i))
        y.backward(tokens(9))
    state = te.plain_state_dict(source)
    target.load_state_dict(state)
    for name, param in source.named_parameters():
        assert_bitwise_equal(name, target.get_parameter(name).detach(), param.detach())
    te_model().load_state_dict(state)


def test_plain_state_dict_is_the_state_dict_otherwise():
    class Other(nn.Linear):
        def get_extra_state(self):
            return torch.ones(3)

    model = nn.Sequential(te_model(), checkpoint_wrapper(make("LayerNormMLP")), Other(2, 2), nn.BatchNorm1d(2))
    for prefix in ("", "model."):
        for keep in (False, True):
            want = model.state_dict(prefix=prefix, keep_vars=keep)
            got = te.plain_state_dict(model, prefix=prefix, keep_vars=keep)
            gone = [name for name in want if name not in got]
            assert type(got) is type(want) and got._metadata == want._metadata
            assert gone == [f"{prefix}{name}._extra_state" for name in ("0.a", "0.b", "0.c", "0.d", "1")]
            assert list(got) == [name for name in want if name not in gone]
            for name, value in got.items():
                assert name.endswith("_extra_state") or value.data_ptr() == want[name].data_ptr()
                assert isinstance(value, nn.Parameter) == isinstance(want[name], nn.Parameter)
    assert "0.a._extra_state" in model.state_dict()
    assert "_extra_state" not in te.plain_state_dict(make("LayerNorm"))
