"""Models and devices of plain numbers, to plan for."""

from __future__ import annotations

from dataclasses import replace

from ostinato.plan.device.gpu_catalogue import DeviceSpec
from ostinato.plan.graphs.arena import CallTrace, TraceCall
from ostinato.plan.layer_specs import AttentionSpec, LayerSpec, VisionSpec
from ostinato.plan.memory.graph_memory import Capture
from ostinato.plan.mixers import Mamba2Spec
from ostinato.plan.model import DrafterSpec, ModelSpec
from ostinato.plan.rope import RopeSpec
from ostinato.plan.weights import Weight

MIB = 2**20
GIB = 2**30

TAPES = Capture("tape", frozenset(("attention", "state")))
CUDA_GRAPHS = Capture("cuda", frozenset(("attention", "state")), gathers_states=True)

ATTENTION = AttentionSpec(num_heads=8, num_kv_heads=2, head_dim=64)
"""256 elements of keys and values per token."""
MAMBA2 = Mamba2Spec(num_heads=16, head_dim=64, state_size=128, num_groups=1, conv_kernel=4, chunk_size=128)
"""Conv state 3 x 1280 elements, SSM state 131,072 elements."""


VISION = VisionSpec(
    hidden_size=128,
    num_layers=4,
    num_heads=4,
    intermediate_size=512,
    patch_size=16,
    temporal_patch_size=2,
    merge_size=2,
    in_channels=3,
    out_hidden_size=512,
    num_positions=256,
    deepstack_layers=(1, 2),
    weights=(
        Weight((1_500_000 - 128 * 512 - 128 * 384,), "norm"),
        Weight((512, 128), "linear"),
        Weight((384, 128), "linear"),
    ),
    calls=CallTrace(
        (TraceCall("linear", 4 * 128, "model", ()), TraceCall("stack", 3 * 512, "model", (0,))), 1, entries=4
    ),
    image_token_id=10,
    video_token_id=11,
    start_token_id=12,
    end_token_id=13,
)
"""Tokens of 32 x 32 pixels, of 3 x 512 elements each."""


def weights(parameters: int, float32: int = 0) -> tuple[Weight, ...]:
    """So many parameters in the model's dtype, and in float32."""
    return Weight((parameters,), "norm"), Weight((float32,), "per_head", in_float32=True)


def calls(*widths: int) -> CallTrace:
    """Results of so many elements per token, each computed from the one before."""
    chain = (TraceCall("linear", width, "model", () if i == 0 else (i - 1,)) for i, width in enumerate(widths))
    return CallTrace(tuple(chain), len(widths) - 1)


def attention_layer(attention: AttentionSpec = ATTENTION, parameters: int = 1_000_000) -> LayerSpec:
    return LayerSpec("attention", attention, activation_elements=2 * 512 + 256, weights=weights(parameters))


def mamba2_layer(mamba2: Mamba2Spec = MAMBA2, parameters: int = 3_000_000) -> LayerSpec:
    width = mamba2.in_proj_size + mamba2.conv_dim
    return LayerSpec("mamba2", None, mamba2, activation_elements=width, weights=weights(parameters, 48))


def mlp_layer(parameters: int = 2_000_000) -> LayerSpec:
    return LayerSpec("mlp", activation_elements=2 * 2048, weights=weights(parameters))


def model(
    *layers: LayerSpec,
    dtype: str = "bfloat16",
    vocab_size: int = 1000,
    max_position_embeddings: int | None = 4096,
    ssm_state_dtype: str | None = None,
    rope: RopeSpec | None = None,
) -> ModelSpec:
    return ModelSpec(
        architecture="nemotron_h",
        calls=calls(512, *(width for layer in layers for width in (512, layer.activation_elements, 512))),
        dtype=dtype,
        vocab_size=vocab_size,
        hidden_size=512,
        max_position_embeddings=max_position_embeddings,
        tied_embeddings=False,
        layers=layers,
        weights=(*weights((vocab_size + 1) * 512), Weight((vocab_size, 512), "linear", is_lm_head=True)),
        ssm_state_dtype=ssm_state_dtype,
        rope=rope,
        ops=("linear", "rms_norm"),
        hyperparameters=None,
    )


def hybrid(**changes: object) -> ModelSpec:
    """Four state layers, two of attention and two MLPs."""
    layers = (mamba2_layer(), mlp_layer(), mamba2_layer(), attention_layer()) * 2
    return model(*layers, **changes)  # type: ignore[arg-type]


def with_head(spec: ModelSpec, *layers: LayerSpec) -> ModelSpec:
    """The model with a prediction head: by default a layer of attention and an MLP, and 700,000 parameters outside."""
    layers = layers or (attention_layer(), mlp_layer())
    ops = ("attention", "linear", "rms_norm", "token_shift")
    widths = [width for layer in layers for width in (512, layer.activation_elements, 512)]
    step = calls(*(call.elements for call in spec.calls.calls), *widths)
    head = DrafterSpec(
        "mtp", layers, spec.hidden_size, weights(700_000), ops, calls=calls(512, *widths), step_calls=step
    )
    return replace(spec, head=head)


def with_vision(spec: ModelSpec, vision: VisionSpec = VISION) -> ModelSpec:
    """The model with an encoder of images."""
    return replace(spec, vision=vision, ops=(*spec.ops, "axial_angles", "encoder_attention", "layer_norm", "rotate"))


def gpu(memory_bytes: int) -> DeviceSpec:
    return DeviceSpec("gpu", "cuda", memory_bytes, 100, None, None, "a test")


def cpu(memory_bytes: int, cores: int = 4) -> DeviceSpec:
    return DeviceSpec("cpu", "cpu", memory_bytes, cores, None, None, "a test")
