"""Models of images of KerasHub, in tiny configurations with random weights."""

import importlib

import keras
import numpy as np
import tensorflow as tf
from world.entry import (
    CLASSES,
    EXAMPLES,
    FAULT,
    TRAINS,
    Entry,
    classes,
    cross_entropy,
    hub,
    hub_source,
    images,
    squares,
    to_waves,
    tokens,
    without_dropout,
)

CI = {"in_ci": True}
NORMALIZED = {"shares": True}  # by BatchNorm
PROMPTS = "its prompt encoder multiplies float16 by float32"
BOTH = "its BatchNorm and its loss both mix examples, each in its own way"


def entry(name, model, batch=images, **fields):
    """An entry of KerasHub."""
    return Entry(name, "KerasHub", model, batch, needs=("keras_hub",), **fields)


def classifier(name, prefix, size=16, fields=(), head=(), **arguments):
    """A task that classifies images; its constructor compiles it."""

    def model():
        backbone = hub(f"{prefix}Backbone", image_shape=(size, size, 3), **arguments)
        task = {"backbone": backbone, "num_classes": CLASSES, **dict(head)}
        return without_dropout(hub(f"{prefix}ImageClassifier", **task))

    def batch(random):
        return images(random, size), classes(random)

    return entry(name, model, batch, loss_fn=cross_entropy, **dict(fields))


def resnet(size=16):
    """A ResNet of three levels."""
    return hub(
        "ResNetBackbone",
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 64, 64],
        stackwise_num_blocks=[1, 1, 1],
        stackwise_num_strides=[1, 2, 2],
        block_type="basic_block",
        use_pre_activation=False,
        image_shape=(size, size, 3),
    )


def segmenter(name, model, size, outputs_of=lambda outputs: outputs, **fields):
    """Labels each pixel."""

    def batch(random):
        return images(random, size), classes(random, [size, size])

    def loss(model, batch, training, gather):
        del gather
        logits = tf.cast(outputs_of(model(batch[0], training=training)), tf.float32)
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], logits)
        return tf.reduce_mean(losses, axis=[1, 2])

    return entry(name, model, batch, loss=loss, **fields)


def deeplab():
    """DeepLab V3 on a ResNet."""
    backbone = hub(
        "DeepLabV3Backbone",
        image_encoder=resnet(32),
        low_level_feature_key="P2",
        spatial_pyramid_pooling_key="P4",
        dilation_rates=[2, 4],
        upsampling_size=4,
        image_shape=(32, 32, 3),
    )
    return hub("DeepLabV3ImageSegmenter", backbone=backbone, num_classes=CLASSES, activation=None)


def mit():
    """The encoder of SegFormer."""
    return hub("MiTBackbone", image_shape=(32, 32, 3), **MIT)


def segformer():
    """SegFormer."""
    backbone = hub("SegFormerBackbone", image_encoder=mit(), projection_filters=16)
    task = hub("SegFormerImageSegmenter", backbone=backbone, num_classes=CLASSES)
    return without_dropout(task)


def two_encoders(prefix):
    """The encoders of CLIP or SigLIP."""
    lower, sizes = prefix.lower(), {"hidden_dim": 16, "num_layers": 1, "num_heads": 2}
    sizes |= {"intermediate_dim": 32}
    vision = hub_source(
        f"{lower}.{lower}_vision_encoder",
        f"{prefix}VisionEncoder",
        patch_size=8,
        image_shape=(16, 16, 3),
        **sizes,
    )
    text = hub_source(
        f"{lower}.{lower}_text_encoder",
        f"{prefix}TextEncoder",
        vocabulary_size=17,
        embedding_dim=16,
        max_sequence_length=6,
        **sizes,
    )
    return {"vision_encoder": vision, "text_encoder": text}


def clip():
    """Images and texts are compared with each other."""

    def model():
        return hub("CLIPBackbone", projection_dim=16, **two_encoders("CLIP"))

    def loss(model, batch, training, gather):
        del training
        image, text = gather(
            [
                tf.cast(model.get_vision_embeddings(batch["images"]), tf.float32),
                tf.cast(model.get_text_embeddings(batch["token_ids"]), tf.float32),
            ]
        )
        image, text = (tf.math.l2_normalize(each, axis=-1) for each in (image, text))
        logits = tf.matmul(image, text, transpose_b=True) * tf.exp(logit_scale(model))
        labels = tf.range(tf.shape(logits)[0])
        both = [
            tf.nn.sparse_softmax_cross_entropy_with_logits(labels, each)
            for each in (logits, tf.transpose(logits))
        ]
        return tf.reduce_mean(both)

    def logit_scale(model):
        return tf.cast(tf.convert_to_tensor(model.clip_head.logit_scale), tf.float32)

    return entry("CLIP", model, pairs, loss=loss, coupled=True, in_ci=True)


