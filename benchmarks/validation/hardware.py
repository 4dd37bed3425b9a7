"""The machines and models of published runs. What the presets lack is stated here, with its source."""

from __future__ import annotations

from functools import cache
from typing import Any

from benchmarks.validation.runs import Run
from rlflow.cluster import presets
from rlflow.cluster.presets.architecture import Architecture, architecture
from rlflow.cluster.spec import Cluster, Host
from rlflow.cost.dimensions import Dimensions, dimensions
from rlflow.cost.knobs import Calibration, calibration
from rlflow.cost.machine import Device, Machine, machine

DEVICES = {
    "Ascend 910C": "ascend_910c",
    "Ascend 910B": "ascend_910b",
    "H100": "h100",
    "H800": "h800",
    "H200": "h200",
    "H20": "h20",
    "A100": "a100",
    "GB200": "gb200",
}
HOST_DEVICES = {"ascend_910c": 16, "gb200": 4}
"""Where it is not 8."""
SUPERNODES = {"ascend_910c": 384, "gb200": 72}
"""Devices that one scale-up network joins: a CloudMatrix has more than any run uses, an NVL72 rack 72."""

# H20 and GB200: data sheets; a die of GB200 with 186 GB at 8 TB/s, 2.5 PFLOP/s dense, NVLink 900 GB/s a direction.
MISSING: dict[str, dict[str, Any]] = {
    "h20": {
        "scaleout_bytes_per_s": 50e9,
        "host_read_bytes_per_s": 64e9,
        "host_write_bytes_per_s": 64e9,
    },
    "gb200": {
        "vendor": "nvidia",
        "peak_bf16_flop_per_s": 2500e12,
        "hbm_bytes": 186_000_000_000,
        "hbm_bytes_per_s": 8e12,
        "scaleup_bytes_per_s": 900e9,
        "scaleout_bytes_per_s": 50e9,
        "host_read_bytes_per_s": 225e9,
        "host_write_bytes_per_s": 225e9,
    },
}

_QWEN = {
    "kind": "dense",
    "attention": "gqa",
    "norms_per_layer": 2,
    "head_dim": 128,
    "qkv_bias": True,
    "qk_norm": False,
}
# Their published config files; the Megatron GPTs from arXiv 2205.05198, Table 3.
MODELS: dict[str, dict[str, Any]] = {
    "qwen2_5_1_5b": _QWEN
    | {
        "num_layers": 28,
        "hidden_size": 1536,
        "ffn_hidden_size": 8960,
        "vocab_size": 151936,
        "tie_word_embeddings": True,
        "num_attention_heads": 12,
        "num_key_value_heads": 2,
    },
    "qwen2_5_14b": _QWEN
    | {
        "num_layers": 48,
        "hidden_size": 5120,
        "ffn_hidden_size": 13824,
        "vocab_size": 152064,
        "tie_word_embeddings": False,
        "num_attention_heads": 40,
        "num_key_value_heads": 8,
    },
}


def gpt(hidden: int, layers: int, heads: int) -> dict[str, Any]:
    """f = 4h without a gate, every head its own keys, dropout."""
    return {
        "kind": "dense",
        "attention": "gqa",
        "num_layers": layers,
        "hidden_size": hidden,
        "ffn_hidden_size": 4 * hidden,
        "ffn_matrices": 2,
        "dropout": True,
        "norms_per_layer": 2,
        "vocab_size": 51200,
        "tie_word_embeddings": True,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": hidden // heads,
        "qkv_bias": False,
        "qk_norm": False,
    }


MODELS |= {
    "gpt_22b": gpt(6144, 48, 64),
    "gpt_175b": gpt(12288, 96, 96),
    "gpt_530b": gpt(20480, 105, 128),
    "gpt_1t": gpt(25600, 128, 160),
}
NAMES = {
    "DeepSeek-R1-671B": "deepseek_v3_671b",
    "DeepSeek-V3-671B": "deepseek_v3_671b",
    "DeepSeek-V3": "deepseek_v3_671b",
    "Qwen3-235B-A22B": "qwen3_235b_a22b",
    "Qwen3-30B-A3B": "qwen3_30b_a3b",
    "Qwen3-30B-A3B-Base": "qwen3_30b_a3b",
    "Qwen3-8B": "qwen3_8b",
    "Qwen3-32B": "qwen3_32b",
    "Qwen2.5-7B": "qwen2_5_7b",
    "Qwen2.5-Math-7B": "qwen2_5_7b",
    "Qwen2.5-32B": "qwen2_5_32b",
    "R1-Distill-Qwen-1.5B": "qwen2_5_1_5b",
    "R1-Distill-Qwen-7B": "qwen2_5_7b",
    "R1-Distill-Qwen-14B": "qwen2_5_14b",
    "R1-Distill-Qwen-32B": "qwen2_5_32b",
    "Megatron GPT 22B": "gpt_22b",
    "Megatron GPT 175B": "gpt_175b",
    "Megatron GPT 530B": "gpt_530b",
    "Megatron GPT 1T": "gpt_1t",
}


@cache
def model_named(name: str) -> Dimensions | None:
    """The sizes of a model as a source calls it; None where its architecture is not known here."""
    if name not in NAMES:
        return None
    preset = NAMES[name]
    return dimensions(Architecture(preset, MODELS[preset]) if preset in MODELS else architecture(preset))


def device_of(run: Run) -> Device:
    """ValueError for a device that has no facts here."""
    name = DEVICES.get(run.text["device"])
    if name is None:
        raise ValueError(f"row {run.id}: no facts of the device {run.text['device']}; known: {', '.join(DEVICES)}")
    facts = {} if name == "gb200" else presets.device(name)
    return Device(name, facts | MISSING.get(name, {}))


def units(run: Run) -> int:
    """Logical devices of one unit of the counts: a card of the 910C is two dies."""
    return 2 if "2 dies" in run.text["device_unit"] else 1


def machine_of(run: Run, devices: int, tuned: Calibration | None = None) -> Machine:
    """So many logical devices of a run, hosts filled one after the other."""
    device = device_of(run)
    return _machine(device, devices, tuned or calibration(device.family))


@cache
def _machine(device: Device, devices: int, tuned: Calibration) -> Machine:
    each = min(devices, HOST_DEVICES.get(device.name, 8))
    joined = SUPERNODES.get(device.name)
    hosts = tuple(
        Host(f"h{i}", device.name, each, supernode=f"s{i * each // joined}" if joined else None)
        for i in range(-(-devices // each))
    )
    if joined:
        # A rack that is only partly used must not count as the smallest one.
        hosts = hosts[: max(1, joined // each)] if len(hosts) * each > joined else hosts
    return machine(Cluster("published", hosts), device=device, tuned=tuned)
