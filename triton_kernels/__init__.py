# SPDX-License-Identifier: Apache-2.0
"""Every data-parallel primitive of the project, in a plain reference form and a fast form per device.

Installed as `delta_wire.kernels`. vLLM looks for a top-level module called `triton_kernels` and takes any module of
that name for a library it knows, so this folder refuses to be imported under its folder name.

Letters: `N` elements of a tensor, `K` changed elements. Bits are bf16 bit patterns held in 16-bit integers.
"""

if __name__ == "triton_kernels":
    raise ImportError(
        "this folder is installed as 'delta_wire.kernels' and must not be imported as 'triton_kernels': vLLM would "
        "take it for another library. Install the project with 'pip install .' and start programs from another folder."
    )

from delta_wire.kernels.coding import (
    apply_steps,
    class_counts,
    class_ranks,
    class_select,
    decode_steps,
    encode_steps,
    rice_decode,
    rice_encode,
)
from delta_wire.kernels.devices import bound_cores, keep_off, unbind_thread, use_huge_pages
from delta_wire.kernels.dispatch import (
    digest_dense,
    digest_sparse,
    extract,
    extract_many,
    gather,
    lanes_to_ints,
    round_bits,
    scatter,
    swap,
    warm_up,
)
from delta_wire.kernels.replacement import Change, OutsideError, Replacements, replacements

__all__ = [
    "Change",
    "OutsideError",
    "Replacements",
    "apply_steps",
    "bound_cores",
    "class_counts",
    "class_ranks",
    "class_select",
    "decode_steps",
    "digest_dense",
    "digest_sparse",
    "encode_steps",
    "extract",
    "extract_many",
    "gather",
    "keep_off",
    "lanes_to_ints",
    "replacements",
    "rice_decode",
    "rice_encode",
    "round_bits",
    "scatter",
    "swap",
    "unbind_thread",
    "use_huge_pages",
    "warm_up",
]