def siglip():
    """The same with a loss for each pair, and a `compute_loss` of the model's own."""

    def model():
        return hub("SigLIPBackbone", **two_encoders("SigLIP"))

    def loss(model, batch, training, gather):
        del training
        image = gather(tf.cast(model.get_vision_embeddings(batch["images"]), tf.float32))
        text = gather(tf.cast(model.get_text_embeddings(batch["token_ids"]), tf.float32))
        logits, _ = model.siglip_head(image, text)
        logits = tf.cast(logits, tf.float32)
        signs = 2.0 * tf.eye(tf.shape(logits)[0]) - 1.0
        return -tf.reduce_mean(tf.reduce_sum(tf.math.log_sigmoid(signs * logits), axis=1))

    return entry("SigLIP", model, pairs, loss=loss, coupled=True)


def pairs(random):
    """Images and texts."""
    return tokens(random, names=["token_ids"]) | {"images": images(random)}


def with_own_loss(model, batch, training, gather):
    """The loss that a detector computes from all of a batch; Keras divides it by the number of replicas."""
    x, y = batch
    outputs = model(x, training=training)
    x, y, outputs = gather((x, y, outputs))
    outputs = tf.nest.map_structure(lambda leaf: tf.cast(leaf, tf.float32), outputs)
    replicas = tf.distribute.get_strategy().num_replicas_in_sync
    return replicas * model.compute_loss(x, y, outputs, None)


def retinanet():
    """A detector: each anchor is matched with a box."""

    def model():
        features = hub(
            "RetinaNetBackbone", image_encoder=resnet(32), min_level=3, max_level=4, use_p5=False
        )
        anchors = hub_anchors()
        encoder = hub_source(
            "retinanet.retinanet_label_encoder",
            "RetinaNetLabelEncoder",
            bounding_box_format="yxyx",
            anchor_generator=anchors,
        )
        return hub(
            "RetinaNetObjectDetector",
            backbone=features,
            anchor_generator=anchors,
            label_encoder=encoder,
            num_classes=CLASSES,
            bounding_box_format="yxyx",
        )

    def hub_anchors():
        return importlib.import_module("keras_hub").layers.AnchorGenerator(
            bounding_box_format="yxyx",
            min_level=3,
            max_level=4,
            num_scales=1,
            aspect_ratios=[1.0],
            anchor_size=2,
        )

    return entry(
        "RetinaNet",
        model,
        boxes,
        loss=with_own_loss,
        optimizer=lambda: keras.optimizers.SGD(1e-3),
        coupled=True,
        expected={"replicas": TRAINS},
        because=BOTH,
    )


def boxes(random, size=32, scale=32.0):
    """Images and two boxes in each."""
    corners = random.uniform(0, 0.5, size=[EXAMPLES, 2, 2])
    found = np.concatenate([corners, corners + random.uniform(0.2, 0.5, [EXAMPLES, 2, 2])], -1)
    labels = {"boxes": (scale * found).astype("float32"), "labels": classes(random, [2])}
    return images(random, size), labels


