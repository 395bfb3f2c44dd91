"""The rule of each operation."""

from __future__ import annotations

from lightning_megatp.tensor.features.call import Rule
from lightning_megatp.tensor.features.rules import (
    across,
    along_dims,
    attention,
    elementwise,
    indexing,
    joining,
    logits,
    parts,
    products,
    views,
)
from lightning_megatp.tensor.features.rules.operands import either
from lightning_megatp.tensor.functions import operation_names

POINTWISE = operation_names(
    """
    add sub subtract rsub mul multiply div divide true_divide floor_divide remainder fmod pow float_power
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __div__ __rdiv__ __floordiv__ __mod__
    __pow__ __rpow__ __neg__ __pos__ __abs__ __invert__ __and__ __rand__ __or__ __ror__ __xor__ __rxor__
    __iadd__ __isub__ __imul__ __itruediv__ __ipow__ __iand__ __ior__ __ixor__
    __eq__ __ne__ __lt__ __le__ __gt__ __ge__ eq ne lt le gt ge equal_ greater less greater_equal less_equal not_equal
    logical_and logical_or logical_not logical_xor bitwise_and bitwise_or bitwise_not bitwise_xor
    neg negative positive abs absolute square sqrt rsqrt exp exp2 expm1 log log2 log10 log1p sin cos tan sinh cosh
    tanh asin acos atan asinh acosh atanh erf erfc erfinv sinc lgamma digamma sigmoid sign special_expit
    special_logit special_erf special_erfc special_exp2 special_expm1 special_log1p special_gammaln special_ndtr
    special_entr special_sinc special_xlogy xlogy reciprocal floor ceil round trunc frac nan_to_num isnan isinf
    isfinite logit gelu relu relu6 silu softplus leaky_relu elu celu selu mish hardswish hardsigmoid hardtanh
    softsign tanhshrink log_sigmoid hardshrink softshrink threshold clamp clip clamp_min clamp_max maximum minimum
    fmax fmin atan2 lerp addcmul addcdiv
    masked_fill dropout alpha_dropout bernoulli rand_like randn_like randint_like zeros_like ones_like full_like
    empty_like normal uniform exponential fill zero copy
    float half bfloat16 double int long bool contiguous clone detach real imag conj conj_physical resolve_conj angle
    polar complex
    """
)
_REDUCTIONS = operation_names("prod any all nansum nanmean median count_nonzero")
RULES: dict[str, Rule] = {
    **dict.fromkeys(POINTWISE, elementwise.pointwise),
    **dict.fromkeys(["max", "min"], either(elementwise.extreme, logits.extreme)),
    **dict.fromkeys(["to", "type_as", "type"], elementwise.cast),
    "where": elementwise.where,
    **dict.fromkeys(["softmax", "log_softmax"], either(along_dims.along(1), logits.softmax)),
    **dict.fromkeys(["softmin", "cumsum", "cumprod", "logcumsumexp"], along_dims.along(1)),
    **dict.fromkeys(["sort", "argsort"], along_dims.along(1, default=-1)),
    "topk": along_dims.along(2, default=-1),
    "normalize": either(along_dims.along(2, default=1), across.directions),
    "flip": along_dims.along(1, "dims"),
    "roll": along_dims.along(2, "dims"),
    "index_select": along_dims.along(1),
    **dict.fromkeys(["layer_norm", "rms_norm"], either(along_dims.normalise, across.normalise)),
    "group_norm": along_dims.group_norm,
    **dict.fromkeys(_REDUCTIONS, along_dims.reduce),
    **dict.fromkeys(["amax", "amin", "argmax", "argmin"], either(along_dims.reduce, logits.extreme)),
    "logsumexp": either(along_dims.reduce, logits.logsumexp),
    "gather": logits.gather,
    "nll_loss": logits.nll_loss,
    "kl_div": logits.kl_div,
    **dict.fromkeys(["sum", "mean"], either(along_dims.reduce, across.total)),
    **dict.fromkeys(["var", "std", "var_mean", "std_mean"], either(along_dims.spread, across.spread)),
    **dict.fromkeys(["norm", "vector_norm", "linalg_vector_norm"], either(along_dims.norm, across.length)),
    **dict.fromkeys(["tril", "triu"], along_dims.triangle),
    "pad": along_dims.pad,
    "glu": parts.glu,
    "view_as_complex": views.complex_view(1),
    "view_as_real": views.complex_view(-1),
    **dict.fromkeys(["view", "reshape"], views.view),
    **dict.fromkeys(["view_as", "reshape_as"], views.view_like),
    "flatten": views.flatten,
    "unflatten": views.unflatten,
    "unsqueeze": views.unsqueeze,
    "squeeze": views.squeeze,
    **dict.fromkeys(["transpose", "swapaxes", "swapdims"], views.transpose),
    "permute": views.permute,
    **dict.fromkeys(["movedim", "moveaxis"], views.move),
    **dict.fromkeys(["t", "T", "mT"], views.reverse),
    **dict.fromkeys(["split", "split_with_sizes", "chunk", "tensor_split"], parts.split),
    "unbind": parts.unbind,
    "select": parts.select,
    "narrow": parts.narrow,
    "__getitem__": indexing.getitem,
    "__setitem__": indexing.setitem,
    **dict.fromkeys(["cat", "concat", "concatenate"], joining.cat),
    "stack": joining.stack,
    **dict.fromkeys(["expand", "broadcast_to"], joining.expand),
    "expand_as": joining.expand_like,
    **dict.fromkeys(["repeat", "tile"], joining.repeat),
    "repeat_interleave": joining.repeat_interleave,
    **dict.fromkeys(["matmul", "__matmul__", "__rmatmul__", "bmm", "mm", "mv"], products.matmul),
    **dict.fromkeys(["baddbmm", "addmm"], products.add_matmul),
    "linear": products.linear,
    **dict.fromkeys(["outer", "ger"], products.outer),
    "einsum": products.einsum,
    "scaled_dot_product_attention": attention.attention,
}
