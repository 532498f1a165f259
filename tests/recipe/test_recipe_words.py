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
