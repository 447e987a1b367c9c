"""How far numbers may lie apart that should be equal, relative to the expected ones."""

#: Losses and gradient norms of known runs (conformance/golden.json), by the dtype computed in.
#: Other processors and numbers of threads move the last bits of a sum; twenty steps multiply that.
GOLDEN = {"float32": 2e-5, "bfloat16": 5e-3, "float16": 2e-3}
