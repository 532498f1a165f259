"""ub_cfgs: what is unknown raises with the nearest name, what is left out is Transformer Engine's default."""

import pytest
import torch

import te_lite as te
from te_lite import epoch
from te_lite.overlap import userbuffers
from te_lite.overlap.bootstrap import BootstrapError
from te_lite.overlap.config import IGNORED, LAYER_GEMMS, layer_methods, offered
from te_lite.overlap.exchanges import EXCHANGES
from te_lite.overlap.group import Group
from te_lite.parallel import TensorParallel
from tests.overlap.threads import make_group, on_threads

NONE, FP8 = te.UserBufferQuantizationMode.NONE, te.UserBufferQuantizationMode.FP8


def test_no_ub_cfgs_are_empty_ones():
    assert layer_methods(None, 1) == layer_methods({}, 1) == layer_methods([{}, {}], 2)
    assert layer_methods(None, 1).methods == {name: offered(name)[0] for name in LAYER_GEMMS}


@pytest.mark.parametrize("name", LAYER_GEMMS)
@pytest.mark.parametrize("method", EXCHANGES)
def test_a_method_is_taken_where_it_is_offered_and_refused_elsewhere(name, method):
    given = {name: {"method": method}}
    if name.endswith("_wgrad") and method == "auto" and name in ("qkv_wgrad", "fc1_wgrad"):
        given[name.replace("wgrad", "dgrad")] = {"method": "auto"}
    if method not in offered(name):
        with pytest.raises(ValueError, match=rf"{name}.*{method}.*choose one of") as caught:
            layer_methods(given, 1)
        assert all(repr(offered) in str(caught.value) for offered in offered(name))
        return
    methods = layer_methods(given, 1).methods
    assert methods[name] == method
    untouched = set(LAYER_GEMMS) - set(given) - {name.replace("dgrad", "wgrad")}
    assert {key: methods[key] for key in untouched} == {key: offered(key)[0] for key in untouched}


@pytest.mark.parametrize(
    ("given", "wrong", "nearest"),
    [
        ({"fc2_dgrd": {}}, "fc2_dgrd", "fc2_dgrad"),
        ({"fc1_fprob": {"method": "ring_exchange"}}, "fc1_fprob", "fc1_fprop"),
        ({"projj_dgrad": {}}, "projj_dgrad", "proj_dgrad"),
        ({"fc1_fprop": {"metod": "ring_exchange"}}, "metod", "method"),
        ({"fc1_fprop": {"num_sms": 4}}, "num_sms", "num_sm"),
        ({"fc1_fprop": {"is_reduce_scater": False}}, "is_reduce_scater", "is_reduce_scatter"),
        ({"fc1_fprop": {"method": "ring_exchang"}}, "ring_exchang", "ring_exchange"),
        ({"proj_fprop": {"method": "pipelined"}}, "pipelined", "pipeline"),
    ],
)
def test_unknown_names_raise_with_the_nearest(given, wrong, nearest):
    with pytest.raises(ValueError) as caught:
        layer_methods(given, 1)
    assert repr(wrong) in str(caught.value)
    assert f"nearest: {nearest}" in str(caught.value)


@pytest.mark.parametrize("given", [{"attention": {}}, {"x": {"method": "bulk"}}, {"fc1_fprop": {"zzz": 1}}])
def test_what_is_near_nothing_raises_with_all_names(given):
    with pytest.raises(ValueError, match="must be one of") as caught:
        layer_methods(given, 1)
    assert "nearest" not in str(caught.value)


@pytest.mark.parametrize("method", [None, 3, ["bulk"]])
def test_a_method_that_is_no_name(method):
    with pytest.raises(ValueError, match="is none of"):
        layer_methods({"fc1_dgrad": {"method": method}}, 1)


def test_options_without_a_meaning_are_named():
    given = {"qkv_fprop": dict.fromkeys(IGNORED, 1), "fc2_fprop": {"num_sm": 1, "method": "pipeline"}}
    assert set(layer_methods(given, 1).ignored) == {f"qkv_fprop.{name}" for name in IGNORED} | {"fc2_fprop.num_sm"}
    assert layer_methods(None, 1).ignored == ()
    assert layer_methods([{"fc1_fprop": {"num_sm": 2}}, {"fc1_fprop": {"num_sm": 2}}], 2).ignored == (
        "fc1_fprop.num_sm",
    )


