"""Language models of KerasHub, in tiny configurations with random weights."""

import functools

import keras
import tensorflow as tf
from world.entry import (
    CLASSES,
    EXAMPLES,
    FAULT,
    SHARES,
    Entry,
    classes,
    cross_entropy,
    hub,
    squares,
    to_waves,
    tokens,
)

SMALL = {"vocabulary_size": 17, "num_layers": 2, "hidden_dim": 16, "intermediate_dim": 32}
TINY = SMALL | {"num_heads": 2}
GROUPED = SMALL | {"num_query_heads": 4, "num_key_value_heads": 2}
IDS, IDS_MASK = ("token_ids",), ("token_ids", "padding_mask")
IDS_SEGMENTS = ("token_ids", "segment_ids")
ALL = ("token_ids", "segment_ids", "padding_mask")
SHORT = {"max_sequence_length": 6}
MIXTURE = {
    "num_experts": 4,
    "moe_intermediate_dim": 16,
    "top_k": 2,
    "head_dim": 4,
    "decoder_sparse_step": 1,
    "norm_top_k_prob": True,
}


def entry(name, model, batch, **fields):
    """An entry of KerasHub."""
    return Entry(name, "KerasHub", model, batch, needs=("keras_hub",), **fields)


def classifier(name, prefix, inputs=IDS_MASK, task="TextClassifier", fields=(), **arguments):
    """A task that classifies texts; its constructor compiles it."""

    def model():
        backbone = hub(f"{prefix}Backbone", **TINY | {"dropout": 0.0} | arguments)
        return hub(f"{prefix}{task}", backbone=backbone, num_classes=CLASSES, dropout=0.0)

    def batch(random):
        return tokens(random, names=inputs), classes(random)

    return entry(name, model, batch, loss_fn=cross_entropy, **dict(fields))


def backbone(name, prefix, inputs=IDS_MASK, fields=(), size=TINY, **arguments):
    """A backbone without a task: its outputs are drawn to a number."""

    def model():
        return hub(f"{prefix}Backbone", **size, dropout=0.0, **arguments)

    def output(outputs):
        return outputs["sequence_output"] if isinstance(outputs, dict) else outputs

    batch = functools.partial(tokens, names=inputs)
    return entry(name, model, batch, loss=to_waves(output), **dict(fields))


def generator(name, prefix, fields=(), **arguments):
    """A causal language model, whose constructor compiles it; each token is predicted."""

    def model():
        parts = {"backbone": hub(f"{prefix}Backbone", **arguments), "preprocessor": None}
        return hub(f"{prefix}CausalLM", **parts)

    def batch(random):
        x = tokens(random)
        return x, random.integers(17, size=[EXAMPLES, 6]).astype("int32")

    return entry(name, model, batch, loss_fn=cross_entropy, **dict(fields))


def encoder_decoder(name, prefix, fields=(), **arguments):
    """An encoder and a decoder of texts."""

    def model():
        return hub(f"{prefix}Backbone", **TINY | {"dropout": 0.0} | arguments)

    def batch(random):
        parts = {side: tokens(random) for side in ("encoder", "decoder")}
        return {f"{side}_{key}": x for side, part in parts.items() for key, x in part.items()}

    loss = to_waves(lambda outputs: outputs["decoder_sequence_output"])
    return entry(name, model, batch, loss=loss, **dict(fields))


def whisper():
    """Speech to text."""

    def model():
        lengths = {"max_encoder_sequence_length": 6, "max_decoder_sequence_length": 6}
        return hub("WhisperBackbone", **TINY, **lengths, dropout=0.0)

    def batch(random):
        text = {f"decoder_{key}": x for key, x in tokens(random).items()}
        return text | {"encoder_features": random.normal(size=[EXAMPLES, 6, 80]).astype("float32")}

    return entry(
        "Whisper",
        model,
        batch,
        loss=to_waves(lambda outputs: outputs["decoder_sequence_output"]),
    )


def masked():
    """BERT's own task: some tokens are predicted, each with a weight."""

    def model():
        return hub("BertMaskedLM", backbone=hub("BertBackbone", **TINY, **SHORT, dropout=0.0))

    def batch(random):
        x = tokens(random, names=ALL)
        x["mask_positions"] = random.integers(6, size=[EXAMPLES, 2]).astype("int32")
        return (
            x,
            random.integers(17, size=[EXAMPLES, 2]).astype("int32"),
            random.integers(2, size=[EXAMPLES, 2]).astype("float32"),
        )

    def loss(model, batch, training, gather):
        del gather
        x, y, weights = batch
        probabilities = tf.cast(model(x, training=training), tf.float32)
        losses = keras.losses.sparse_categorical_crossentropy(y, probabilities, from_logits=True)
        return tf.reduce_mean(losses * weights, axis=1)

    return entry("BERT, masked words", model, batch, loss=loss)


