"""Write tiny Qwen3 and DeepSeek-V3 models, and data for the jobs of tools/frameworks.py.

Runs in the environment of a framework, so its transformers saves the models: python tiny_models.py
DIR
"""

import json
import random
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

WORDS = ["tensor", "rank", "learns", "gradient", "from", "small", "data", "and", "large", "text"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
)


def tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and ChatML's."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {character: index for index, character in enumerate(alphabet)}
    bytes_alone = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytes_alone.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytes_alone.decoder = decoders.ByteLevel()
    found = PreTrainedTokenizerFast(
        tokenizer_object=bytes_alone,
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        additional_special_tokens=["<|im_start|>"],
    )
    found.chat_template = TEMPLATE
    return found


def write(folder: Path) -> None:
    """Three models, ``sft``, ``pt`` and ``rlhf.jsonl``, and ``sft.parquet``."""
    tokens = tokenizer()
    sizes = {
        "vocab_size": 320,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 512,
        "tie_word_embeddings": False,
        "initializer_range": 0.1,
        "eos_token_id": tokens.eos_token_id,
        "pad_token_id": tokens.pad_token_id,
    }
    experts = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "norm_topk_prob": True,
        "router_aux_loss_coef": 0.0,
    }
    torch.manual_seed(1)
    dense = Qwen3ForCausalLM(Qwen3Config(**sizes))
    moe = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **experts))
    latent = {
        "num_key_value_heads": 4,
        "q_lora_rank": 32,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "num_nextn_predict_layers": 0,
        # In published files of the model; transformers does not read them, bridges do.
        "scoring_func": "sigmoid",
        "topk_method": "noaux_tc",
    }
    mla = DeepseekV3ForCausalLM(DeepseekV3Config(**{**sizes, **latent, "head_dim": 8}))
    for name, model in {"dense": dense, "moe": moe, "mla": mla}.items():
        model.save_pretrained(folder / name)
        tokens.save_pretrained(folder / name)
    random.seed(1)
    lines: dict[str, list[str]] = {"sft": [], "pt": [], "rlhf": []}
    for _ in range(64):
        question, good, bad = (
            " ".join(random.choices(WORDS, k=random.randint(2, 5))) for _ in range(3)
        )
        answer = {"role": "assistant", "content": good}
        chat = [{"role": "user", "content": question}, answer]
        lines["sft"].append(json.dumps({"messages": chat}))
        lines["pt"].append(json.dumps({"messages": [answer]}))
        lines["rlhf"].append(json.dumps({"messages": chat, "rejected_response": bad}))
    for name, texts in lines.items():
        (folder / f"{name}.jsonl").write_text("\n".join(texts) + "\n", encoding="utf-8")
    table = pyarrow.Table.from_pylist([json.loads(line) for line in lines["sft"]])
    pyarrow.parquet.write_table(table, folder / "sft.parquet")


if __name__ == "__main__":
    write(Path(sys.argv[1]))