@pytest.mark.parametrize(
    ("mode", "layer", "flags", "dgrad", "sums"),
    [
        ("row", "fc2", ("ub_overlap_ag", "ub_overlap_rs"), "auto", "fprop"),
        ("column", "fc1", ("ub_overlap_ag", "ub_bulk_dgrad", "ub_bulk_wgrad"), "bulk", ""),
        ("column", "fc1", ("ub_overlap_ag", "ub_bulk_dgrad", "ub_bulk_wgrad"), "auto", ""),
        ("column", "fc1", ("ub_overlap_ag", "ub_overlap_rs_dgrad"), "bulk", "dgrad"),
        ("column", "fc1", ("ub_bulk_dgrad", "ub_bulk_wgrad"), "fused", "dgrad"),
    ],
)
def test_fp8_buf_has_an_effect_where_a_gemm_scatters_its_own_output(mode, layer, flags, dgrad, sums):
    """Elsewhere the report says that it has none, for every GEMM that overlaps: which it is, the flags decide."""
    named = ("fprop", "dgrad", "wgrad") if dgrad in ("bulk", "auto") else ("fprop", "dgrad")  # else wgrad is no choice
    cfg = {f"{layer}_{gemm}": {"fp8_buf": True} for gemm in named}
    cfg[f"{layer}_dgrad"]["method"] = dgrad
    given, remarks = userbuffers._methods(mode, {**FLAGS, **dict.fromkeys(flags, True)}, layer_methods(cfg, 1), layer)
    without = {gemm for gemm, remark in remarks.items() if "option fp8_buf has no effect here" in remark}
    assert without == set(given) & set(named) - {sums} and (not sums or sums in given)


def test_fp8_buf_is_a_bool_and_the_same_in_each_mode():
    given = {name: {"fp8_buf": True} for name in LAYER_GEMMS}
    layers = layer_methods(given, 1)
    assert layers.narrow == set(LAYER_GEMMS) and not layers.ignored
    assert not layer_methods({"fc2_fprop": {"fp8_buf": False}}, 1).narrow
    with pytest.raises(TypeError, match="fp8_buf=1 must be True or False"):
        layer_methods({"fc2_fprop": {"fp8_buf": 1}}, 1)
    with pytest.raises(ValueError, match=r"\['fc2_fprop'\] another method or fp8_buf"):
        layer_methods([{}, {"fc2_fprop": {"fp8_buf": True}}], 2)


@pytest.mark.parametrize("length", [0, 3])
def test_a_list_has_one_entry_for_each_mode(length):
    with pytest.raises(ValueError, match=f"list of {length}.*2 modes"):
        layer_methods([{}] * length, 2)


def test_one_entry_serves_all_modes():
    given = [{"qkv_fprop": {"method": "fused"}}]
    assert layer_methods(given, 2).methods == layer_methods(given[0], 1).methods


def test_modes_that_disagree_raise():
    with pytest.raises(ValueError, match=r"\['proj_fprop'\].*each quantization mode"):
        layer_methods([{}, {"proj_fprop": {"method": "ring_exchange"}}], 2)


@pytest.mark.parametrize(("name", "method"), [(name, method) for name in LAYER_GEMMS for method in offered(name)])
@pytest.mark.parametrize("claim", [True, False])
def test_is_reduce_scatter_must_be_true_of_the_gemm(name, method, claim):
    given = {name: {"method": method, "is_reduce_scatter": claim}}
    column = name.startswith(("qkv", "fc1"))
    scatters = {"fprop": not column, "dgrad": column and method != "bulk", "wgrad": column}[name.split("_")[1]]
    if claim == scatters:
        layer_methods({**given, name.replace("wgrad", "dgrad"): given[name]} if method == "auto" else given, 1)
    else:
        with pytest.raises(ValueError, match="is_reduce_scatter"):
            layer_methods(given, 1)


