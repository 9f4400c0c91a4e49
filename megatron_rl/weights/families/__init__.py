"""The supported model families, one file each. To add one, write a file here and add it to both lists below."""

from megatron_rl.weights.families import (
    deepseek_v3,
    gemma3,
    glm4_moe,
    gpt_oss,
    llama,
    minimax_m2,
    mistral,
    mixtral,
    olmo,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_moe,
    qwen3_next,
    seed_oss,
)
from megatron_rl.weights.family import Family

FAMILIES: dict[str, Family] = {
    module.FAMILY.name: module.FAMILY
    for module in (
        deepseek_v3,
        gemma3,
        glm4_moe,
        gpt_oss,
        llama,
        minimax_m2,
        mistral,
        mixtral,
        olmo,
        phi3,
        qwen2,
        qwen3,
        qwen3_5,
        qwen3_moe,
        qwen3_next,
        seed_oss,
    )
}
"""Family name, as in `Architecture.family` -> Family."""