def teacher():
    """A small model learns from a larger one, whose weights are not trained."""

    def model():
        student = hub("DistilBertBackbone", **TINY, **SHORT, dropout=0.0)
        large = hub("BertBackbone", **TINY | {"num_layers": 3}, **SHORT, dropout=0.0)
        large.trainable = False
        inputs = {**large.input}
        taught = large(inputs)["sequence_output"]
        learned = student({key: inputs[key] for key in IDS_MASK})
        return keras.Model(inputs, {"taught": taught, "learned": learned})

    def loss(model, batch, training, gather):
        del gather
        outputs = model(batch, training=training)
        return squares(outputs["learned"], outputs["taught"])

    return entry("DistilBERT, from BERT", model, functools.partial(tokens, names=ALL), loss=loss)


GEMMA = SMALL | {"num_query_heads": 4, "num_key_value_heads": 1, "head_dim": 4}
SLIDING = {"use_sliding_window_attention": True, "sliding_window_size": 4}
CI = {"in_ci": True}
MIXES = {"shares": True, "because": "mixes the examples that it sees together"}
RANGE = {
    "expected": {"float16": FAULT},
    "because": "makes a range of float16, which TensorFlow cannot",
}
ROUTER = {"replicas": SHARES, "microbatches": SHARES}
EXPERTS = {
    "expected": ROUTER | {"float16": FAULT},
    "because": "a router's loss of all of a share; experts multiply float16 by float32",
}
DECAY = {"expected": {"float16": FAULT}, "because": "NaN in float16 by itself"}
MASK = {"expected": {"float16": FAULT}, "because": "a mask beyond float16's range makes NaN"}
ELECTRA = {key.replace("vocabulary", "vocab"): size for key, size in TINY.items()}
RWKV = {"hidden_size": 16, "head_size": 4, "gate_lora": 8, "mv_lora": 8, "aaa_lora": 8}
FALCON = {key: TINY[key] for key in ("vocabulary_size", "num_layers", "hidden_dim")}

LANGUAGE = [
    classifier("BERT", "Bert", ALL, fields=CI, **SHORT),
    masked(),
    classifier(
        "ALBERT", "Albert", ALL, num_groups=1, num_inner_repetitions=1, embedding_dim=8, **SHORT
    ),
    classifier("DistilBERT", "DistilBert", **SHORT),
    teacher(),
    classifier("RoBERTa", "Roberta", **SHORT),
    classifier("XLM-RoBERTa", "XLMRoberta", **SHORT),
    backbone("ELECTRA", "Electra", ALL, size=ELECTRA, embedding_dim=8, **SHORT),
    backbone("FNet", "FNet", IDS_SEGMENTS, **SHORT),
    classifier("DeBERTa V3", "DebertaV3", bucket_size=4, **SHORT),
    backbone("XLNet", "XLNet", ALL, fields=MIXES),
    backbone("ESM", "ESM", IDS, fields=RANGE),
    backbone("RoFormer V2", "RoformerV2", IDS_SEGMENTS, head_size=8, fields=RANGE),
    generator("GPT-2", "GPT2", fields=CI, **TINY, **SHORT, dropout=0.0),
    generator("GPT-NeoX", "GPTNeoX", **TINY, dropout=0.0),
    generator("Gemma", "Gemma", fields=CI, **GEMMA),
    generator(
        "Gemma 2",
        "Gemma",
        **GEMMA,
        **SLIDING,
        attention_logit_soft_cap=50.0,
        final_logit_soft_cap=30.0,
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
    ),
    generator(
        "Gemma 3",
        "Gemma3",
        **GEMMA,
        **SLIDING,
        image_size=16,
        use_query_key_norm=True,
        query_head_dim_normalize=True,
        use_post_ffw_norm=True,
        use_post_attention_norm=True,
        vision_encoder=None,
    ),
    generator("Llama", "Llama", **GROUPED),
    generator("Mistral", "Mistral", **GROUPED, sliding_window=4),
    generator(
        "Mixtral",
        "Mixtral",
        **GROUPED,
        num_experts=4,
        top_k=2,
        sliding_window=4,
        fields=EXPERTS,
    ),
    generator("Qwen", "Qwen", **GROUPED),
    generator(
        "Qwen-MoE",
        "QwenMoe",
        fields=CI | EXPERTS,
        **GROUPED,
        **{key: MIXTURE[key] for key in MIXTURE if key != "head_dim"},
        shared_expert_intermediate_dim=16,
    ),
    generator("Qwen 3", "Qwen3", **GROUPED, head_dim=4),
    generator("Qwen 3-MoE", "Qwen3Moe", **GROUPED, **MIXTURE, fields=EXPERTS),
    generator("GPT-OSS", "GptOss", **GROUPED, num_experts=4, top_k=2, sliding_window=4),
    generator("OPT", "OPT", **TINY, **SHORT, dropout=0.0),
    generator("BLOOM", "Bloom", **TINY),
    generator("Falcon", "Falcon", **FALCON, num_attention_heads=4, intermediate_dim=32),
    generator("Phi-3", "Phi3", **GROUPED),
    generator(
        "RWKV-7",
        "RWKV7",
        vocabulary_size=17,
        num_layers=2,
        intermediate_dim=32,
        **RWKV,
        fields=DECAY,
    ),
    encoder_decoder("T5", "T5", fields=MASK),
    encoder_decoder("BART", "Bart", **SHORT),
    whisper(),
]