@pytest.mark.parametrize("name", ["qkv_fprop", "fc1_fprop", "proj_dgrad", "fc2_dgrad"])
def test_pipeline_for_an_all_gather_says_why(name):
    with pytest.raises(ValueError, match="pipeline is for reduce-scatters"):
        layer_methods({name: {"method": "pipeline"}}, 1)


@pytest.mark.parametrize("layer", ["qkv", "fc1"])
def test_a_dgrad_that_scatters_settles_wgrad(layer):
    other = {"qkv": "fc1", "fc1": "qkv"}[layer]
    methods = layer_methods({f"{layer}_dgrad": {"method": "ring_exchange"}}, 1).methods
    assert methods[f"{layer}_wgrad"] == "none"
    assert methods[f"{other}_wgrad"] == "bulk"
    with pytest.raises(ValueError, match=f"{layer}_wgrad cannot be 'bulk'"):
        layer_methods({f"{layer}_dgrad": {"method": "pipeline"}, f"{layer}_wgrad": {"method": "bulk"}}, 1)
    both = {f"{layer}_dgrad": {"method": "bulk"}, f"{layer}_wgrad": {"method": "bulk"}}
    assert layer_methods(both, 1) == layer_methods(None, 1)


def test_modes():
    """Of any kind, alone or in a list; only their number counts, for a list of ub_cfgs has an entry for each."""

    def checked(modes, configs):
        return userbuffers._checked([128, 64], torch.bfloat16, [{}] * configs, modes)

    assert checked(NONE, 1) == checked(FP8, 1) == checked([FP8], 1) == layer_methods(None, 1)
    assert checked([NONE, FP8], 2) == checked([NONE, FP8], 1) == layer_methods(None, 1)
    with pytest.raises(ValueError, match="list of 2: must have one entry for each of 1 modes"):
        checked(FP8, 2)
    with pytest.raises(TypeError, match="'fp8'"):
        checked(["fp8"], 1)
    with pytest.raises(ValueError, match="empty"):
        checked([], 1)


FLAGS = dict.fromkeys(userbuffers.UB_FLAGS, False)


@pytest.mark.parametrize(
    ("mode", "flags", "cfg", "asked"),
    [
        ("column", ["ub_overlap_ag"], {}, {"fprop": "auto"}),
        ("column", ["ub_overlap_rs"], {}, {}),
        ("column", ["ub_overlap_rs_dgrad"], {}, {"dgrad": "auto", "wgrad": "external"}),
        (
            "column",
            ["ub_overlap_rs_dgrad"],
            {"fc1_dgrad": {"method": "fused"}},
            {"dgrad": "fused", "wgrad": "external"},
        ),
        ("column", ["ub_bulk_dgrad"], {"fc1_dgrad": {"method": "auto"}}, {"dgrad": "bulk"}),
        ("column", ["ub_bulk_dgrad"], {}, {"dgrad": "bulk"}),
        ("column", ["ub_bulk_wgrad"], {}, {"wgrad": "bulk"}),
        ("column", ["ub_bulk_dgrad", "ub_bulk_wgrad"], {}, {"dgrad": "bulk", "wgrad": "bulk"}),
        (
            "column",
            ["ub_overlap_rs_dgrad", "ub_bulk_wgrad", "ub_bulk_dgrad"],
            {},
            {"dgrad": "auto", "wgrad": "external"},
        ),
        ("row", ["ub_overlap_ag"], {}, {"dgrad": "auto", "wgrad": "external"}),
        ("row", ["ub_overlap_rs"], {}, {"fprop": "auto"}),
        ("row", ["ub_overlap_rs"], {"fc2_fprop": {"method": "pipeline"}}, {"fprop": "pipeline"}),
        ("row", ["ub_overlap_rs_dgrad", "ub_bulk_wgrad", "ub_bulk_dgrad"], {}, {}),
    ],
)
def test_what_the_flags_ask_for(mode, flags, cfg, asked):
    """The table of flags, for both kinds of linear."""
    layer = "fc1" if mode == "column" else "fc2"
    given, remarks = userbuffers._methods(mode, {**FLAGS, **dict.fromkeys(flags, True)}, layer_methods(cfg, 1), layer)
    assert given == asked
    both = mode == "column" and len(flags) == 3
    assert remarks == ({"wgrad": BULKS_IGNORED} if both else {})


