"""Quantizers of the user's own: CustomRecipe's qfactory, asked for each operand of each GEMM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from te_lite.quantize.identity import Identity
from te_lite.quantize.quantizer import GemmOperands, GemmQuantizers, Quantizer, Site
from te_lite.recipe import CustomRecipe


@dataclass(frozen=True, slots=True)
class Role:
    """One operand of one GEMM: fprop (x, w), dgrad (dy, w) or wgrad (dy, x) of the linear at `site`."""

    gemm: Literal["fprop", "dgrad", "wgrad"]
    operand: Literal["x", "w", "dy"]
    site: Site


def _ask(recipe: CustomRecipe, role: Role) -> Quantizer:
    made = recipe.qfactory(role)
    if made is None:
        return Identity(target=role.site.dtype)
    if not isinstance(made, Quantizer):
        raise TypeError(
            f"qfactory gave a {type(made).__name__} for {role.operand} of {role.gemm}: must be a te_lite Quantizer, or "
            "None for high precision; return an instance of a Quantizer subclass"
        )
    return made


def operands(recipe: CustomRecipe, site: Site) -> GemmOperands:
    """The quantizers that recipe.qfactory gives.

    Each tensor is read by two GEMMs. Equal quantizers for it become one object, by which a linear knows that one
    quantized tensor serves both.
    """

    def pair(one: Role, other: Role) -> tuple[Quantizer, Quantizer]:
        first, second = _ask(recipe, one), _ask(recipe, other)
        return first, first if second == first else second

    x_fprop, x_wgrad = pair(Role("fprop", "x", site), Role("wgrad", "x", site))
    w_fprop, w_dgrad = pair(Role("fprop", "w", site), Role("dgrad", "w", site))
    dy_dgrad, dy_wgrad = pair(Role("dgrad", "dy", site), Role("wgrad", "dy", site))
    fprop, dgrad = GemmQuantizers(x_fprop, w_fprop), GemmQuantizers(dy_dgrad, w_dgrad)
    return GemmOperands(fprop, dgrad, GemmQuantizers(dy_wgrad, x_wgrad))