def sam():
    """Masks of what points and boxes show."""

    def model():
        encoder = hub(
            "ViTDetBackbone",
            hidden_size=16,
            num_layers=2,
            intermediate_dim=32,
            num_heads=2,
            global_attention_layer_indices=[1],
            patch_size=4,
            num_output_channels=16,
            window_size=2,
            image_shape=(16, 16, 3),
        )
        prompts = hub_source(
            "sam.sam_prompt_encoder",
            "SAMPromptEncoder",
            hidden_size=16,
            image_embedding_size=(4, 4),
            input_image_size=(16, 16),
            mask_in_channels=4,
        )
        decoder = hub_source(
            "sam.sam_mask_decoder",
            "SAMMaskDecoder",
            num_layers=2,
            hidden_size=16,
            intermediate_dim=32,
            num_heads=2,
            embedding_dim=16,
            num_multimask_outputs=3,
            iou_head_depth=2,
            iou_head_hidden_dim=8,
        )
        parts = {"image_encoder": encoder, "prompt_encoder": prompts, "mask_decoder": decoder}
        return hub("SAMImageSegmenter", backbone=hub("SAMBackbone", **parts))

    def batch(random):
        corners = random.uniform(0, 8, size=[EXAMPLES, 1, 1, 2])
        return {
            "images": images(random),
            "points": random.uniform(0, 16, size=[EXAMPLES, 1, 2]).astype("float32"),
            "labels": np.ones([EXAMPLES, 1], "float32"),
            "boxes": np.concatenate([corners, corners + 6], axis=2).astype("float32"),
            "masks": random.normal(size=[EXAMPLES, 1, 16, 16, 1]).astype("float32"),
        }

    loss = to_waves(lambda outputs: outputs["masks"])
    return entry("SAM", model, batch, loss=loss, expected={"float16": FAULT}, because=PROMPTS)


def pali_gemma():
    """A language model that sees an image."""

    def model():
        backbone = hub(
            "PaliGemmaBackbone",
            vocabulary_size=17,
            image_size=8,
            num_layers=2,
            num_query_heads=2,
            num_key_value_heads=1,
            hidden_dim=16,
            intermediate_dim=32,
            head_dim=8,
            vit_patch_size=4,
            vit_num_layers=1,
            vit_num_heads=2,
            vit_hidden_dim=16,
            vit_intermediate_dim=32,
        )
        return hub("PaliGemmaCausalLM", backbone=backbone, preprocessor=None)

    def batch(random):
        x = tokens(random) | {"images": images(random, 8)}
        x["response_mask"] = np.tile((np.arange(6) > 2).astype("int32"), [EXAMPLES, 1])
        return x, random.integers(17, size=[EXAMPLES, 6]).astype("int32")

    def loss(model, batch, training, gather):
        del gather
        logits = tf.cast(model(batch[0], training=training), tf.float32)[:, -6:]
        losses = tf.nn.sparse_softmax_cross_entropy_with_logits(batch[1], logits)
        return tf.reduce_mean(losses, axis=1)

    return entry("PaliGemma", model, batch, loss=loss)


def autoencoder():
    """The autoencoder of Stable Diffusion 3, without its draws."""

    def model():
        sizes = [[32, 32], [1, 1], [32, 32], [1, 1]]
        return hub_source(
            "vae.vae_backbone",
            "VAEBackbone",
            **dict(
                zip(
                    (
                        "encoder_num_filters",
                        "encoder_num_blocks",
                        "decoder_num_filters",
                        "decoder_num_blocks",
                    ),
                    sizes,
                    strict=True,
                )
            ),
            sampler_method="mode",
        )

    def loss(model, batch, training, gather):
        del gather
        return squares(model(batch, training=training), batch)

    return entry("VAE of Stable Diffusion 3", model, loss=loss)


MIT = {
    "layerwise_depths": [1, 1],
    "hidden_dims": [8, 16],
    "num_layers": 2,
    "layerwise_num_heads": [1, 2],
    "layerwise_sr_ratios": [4, 2],
    "max_drop_path_rate": 0.0,
    "layerwise_patch_sizes": [7, 3],
    "layerwise_strides": [4, 2],
}
PATCHES = {"num_layers": 2, "num_heads": 2, "hidden_dim": 16}

VISION = [
    classifier("ViT", "ViT", patch_size=(8, 8), mlp_dim=32, **PATCHES, fields=CI),
    classifier(
        "Swin",
        "SwinTransformer",
        embed_dim=16,
        depths=(2,),
        num_heads=(2,),
        window_size=2,
        drop_path=0.0,
    ),
    classifier("MiT", "MiT", 32, **MIT),
    classifier(
        "ResNet",
        "ResNet",
        input_conv_filters=[64],
        input_conv_kernel_sizes=[3],
        stackwise_num_filters=[64, 64],
        stackwise_num_blocks=[1, 1],
        stackwise_num_strides=[1, 2],
        block_type="basic_block",
        use_pre_activation=False,
        fields=NORMALIZED | CI,
    ),
    segmenter("DeepLab V3", deeplab, 32, shares=True),
    segmenter("SegFormer", segformer, 32, shares=True),
    clip(),
    siglip(),
    sam(),
    retinanet(),
    pali_gemma(),
    autoencoder(),
]