BULKS_IGNORED = "ub_bulk_dgrad and ub_bulk_wgrad without effect: dgrad scatters its own output"


def test_options_without_effect_are_named():
    layers = layer_methods({"fc1_fprop": {"num_sm": 4, "use_ce": True}, "qkv_fprop": {"num_sm": 1}}, 1)
    _, remarks = userbuffers._methods("column", {**FLAGS, "ub_overlap_ag": True}, layers, "fc1")
    assert remarks == {"fprop": "option num_sm has no effect here; option use_ce has no effect here"}


@pytest.mark.parametrize(
    ("arguments", "kind", "match"),
    [
        ({"shape": [128]}, ValueError, "shape="),
        ({"shape": [0, 64]}, ValueError, "positive"),
        ({"shape": [128, 64.5]}, ValueError, "integers"),
        ({"shape": None}, ValueError, "shape=None"),
        ({"shape": [128, 64], "device": "meta"}, ValueError, "device='meta'"),
        ({"shape": [128, 64], "ub_cfgs": 5}, TypeError, "ub_cfgs=5"),
        ({"shape": [128, 64], "ub_cfgs": "fused"}, TypeError, "ub_cfgs='fused'"),
        ({"shape": [128, 64], "ub_cfgs": [5]}, TypeError, "ub_cfgs holds 5"),
        ({"shape": [128, 64], "ub_cfgs": {"fc1_fprop": "fused"}}, TypeError, "must be a dict of options"),
        ({"shape": [128, 64], "dtype": "bf16"}, TypeError, "dtype="),
        ({"shape": [128, 64], "ub_cfgs": {"fc3_fprop": {}}}, ValueError, "fc3_fprop"),
        ({"shape": [128, 64], "quantization_modes": [NONE, FP8], "ub_cfgs": [{}] * 3}, ValueError, "list of 3"),
        ({"shape": [128, 64], "quantization_modes": ["fp8"]}, TypeError, "UserBufferQuantizationMode"),
        ({"shape": [128, 64]}, RuntimeError, "init_process_group"),
    ],
)
def test_initialize_ub_refuses(arguments, kind, match):
    """Before anything else, and without torch.distributed."""
    with pytest.raises(kind, match=match):
        te.initialize_ub(tp_size=2, **{"device": "cpu", **arguments})
    assert not userbuffers.initialised()


@pytest.mark.parametrize("place", ["cpu", "cuda:1", "cuda:0"])
def test_activations_elsewhere_do_not_overlap(monkeypatch, place):
    """Their addresses would be handed to copy engines of another device, or to memcpy."""
    group = Group.__new__(Group)
    group.device, group.layers, group.strict = torch.device("cuda:0"), layer_methods(None, 1), False
    monkeypatch.setattr(userbuffers, "_groups", {(0, 1): group})
    monkeypatch.setattr(userbuffers.dist, "get_process_group_ranks", lambda _: [0, 1])
    tp = TensorParallel("column", 2, None, True)
    flags = {**FLAGS, "ub_overlap_ag": True}
    (fprop, *_), why = userbuffers.exchanges_for(tp, flags, "fc1", None, torch.device(place), False)
    assert fprop.hides == (place == "cuda:0") == (not why)
    if why:
        assert why.startswith(f"activations are on {place}, userbuffers on cuda:0")
        with pytest.raises(RuntimeError, match="userbuffers on cuda:0"):
            userbuffers.exchanges_for(tp, flags, "fc1", None, torch.device(place), True)


def test_a_rank_that_cannot_start_stops_all(monkeypatch):
    """Else the others would wait for it in their first exchange."""
    watch = Group._watch

    def failing(group):
        watch(group)
        if group.rank == 1:
            raise OSError("no thread left")

    monkeypatch.setattr(Group, "_watch", failing)

    def start(rank, exchange):
        with pytest.raises(BootstrapError, match=r"starting userbuffers failed on rank 1 \(OSError: no thread left\)"):
            make_group(exchange)

    on_threads(2, start)


def test_destroy_ub_without_initialize_ub_is_no_error():
    before = epoch.number
    te.destroy_ub()
    assert epoch.number == before and userbuffers.groups() == []
