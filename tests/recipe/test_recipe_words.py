"""What a recipe is called in messages, and in what ranks compare."""

import te_lite as te


def test_the_name_and_what_differs_from_the_defaults() -> None:
    assert str(te.recipe.Float8BlockScaling()) == "blockwise" and str(te.recipe.Float8CurrentScaling()) == "current"
    assert str(te.recipe.Float8CurrentScaling(per_shard_scales=True)) == "current(per_shard_scales=True)"
    fp32 = te.recipe.QParams(power_2_scale=False)
    assert str(te.recipe.Float8BlockScaling(fp8_quant_bwd_grad=fp32)) == "blockwise(fp8_quant_bwd_grad=fp32)"


def test_functions_are_left_out() -> None:
    """Their addresses differ by process."""
    assert str(te.recipe.CustomRecipe(qfactory=print)) == "custom"


def test_whole_numbers_become_floats_where_a_float_is_asked_for():
    """A kernel is compiled for the kind of number that it gets first, and 0 == 0.0."""
    params = te.recipe.QParams(amax_epsilon=0)
    assert type(params.amax_epsilon) is float and params == te.recipe.QParams()
    module = te.LayerNormLinear(16, 16, eps=0, device="cpu")
    assert type(module._norm.eps) is float and type(te.RMSNorm(16, eps=1, device="cpu")._spec.eps) is float
