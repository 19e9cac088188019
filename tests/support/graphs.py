"""Generated graphs for tests of combined requests: their rows are independent, or they interact.

A recipe is a graph in ONNX's text form, with `{e}` for the element type and `{k}` for the number of
columns. Each recipe gives a graph for each of its types and widths.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx

OPSET = 17
SINGLES = (("float", 4), ("float", 13))
FLOATS = (("float", 4), ("float", 13), ("double", 3))
HALVES = (*FLOATS, ("float16", 5))
INTEGERS = (("int64", 3), ("int32", 6))
MIXED = (*FLOATS, ("int64", 3))

RARE_SHARE = 0.1
"""Of the elements of a request with rare values."""

IO = "g ({e}[n,{k}] x) => ({e}[n,{k}] y)"
"""The usual input and output."""

Variants = tuple[tuple[str, int], ...]


class Recipe(NamedTuple):
    """A graph of any element type and width.

    Attributes:
        text: The body, or the whole graph if it begins with `g (`.
        relation: What is true of its rows: `independent`, `dependent`, `approximate`, `constant` if
            an output is the same for all rows, `filter` if there are other results than rows,
            `unrepeatable` if two runs differ.
        rows: The fixed first axis; 0: open.
    """

    text: str
    relation: str
    variants: Variants = FLOATS
    rows: int = 0


class Generated(NamedTuple):
    """One graph.

    Attributes:
        inputs: Name, element type and shape of a row of each input.
    """

    name: str
    model: onnx.ModelProto
    inputs: tuple[tuple[str, type, tuple[int, ...]], ...]
    recipe: Recipe

    def save(self, folder: Path) -> Path:
        """Write the graph as `folder/model.onnx`."""
        folder.mkdir(parents=True)
        onnx.save(self.model, folder / "model.onnx")
        return folder

    def feeds(
        self, rows: int, magnitude: float, random: np.random.Generator
    ) -> dict[str, np.ndarray]:
        """Values of `rows` rows, of about this magnitude.

        Recipes of rare values have ten times as many rows, some with such values if the magnitude
        is above 1.
        """
        is_rare = any(self.recipe is each for each in RARE.values())
        count = 10 * rows if is_rare else rows
        feeds = {
            name: _values(dtype, (count, *shape), magnitude, random)
            for name, dtype, shape in self.inputs
        }
        if is_rare and magnitude > 1:
            return {name: _with_rare_values(array, random) for name, array in feeds.items()}
        return feeds


INDEPENDENT = {
    # Elementwise operators.
    "add": Recipe("y = Add(x, x)", "independent", (*HALVES, *INTEGERS)),
    "affine": Recipe("y0 = Mul(x, x) y = Sub(y0, x)", "independent", (*HALVES, *INTEGERS)),
    "tanh": Recipe("a = Tanh(x) b = Sigmoid(a) y = Add(a, b)", "independent", HALVES),
    "exp": Recipe("c = Constant<value_float = 0.01>() c2 = CastLike(c, x) s = Mul(x, c2) y = "
                  "Exp(s)",
                  "independent"),
    "log": Recipe("a = Abs(x) one = Constant<value_float = 1.0>() o = CastLike(one, x) "
                  "b = Add(a, o) y = Log(b)", "independent"),
    "sqrt": Recipe("a = Abs(x) y = Sqrt(a)", "independent", HALVES),
    "erf": Recipe("y = Erf(x)", "independent", SINGLES),
    "relu": Recipe("a = Relu(x) n1 = Neg(x) b = Relu(n1) y = Max(a, b)", "independent", HALVES),
    "where": Recipe("z = Constant<value_float = 0.0>() z0 = CastLike(z, x) c = Greater(x, z0) "
                    "n1 = Neg(x) y = Where(c, x, n1)", "independent", MIXED),
    "round": Recipe("a = Round(x) b = Floor(x) y = Sub(a, b)", "independent"),
    "sign": Recipe("y = Sign(x)", "independent", MIXED),
    "clip": Recipe("lo = Constant<value_float = -1.0>() hi = Constant<value_float = 2.0>() "
                   "l = CastLike(lo, x) h = CastLike(hi, x) y = Clip(x, l, h)", "independent",
                                                                                MIXED),
    "sin": Recipe("a = Atan(x) y = Sin(a)", "independent", SINGLES),
    "not": Recipe("g (bool[n,{k}] x) => (bool[n,{k}] y) {{ y = Not(x) }}", "independent",
                  (("bool", 1), ("bool", 9))),
    "compare": Recipe("g ({e}[n,{k}] x, {e}[n,{k}] z) => (bool[n,{k}] y) {{ y = Less(x, z) }}",
                      "independent", MIXED),
    "two-inputs": Recipe("g ({e}[n,{k}] x, {e}[n,{k}] z) => ({e}[n,{k}] y, {e}[n,{k}] w) "
                         "{{ y = Mul(x, z) w = Sub(x, z) }}", "independent", (*HALVES, *INTEGERS)),
    "vector": Recipe("g ({e}[n] x) => ({e}[n] y) {{ y = Add(x, x) }}", "independent",
                     (("float", 1), ("int64", 1))),
    "vector-log": Recipe("g ({e}[n] x) => ({e}[n] y) {{ a = Mul(x, x) one = Constant<value_float "
                         "= 1.0>() "
                         "o = CastLike(one, x) b = Add(a, o) y = Log(b) }}", "independent",
                         (("float", 1), ("double", 1))),
    # Operators along a row.
    "mean-columns": Recipe("m = ReduceMean<axes = [1], keepdims = 1>(x) y = Sub(x, m)",
                           "independent"),
    "max-columns": Recipe("m = ReduceMax<axes = [1], keepdims = 1>(x) y = Sub(x, m)",
                          "independent", (*FLOATS, *INTEGERS)),
    "norm-columns": Recipe("y = LpNormalization<axis = 1, p = 2>(x)", "independent"),
    "softmax-columns": Recipe("y = Softmax<axis = 1>(x)", "independent", HALVES),
    "log-softmax-columns": Recipe("y = LogSoftmax<axis = -1>(x)", "independent"),
    "hardmax-columns": Recipe("y = Hardmax<axis = 1>(x)", "independent", SINGLES),
    "cumsum-columns": Recipe("i = Constant<value_int = 1>() y = CumSum(x, i)", "independent",
                             (*FLOATS, *INTEGERS)),
    "argmax-columns": Recipe("g ({e}[n,{k}] x) => (int64[n] y) "
                             "{{ y = ArgMax<axis = 1, keepdims = 0>(x) }}", "independent"),
    "sort-columns": Recipe("o = Constant<value_ints = [{k}]>() y, i = TopK<axis = 1>(x, o)",
                           "independent", (*FLOATS, *INTEGERS)),
    "reverse-columns": Recipe("s = Constant<value_ints = [-1]>() e = Constant<value_ints = "
                              "[-1000]>() "
                              "i = Constant<value_ints = [1]>() y = Slice(x, s, e, i, s)",
                              "independent", (*FLOATS, *INTEGERS)),
    "gather-columns": Recipe("i = Constant<value_ints = [1, 0, 1]>() "
                             "u = Constant<value_ints = [1]>() g0 = Gather<axis = 1>(x, i) "
                             "m = ReduceSum<keepdims = 1>(g0, u) y = Add(x, m)", "independent"),
    "pad-columns": Recipe("p = Constant<value_ints = [0, 1, 0, 1]>() w = Pad(x, p) "
                          "s = Constant<value_ints = [0]>() e = Constant<value_ints = [{k}]>() "
                          "a = Constant<value_ints = [1]>() y = Slice(w, s, e, a)", "independent"),
    "layer-norm": Recipe("g (float[n,4] x) => (float[n,4] y) "
                         "<float[4] w = {{1, 2, 3, 4}}, float[4] b = {{0, 1, 0, -1}}> "
                         "{{ y = LayerNormalization<axis = -1>(x, w, b) }}", "independent",
                         (("float", 4),)),
    "dense": Recipe("g (float[n,3] x) => (float[n,2] y) "
                    "<float[3,2] w = {{0.5, -1, 2, 0.25, -0.75, 1}}, float[2] b = {{0.1, -0.2}}> "
                    "{{ h = Gemm(x, w, b) y = Tanh(h) }}", "independent", (("float", 3),)),
    "dense-softmax": Recipe("g (double[n,3] x) => (double[n,2] y) "
                            "<double[3,2] w = {{0.5, -1, 2, 0.25, -0.75, 1}}> "
                            "{{ h = MatMul(x, w) y = Softmax<axis = -1>(h) }}", "independent",
                            (("double", 3),)),
    "conv": Recipe("g (float[n,1,8] x) => (float[n,1,6] y) <float[1,1,3] w = {{1, -2, 0.5}}> "
                   "{{ y = Conv(x, w) }}", "independent", (("float", 8),)),
    "max-pool": Recipe("g (float[n,1,8] x) => (float[n,1,4] y) "
                       "{{ y = MaxPool<kernel_shape = [2], strides = [2]>(x) }}", "independent",
                       (("float", 8),)),
    "lookup": Recipe("g (int64[n] x) => (float[n,2] y) "
                     "<float[4,2] t = {{1, 2, 3, 4, 5, 6, 7, 8}}, int64 four = {{4}}> "
                     "{{ i = Mod(x, four) y = Gather(t, i) }}", "independent", (("int64", 1),)),
    "lookup-any": Recipe("g (int64[n,2] x) => (float[n,2] y) "
                         "<float[8] t = {{1, 2, 3, 4, 5, 6, 7, 8}}, int64 eight = {{8}}> "
                         "{{ i = Mod(x, eight) y = Gather(t, i) }}", "independent", (("int64",
                                                                                      1),)),
    "one-hot": Recipe("g (int64[n] x) => (float[n,5] y) "
                      "<int64 five = {{5}}, float[2] v = {{0, 1}}> "
                      "{{ i = Mod(x, five) y = OneHot(i, five, v) }}", "independent", (("int64",
                                                                                        1),)),
    "gather-elements": Recipe("g ({e}[n,{k}] x) => ({e}[n,1] y) {{ i = ArgMax<axis = 1>(x) "
                              "y = GatherElements<axis = 1>(x, i) }}", "independent"),
    "scan-columns": Recipe(
        "g (float[n,5] x) => (float[n,5] y) {{ one = Constant<value_ints = [1]>() "
        "z = ReduceSum<keepdims = 0>(x, one) zero = Sub(z, z) "
        "last, y = Scan<num_scan_inputs = 1, scan_input_axes = [1], scan_output_axes = [1], "
        "body = b (float[m] s, float[m] c) => (float[m] t, float[m] o) "
        "{{ t = Add(s, c) o = Identity(t) }}>(zero, x) }}", "independent", (("float", 5),)),
    "lstm-columns": Recipe(
        "g (float[n,6] x) => (float[n,2] y) "
        "<float[1,8,1] w = {{0.1, 0.2, -0.3, 0.4, 0.5, -0.6, 0.7, 0.8}}, "
        "float[1,8,2] r = {{0.1, 0.2, -0.3, 0.4, 0.5, -0.6, 0.7, 0.8, "
        "0.1, 0.2, -0.3, 0.4, 0.5, -0.6, 0.7, 0.8}}> "
        "{{ t = Transpose<perm = [1, 0]>(x) two = Constant<value_ints = [2]>() "
        "u = Unsqueeze(t, two) all, h, c = LSTM<hidden_size = 2>(u, w, r) "
        "z = Constant<value_ints = [0]>() y = Squeeze(h, z) }}", "independent", (("float", 6),)),
    "loop-steps": Recipe(
        "g ({e}[n,{k}] x) => ({e}[n,{k}] y) {{ t = Constant<value_int = 3>() "
        "c = Constant<value = bool {{1}}>() "
        "y = Loop<body = b (int64 i, bool d, {e}[m,{k}] s) => (bool o, {e}[m,{k}] u) "
        "{{ o = Identity(d) u = Add(s, s) }}>(t, c, x) }}", "independent",
        (("float", 4), ("double", 3), ("int64", 3))),
    "loop-none": Recipe(
        "g ({e}[n,{k}] x) => ({e}[n,{k}] y) {{ t = Constant<value_int = 0>() "
        "c = Constant<value = bool {{1}}>() "
        "y = Loop<body = b (int64 i, bool d, {e}[m,{k}] s) => (bool o, {e}[m,{k}] u) "
        "{{ o = Identity(d) u = Add(s, s) }}>(t, c, x) }}", "independent",
        (("float", 4), ("double", 3), ("int64", 3))),
    # Outputs that need no operator, that share memory, or that are another's input.
    "same-output": Recipe("g ({e}[n,{k}] x) => ({e}[n,{k}] x, {e}[n,{k}] y) {{ y = Neg(x) }}",
                          "independent", (*HALVES, *INTEGERS)),
    "identity": Recipe("y = Identity(x)", "independent", (*HALVES, *INTEGERS, ("bool", 4))),
    "identities": Recipe("g ({e}[n,{k}] x) => ({e}[n,{k}] y, {e}[n,{k}] z) "
                         "{{ y = Identity(x) z = Identity(y) }}", "independent",
                         (*FLOATS, *INTEGERS, ("bool", 4))),
    "twice": Recipe("g ({e}[n,{k}] x) => ({e}[n,{k}] y, {e}[n,{k}] z) "
                    "{{ y = Add(x, x) z = Identity(y) }}", "independent", MIXED),
    "equal-nodes": Recipe("g ({e}[n,{k}] x) => ({e}[n,{k}] y, {e}[n,{k}] z) "
                          "{{ y = Add(x, x) z = Add(x, x) }}", "independent", MIXED),
    "reshape": Recipe("g ({e}[n,{k}] x) => ({e}[n,{k}] y, {e}[n,{k},1] z) "
                      "{{ y = Add(x, x) s = Constant<value_ints = [0, {k}, 1]>() z = Reshape(y, "
                      "s) }}",
                      "independent", MIXED),
    "reshape-input": Recipe("g ({e}[n,{k}] x) => ({e}[n,{k},1] z) "
                            "{{ s = Constant<value_ints = [0, {k}, 1]>() z = Reshape(x, s) }}",
                            "independent", MIXED),
    "flatten": Recipe("g ({e}[n,{k}] x) => ({e}[n,{k}] y) {{ y = Flatten<axis = 1>(x) }}",
                      "independent", MIXED),
    "cast-same": Recipe("z = Constant<value_int = 1>() z0 = CastLike(z, x) y0 = Mul(x, z0) "
                        "y = CastLike(y0, x)", "independent", MIXED),
    "dropout": Recipe("y, m = Dropout(x)", "independent"),
    "dropout-mask": Recipe("g (float[n,4] x) => (float[n,4] y, bool[n,4] m) {{ y, m = Dropout(x) "
                           "}}",
                           "constant", (("float", 4),)),
    "no-change": Recipe("o = Constant<value_float = 0.0>() z = CastLike(o, x) y = Add(x, z)",
                        "independent", MIXED),
    "if-pass": Recipe(
        "g ({e}[n,{k}] x) => ({e}[n,{k}] y) {{ c = Constant<value = bool {{1}}>() "
        "y = If<then_branch = t () => ({e}[n,{k}] a) {{ a = Identity(x) }}, "
        "else_branch = f () => ({e}[n,{k}] b) {{ b = Neg(x) }}>(c) }}", "independent",
        (("float", 4), ("double", 3))),
    "split": Recipe("g (float[n,4] x) => (float[n,2] y, float[n,2] z) "
                    "{{ y, z = Split<axis = 1>(x) }}", "independent", (("float", 4),)),
    "constant-column": Recipe("g ({e}[n,{k}] x) => ({e}[n,{k}] y) {{ s = Shape(x) "
                              "c = ConstantOfShape(s) d = CastLike(c, x) z = Sub(x, x) y = "
                              "Add(d, z) }}",
                              "constant", MIXED),
    "zeros-of-shape": Recipe("g (float[n,4] x) => (float[n,4] y, float[n,4] w) {{ s = Shape(x) "
                             "y = ConstantOfShape(s) w = Neg(x) }}", "constant", (("float",
                                                                                      4),)),
    "expand": Recipe("g (float[n,3] x) => (float[n,3] y, float[n,3] w) <float[1,3] c = {{1, 2, "
                     "3}}> "
                     "{{ s = Shape(x) y = Expand(c, s) w = Abs(x) }}", "constant",
                     (("float", 3),)),
    "scatter": Recipe("i = Constant<value_ints = [0]>() w = Gather<axis = 1>(x, i) j = "
                      "ArgMax<axis = 1>(x) "
                      "y = ScatterElements<axis = 1>(x, j, w)", "independent"),
}  # fmt: skip

DEPENDENT = {
    "mean-rows": Recipe("m = ReduceMean<axes = [0], keepdims = 1>(x) y = Sub(x, m)", "dependent"),
    "sum-rows": Recipe("a = Constant<value_ints = [0]>() m = ReduceSum<keepdims = 1>(x, a) "
                       "y = Add(x, m)", "dependent", (*FLOATS, *INTEGERS)),
    "max-rows": Recipe("m = ReduceMax<axes = [0], keepdims = 1>(x) y = Sub(x, m)", "dependent",
                       (*FLOATS, *INTEGERS)),
    "min-all": Recipe("m = ReduceMin<keepdims = 0>(x) y = Sub(x, m)", "dependent",
                      (*FLOATS, *INTEGERS)),
    "mean-all": Recipe("m = ReduceMean<keepdims = 0>(x) y = Sub(x, m)", "dependent"),
    "norm-rows": Recipe("y = LpNormalization<axis = 0, p = 2>(x)", "dependent"),
    "standardize": Recipe("m = ReduceMean<axes = [0], keepdims = 1>(x) d = Sub(x, m) q = Mul(d, d) "
                          "v = ReduceMean<axes = [0], keepdims = 1>(q) "
                          "o = Constant<value_float = 0.001>() e = CastLike(o, x) w = Add(v, e) "
                          "r = Sqrt(w) y = Div(d, r)", "dependent"),
    "softmax-rows": Recipe("y = Softmax<axis = 0>(x)", "dependent", HALVES),
    "log-softmax-rows": Recipe("y = LogSoftmax<axis = 0>(x)", "dependent"),
    "hardmax-rows": Recipe("y = Hardmax<axis = 0>(x)", "dependent", SINGLES),
    "cumsum-rows": Recipe("i = Constant<value_int = 0>() y = CumSum(x, i)", "dependent",
                          (*FLOATS, *INTEGERS)),
    "cumsum-backwards": Recipe("i = Constant<value_int = 0>() y = CumSum<reverse = 1>(x, i)",
                               "dependent"),
    "cumsum-exclusive": Recipe("i = Constant<value_int = 0>() y = CumSum<exclusive = 1>(x, i)",
                               "dependent"),
    "sort-rows": Recipe("s = Shape<start = 0, end = 1>(x) y, i = TopK<axis = 0>(x, s)", "dependent",
                        (*FLOATS, *INTEGERS)),
    "reverse-rows": Recipe("s = Constant<value_ints = [-1]>() e = Constant<value_ints = [-9999]>() "
                           "a = Constant<value_ints = [0]>() y = Slice(x, s, e, a, s)", "dependent",
                           (*FLOATS, *INTEGERS)),
    "shift-rows": Recipe("z = Constant<value_ints = [0]>() o = Constant<value_ints = [1]>() "
                         "l = Constant<value_ints = [9999]>() h = Slice(x, z, o, z) "
                         "t = Slice(x, o, l, z) y = Concat<axis = 0>(t, h)", "dependent",
                         (*FLOATS, *INTEGERS)),
    "first-row": Recipe("z = Constant<value_ints = [0]>() f = Gather<axis = 0>(x, z) y = Sub(x, f)",
                        "dependent", (*FLOATS, *INTEGERS)),
    "last-row": Recipe("z = Constant<value_ints = [-1]>() f = Gather<axis = 0>(x, z) y = Sub(x, f)",
                       "dependent", (*FLOATS, *INTEGERS)),
    "count": Recipe("s = Shape<start = 0, end = 1>(x) c = CastLike(s, x) y = Mul(x, c)",
                    "dependent", MIXED),
    "numbered": Recipe("g ({e}[n,{k}] x) => ({e}[n,{k}] y) {{ z = Constant<value_int = 0>() "
                       "o = Constant<value_int = 1>() s = Shape<start = 0, end = 1>(x) q = "
                       "Squeeze(s) "
                       "r = Range(z, q, o) u = Constant<value_ints = [1]>() v = Unsqueeze(r, u) "
                       "w = CastLike(v, x) y = Add(x, w) }}", "dependent", MIXED),
    "range-only": Recipe("g ({e}[n,{k}] x) => (int64[n] y) {{ z = Constant<value_int = 0>() "
                         "o = Constant<value_int = 1>() s = Shape<start = 0, end = 1>(x) "
                         "q = Squeeze(s) y = Range(z, q, o) }}", "dependent", (("float", 4),)),
    "attention": Recipe("t = Transpose<perm = [1, 0]>(x) p = MatMul(x, t) w = Softmax<axis = "
                        "-1>(p) "
                        "y = MatMul(w, x)", "dependent"),
    "conv-rows": Recipe("g (float[n,1] x) => (float[n,1] y) <float[1,1,3] w = {{1, -2, 0.5}}> "
                        "{{ t = Transpose<perm = [1, 0]>(x) z = Constant<value_ints = [0]>() "
                        "u = Unsqueeze(t, z) c = Conv<pads = [1, 1]>(u, w) q = Squeeze(c, z) "
                        "y = Transpose<perm = [1, 0]>(q) }}", "dependent", (("float", 1),)),
    "lstm-rows": Recipe(
        "g (float[n,1] x) => (float[n,2] y) "
        "<float[1,8,1] w = {{0.1, 0.2, -0.3, 0.4, 0.5, -0.6, 0.7, 0.8}}, "
        "float[1,8,2] r = {{0.1, 0.2, -0.3, 0.4, 0.5, -0.6, 0.7, 0.8, "
        "0.1, 0.2, -0.3, 0.4, 0.5, -0.6, 0.7, 0.8}}> "
        "{{ one = Constant<value_ints = [1]>() u = Unsqueeze(x, one) "
        "all, h, c = LSTM<hidden_size = 2>(u, w, r) q = Constant<value_ints = [1, 2]>() "
        "y = Squeeze(all, q) }}", "dependent", (("float", 1),)),
    "scan-rows": Recipe(
        "g (float[n,5] x) => (float[n,5] y) "
        "<float[5] zero = {{0, 0, 0, 0, 0}}> "
        "{{ last, y = Scan<num_scan_inputs = 1, "
        "body = b (float[5] s, float[5] c) => (float[5] t, float[5] o) "
        "{{ t = Add(s, c) o = Identity(t) }}>(zero, x) }}", "dependent", (("float", 5),)),
    "loop-rows": Recipe(
        "g (float[n,2] x) => (float[n,2] y) {{ s = Shape<start = 0, end = 1>(x) t = Squeeze(s) "
        "c = Constant<value = bool {{1}}>() "
        "y = Loop<body = b (int64 i, bool d, float[m,2] a) => (bool o, float[m,2] u) "
        "{{ o = Identity(d) h = Constant<value_float = 0.5>() u = Add(a, h) }}>(t, c, x) }}",
        "dependent", (("float", 2),)),
    "batch-norm": Recipe(
        "g (float[n,3] x) => (float[n,3] y) <float[3] o = {{1, 1, 1}}, float[3] z = {{0, 0, 0}}> "
        "{{ y, a, b = BatchNormalization<training_mode = 1>(x, o, z, z, o) }}", "unrepeatable",
        (("float", 3),)),
    "max-everywhere": Recipe("m = ReduceMax<keepdims = 0>(x) b = Constant<value_float = 100.0>() "
                             "l = CastLike(b, x) c = Greater(m, l) n1 = Neg(x) y = Where(c, n1, x)",
                             "dependent"),
    "any": Recipe("g (bool[n,{k}] x) => (bool[n,{k}] y) {{ i = Cast<to = 6>(x) "
                  "m = ReduceMax<axes = [0], keepdims = 1>(i) j = Add(i, m) k2 = Sub(j, m) "
                  "c = Equal(i, m) y = Or(c, x) }}", "dependent", (("bool", 3),)),
    "rank": Recipe("g (float[n] x) => (int64[n] y) {{ s = Shape(x) v, y = TopK<axis = 0>(x, s) }}",
                   "dependent", (("float", 1),)),
    "argmax-rows": Recipe("i = ArgMax<axis = 0>(x) r = GatherElements<axis = 0>(x, i) y = Sub(x, "
                          "r)",
                          "dependent"),
    "gather-nd": Recipe("z = Constant<value_ints = [0]>() u = Unsqueeze(z, z) f = GatherND(x, u) "
                        "y = Add(x, f)", "dependent", MIXED),
    "transpose": Recipe("g (float[4,4] x) => (float[4,4] y) {{ y = Transpose<perm = [1, 0]>(x) }}",
                        "dependent", (("float", 4),), 4),
    "filter": Recipe("g (float[n] x) => (int64[m,1] y) {{ z = NonZero(x) y = Transpose(z) }}",
                     "dependent", (("float", 1),)),
    "compress": Recipe("g (float[n] x) => (float[m] y) {{ o = Constant<value_float = 0.0>() "
                       "c = Greater(x, o) y = Compress<axis = 0>(x, c) }}", "filter",
                       (("float", 1),)),
    "unique": Recipe("g (float[n] x) => (float[m] y) {{ y = Unique<sorted = 1>(x) }}", "filter",
                     (("float", 1),)),
    "fixed-mean": Recipe("g (float[4,{k}] x) => (float[4,{k}] y) "
                         "{{ m = ReduceMean<axes = [0], keepdims = 1>(x) y = Sub(x, m) }}",
                         "dependent", (("float", 3), ("float", 8)), 4),
    "fixed-reverse": Recipe("g (float[3,{k}] x) => (float[3,{k}] y) "
                            "{{ i = Constant<value_ints = [2, 1, 0]>() y = Gather<axis = 0>(x, "
                            "i) }}",
                            "dependent", (("float", 3),), 3),
    "fixed-constant": Recipe("g (float[4,2] x) => (float[4,2] y, float[4,2] c) "
                             "<float[4,2] c = {{1, 2, 3, 4, 5, 6, 7, 8}}> {{ y = Neg(x) }}",
                             "dependent", (("float", 2),), 4),
    "fixed-identity-of-constant": Recipe(
        "g (float[4,2] x) => (float[4,2] y, float[4,2] d) "
        "<float[4,2] c = {{1, 2, 3, 4, 5, 6, 7, 8}}> {{ y = Neg(x) d = Identity(c) }}",
        "dependent", (("float", 2),), 4),
    "fixed-same": Recipe("g (float[4,{k}] x) => (float[4,{k}] y) {{ y = Tanh(x) }}", "independent",
                         (("float", 3), ("float", 8)), 4),
    "quantized": Recipe(
        "g (float[n,4] x) => (float[n,3] y) "
        "<int8[4,3] w = {{12, -7, 3, 45, 9, -88, 100, 2, -3, 17, 5, 66}}, float scale = {{0.02}}> "
        "{{ q, s, z = DynamicQuantizeLinear(x) i = MatMulInteger(q, w, z) "
        "f = Cast<to = 1>(i) t = Mul(s, scale) y = Mul(f, t) }}", "approximate", (("float", 4),)),
    "quantized-tanh": Recipe(
        "g (float[n,4] x) => (float[n,3] y) "
        "<int8[4,3] w = {{12, -7, 3, 45, 9, -88, 100, 2, -3, 17, 5, 66}}, float scale = {{0.002}}> "
        "{{ q, s, z = DynamicQuantizeLinear(x) i = MatMulInteger(q, w, z) "
        "f = Cast<to = 1>(i) t = Mul(s, scale) u = Mul(f, t) y = Tanh(u) }}", "approximate",
        (("float", 4),)),
    "quantized-static": Recipe(
        "g (float[n,4] x) => (float[n,4] y) <float s = {{0.1}}, uint8 z = {{128}}> "
        "{{ q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, s, z) }}", "independent",
        (("float", 4),)),
    "quantized-scale": Recipe(
        "g (float[n,4] x) => (float[n,4] y) "
        "{{ q, s, z = DynamicQuantizeLinear(x) y = DequantizeLinear(q, s, z) }}", "approximate",
        (("float", 4),)),
}  # fmt: skip

RARE = {
    # Rows that affect each other only with certain values, or in large batches.
    "impute-mean": Recipe("b = IsNaN(x) c0 = Constant<value_float = 0.0>() o = CastLike(c0, x) "
                          "g0 = Where(b, o, x) m = ReduceMean<axes = [0], keepdims = 1>(g0) y = "
                          "Where(b, m, x)",
                          "dependent"),
    "any-nan": Recipe("b = IsNaN(x) i = Cast<to = 6>(b) m = ReduceMax<keepdims = 0>(i) "
                      "f = CastLike(m, x) w = Mul(x, f) y = Sub(x, w)", "dependent"),
    "any-infinite": Recipe("b = IsInf(x) i = Cast<to = 6>(b) m = ReduceMax<keepdims = 0>(i) "
                           "f = CastLike(m, x) y = Add(x, f)", "dependent"),
    "max-above-a-million": Recipe(
        "m = ReduceMax<keepdims = 0>(x) b = Constant<value_float = 1000000.0>() "
        "l = CastLike(b, x) c = Greater(m, l) n1 = Neg(x) y = Where(c, n1, x)", "dependent"),
    "any-zero": Recipe("z = Sub(x, x) b = Equal(x, z) i = Cast<to = 6>(b) "
                       "m = ReduceMax<keepdims = 0>(i) f = CastLike(m, x) y = Add(x, f)",
                       "dependent", (("int64", 3), ("int32", 2))),
    "any-negative": Recipe("z = Sub(x, x) b = Less(x, z) i = Cast<to = 6>(b) "
                           "m = ReduceMax<keepdims = 0>(i) f = CastLike(m, x) y = Add(x, f)",
                           "dependent", (("int64", 3), ("int32", 2))),
    "longest": Recipe("g (int64[n,6] x) => (int64[n,6] y) {{ z = Sub(x, x) b = Greater(x, z) "
                      "i = Cast<to = 7>(b) a = Constant<value_ints = [1]>() "
                      "l = ReduceSum<keepdims = 0>(i, a) m = ReduceMax<keepdims = 0>(l) "
                      "y = Add(x, m) }}", "dependent", (("int64", 6),)),
    "lag-100": Recipe("g (float[n,2] x) => (float[n,2] y) {{ "
                      "p = Constant<value_ints = [100, 0, 0, 0]>() w = Pad(x, p) "
                      "s = Constant<value_ints = [0]>() e = Shape<start = 0, end = 1>(x) "
                      "v = Slice(w, s, e, s) y = Add(x, v) }}", "dependent", (("float", 2),)),
    "first-hundred": Recipe("g (float[n,2] x) => (float[n,2] y) {{ z = Constant<value_int = 0>() "
                            "o = Constant<value_int = 1>() s = Shape<start = 0, end = 1>(x) "
                            "q = Squeeze(s) r = Range(z, q, o) h = Constant<value_int = 100>() "
                            "b = Less(r, h) f = Cast<to = 1>(b) u = Constant<value_ints = [1]>() "
                            "v = Unsqueeze(f, u) y = Mul(x, v) }}", "dependent", (("float", 2),)),
    "first-of-equals": Recipe("g (int64[n] x) => (int64[n] y) {{ u, f, i, c = Unique<sorted = "
                              "1>(x) "
                              "y = Gather(c, i) }}", "dependent", (("int64", 1),)),
}  # fmt: skip

RECIPES = INDEPENDENT | DEPENDENT | RARE


def generated(first_only: bool = False) -> list[Generated]:
    """All graphs; or one of each recipe."""
    graphs = []
    for name, recipe in RECIPES.items():
        for element, width in recipe.variants[: 1 if first_only else None]:
            graphs.append(_generate(f"{name}-{element}-{width}", recipe, element, width))
    return graphs


def _generate(name: str, recipe: Recipe, element: str, width: int) -> Generated:
    text = recipe.text if recipe.text.startswith("g (") else f"{IO} {{{{ {recipe.text} }}}}"
    graph = onnx.parser.parse_graph(
        text.replace("{e}", element)
        .replace("{k}", str(width))
        .replace("{{", "{")
        .replace("}}", "}")
    )
    model = onnx.helper.make_model(
        graph, opset_imports=[onnx.helper.make_opsetid("", OPSET)], ir_version=10
    )
    inputs = tuple(_input(each) for each in graph.input)
    return Generated(name, model, inputs, recipe)


def _input(info: onnx.ValueInfoProto) -> tuple[str, type, tuple[int, ...]]:
    kind = info.type.tensor_type
    dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type).type
    return info.name, dtype, tuple(axis.dim_value for axis in kind.shape.dim[1:])


def _values(
    dtype: type, shape: tuple[int, ...], magnitude: float, random: np.random.Generator
) -> np.ndarray:
    if dtype is np.bool_:
        return random.random(shape) < 0.5
    if issubclass(dtype, np.integer):
        most = max(int(10 * magnitude), 2)
        return random.integers(0, most, shape).astype(dtype)
    return (random.standard_normal(shape) * magnitude).astype(dtype)


def _with_rare_values(array: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """Some elements are NaN, infinite, very large, zero or negative."""
    if array.dtype.kind == "f":
        rare = np.array([np.nan, np.inf, 1e9, 0.0], array.dtype)
    else:
        rare = np.array([0, 0, -1, -7], array.dtype)
    chosen = rare[random.integers(len(rare), size=array.shape)]
    return np.where(random.random(array.shape) < RARE_SHARE, chosen, array)
